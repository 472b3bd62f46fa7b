// The time of a step: its parts as one bar, and as a list that explains each.

import { byId, draw, each, make, put, say } from "./dom.js";
import { explainable } from "./explain.js";
import { percent, seconds } from "./format.js";
import { fillTable, tableOf } from "./table.js";

const WIDTH = 460, HEIGHT = 28;
let parts = [];

const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "Parts of a step", preserveAspectRatio: "none" });
const list = make("ul");
byId("split").append(svg);
byId("time-legend").append(list);
const refreshTable = tableOf(byId("time-table"), showTable);

/** @param {any} answer of `plan`, with a plan */
export function showSplit(answer) {
  parts = answer.parts;
  const step = answer.plan.time.step_s;
  say(byId("time-say"), `${seconds(step.best)}; nine runs of ten: ${seconds(step.low)} – ${seconds(step.high)}.`);
  let left = 0;
  each(svg, parts, makePiece, (piece, part) => {
    const width = WIDTH * part.share;
    put(piece, "class", `part-${part.name}`);
    put(piece, "x", left.toFixed(2));
    put(piece, "width", Math.max(0, width - (width > 2 ? 1 : 0)).toFixed(2));
    piece.dataset.figure = `time.${part.name}`;
    left += width;
  });
  each(list, parts, makeRow, (item, part) => {
    const button = item.firstElementChild;
    button.dataset.figure = `time.${part.name}`;
    const [swatch, names, value, share] = button.children;
    const [name, beside] = names.children;
    put(swatch, "class", `swatch part-${part.name}`);
    say(name, part.label);
    say(beside, part.link_label ? `of ${seconds(part.link_busy_s)} on ${part.link_label}` : "");
    say(value, seconds(part.seconds));
    say(share, percent(part.share));
  });
  refreshTable();
}

function makePiece() {
  const piece = draw("rect", { y: 0, height: HEIGHT });
  explainable(piece, () => ({ figure: piece.dataset.figure }));
  return piece;
}

function makeRow() {
  const button = make("button", { type: "button" }, make("i"), make("span", {}, make("span"), make("small")), make("b"), make("em"));
  explainable(button, () => ({ figure: button.dataset.figure }));
  return make("li", {}, button);
}

function showTable() {
  const lines = parts.map((part) => [part.label, seconds(part.seconds), percent(part.share), part.link_label ? `${seconds(part.link_busy_s)} on ${part.link_label}` : ""]);
  fillTable(byId("time-table"), "Parts of a step", ["Part", "time", "of the step", "wires busy"], lines);
}
