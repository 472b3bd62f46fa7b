// Memory: one bar for each pipeline stage, stacked by category, against the ceiling; the legend tells the stage pointed at.

import { kindOf, signed } from "./answer.js";
import { byId, draw, each, make, put, say } from "./dom.js";
import { explainable } from "./explain.js";
import { gib, inGib } from "./format.js";
import { CATEGORIES } from "./palette.js";
import { marks } from "./scale.js";
import { fillTable, tableOf } from "./table.js";

const WIDTH = 380, HEIGHT = 344, LEFT = 30, RIGHT = 4, TOP = 16, BOTTOM = 34;
const WIDEST = 64;
let answer = null;
/** The stage that the legend tells; null: the fullest. */
let told = null;
let fullest = 0;

const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "Memory of each pipeline stage against the ceiling; arrow keys go from stage to stage" });
const axis = draw("g", { class: "axis", "aria-hidden": "true" });
const bars = draw("g");
const ceiling = draw("g", { class: "ceiling", "aria-hidden": "true" }, draw("line"), draw("text"));
svg.append(draw("defs", {}, hatch()), axis, bars, ceiling);
byId("bars").append(svg);
const refreshTable = tableOf(byId("memory-table"), () => answer && showTable());
const rows = [...CATEGORIES].reverse().map(([name, label]) => legendRow(name, label, `memory.${name}`));
const legend = {
  title: make("h3", {}, "No plan is drawn yet"),
  list: make("ul", {}, ...rows.map((row) => row.item)),
  total: legendRow("total", "total on the device", "memory.total"),
  margin: legendRow("margin", "not modelled: margin", "memory.margin"),
  ceiling: legendRow("limit", "ceiling of the GPU", "memory.ceiling"),
  meters: make("p", { class: "note" }),
};
byId("memory-legend").append(legend.title, legend.list, make("ul", { class: "sums" }, legend.total.item, legend.margin.item, legend.ceiling.item), legend.meters);
svg.addEventListener("keydown", travel);
svg.addEventListener("pointerleave", () => tell(null));

/** @param {any} next an answer of `plan` with a plan */
export function showMemory(next) {
  answer = next;
  const { stages, ceiling_bytes } = answer.plan.memory;
  fullest = stages.reduce((most, stage, i) => (stage.total_bytes > stages[most].total_bytes ? i : most), 0);
  if (told !== null && told >= stages.length) told = null;
  const top = Math.max(ceiling_bytes, ...stages.map((s) => s.total_bytes + s.margin_bytes)) * 1.04;
  const inner = HEIGHT - TOP - BOTTOM;
  const y = (bytes) => TOP + inner * (1 - bytes / top);
  showAxis(top, y);
  const slot = (WIDTH - LEFT - RIGHT) / stages.length;
  const width = Math.min(WIDEST, slot * (stages.length > 24 ? 0.9 : 0.74));
  each(bars, stages, makeBar, (bar, stage, i) => showBar(bar, stage, LEFT + slot * (i + 0.5), width, y, slot, i));
  const line = y(ceiling_bytes);
  const [rule, text] = ceiling.children;
  for (const [name, value] of Object.entries({ x1: LEFT, x2: WIDTH - RIGHT, y1: line, y2: line })) put(rule, name, value);
  put(text, "x", WIDTH - RIGHT);
  put(text, "y", line - 6);
  put(text, "text-anchor", "end");
  say(text, `ceiling ${gib(ceiling_bytes)}`);
  const worst = stages[fullest];
  const who = stages.length > 1 ? `Stage ${worst.stage} is the fullest,` : "a GPU holds";
  say(byId("memory-say"), `${signed(worst.verdict)}: ${who} ${gib(worst.total_bytes)} ± ${gib(worst.margin_bytes)} of ${gib(ceiling_bytes)}.`);
  put(byId("memory-say"), "data-kind", kindOf(worst.verdict));
  showLegend();
  refreshTable();
}

function hatch() {
  return draw("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, draw("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6 }));
}

function showAxis(top, y) {
  each(axis, marks(0, top / 2 ** 30, 5), () => draw("g", {}, draw("line", { x1: LEFT, x2: WIDTH - RIGHT }), draw("text", { x: LEFT - 6, "text-anchor": "end" })), (mark, at) => {
    const [line, text] = mark.children;
    const place = y(at * 2 ** 30);
    put(line, "y1", place);
    put(line, "y2", place);
    put(text, "y", place + 4);
    say(text, String(at));
  });
}

function makeBar() {
  const boxes = CATEGORIES.map(([name]) => draw("rect", { class: `fill-${name}` }));
  const margin = draw("rect", { class: "margin", fill: "url(#hatch)" });
  const bar = draw("g", { class: "bar", role: "img", tabindex: "-1" }, draw("rect", { class: "reach" }), ...boxes, margin,
    draw("text", { class: "above", "text-anchor": "middle" }), draw("text", { class: "below", "text-anchor": "middle" }), draw("text", { class: "ends", "text-anchor": "middle" }));
  bar.addEventListener("pointerenter", () => tell(indexOf(bar)));
  bar.addEventListener("focus", () => tell(indexOf(bar)));
  for (const [i, box] of boxes.entries()) explainable(box, () => ({ figure: `memory.${CATEGORIES[i][0]}`, stage: indexOf(bar) }));
  explainable(margin, () => ({ figure: "memory.margin", stage: indexOf(bar) }));
  bar.addEventListener("keydown", (event) => event.key === "Enter" && rows.at(-1).button.focus());
  return bar;
}

const indexOf = (bar) => [...bars.children].indexOf(bar);

function showBar(bar, stage, middle, width, y, slot, index) {
  const [reach, ...rest] = bar.children;
  const boxes = rest.slice(0, CATEGORIES.length);
  const [margin, above, below, ends] = rest.slice(CATEGORIES.length);
  const left = middle - width / 2;
  box(reach, middle - slot / 2, TOP, slot, HEIGHT - TOP - BOTTOM);
  let held = 0;
  CATEGORIES.forEach(([name], i) => {
    const size = stage.by_category[name] ?? 0;
    box(boxes[i], left, y(held + size), width, y(held) - y(held + size));
    held += size;
  });
  box(margin, left, y(held + stage.margin_bytes), width, y(held) - y(held + stage.margin_bytes));
  const roomy = slot >= 30;
  place(above, middle, y(held + stage.margin_bytes) - 5, roomy ? inGib(stage.total_bytes) : "");
  const every = Math.ceil(22 / slot);
  place(below, middle, HEIGHT - BOTTOM + 14, index % every ? "" : String(stage.stage));
  place(ends, middle, HEIGHT - BOTTOM + 27, slot >= 46 ? endsOf(index) : "");
  put(bar, "data-kind", kindOf(stage.verdict));
  put(bar, "tabindex", index === (told ?? fullest) ? "0" : "-1");
  put(bar, "aria-label", `stage ${stage.stage}${wordsOf(index)}; ${gib(stage.total_bytes)}, ${stage.verdict}`);
}

function box(rect, x, y, width, height) {
  put(rect, "x", x.toFixed(1));
  put(rect, "y", y.toFixed(2));
  put(rect, "width", width.toFixed(1));
  put(rect, "height", Math.max(0, height).toFixed(2));
}

function place(text, x, y, words) {
  put(text, "x", x.toFixed(1));
  put(text, "y", y.toFixed(1));
  say(text, words);
}

/** What only the first and the last stage hold, which are heavier for it. */
const endsOf = (index) => answer.stages[index].units.map((unit) => unit.kind).filter((kind) => kind === "embedding" || kind === "head").join(", ");
const wordsOf = (index) => `: ${answer.stages[index].words}`;

function legendRow(name, label, figureName) {
  const button = make("button", { type: "button" }, make("i", { class: `swatch fill-${name}` }), make("span", {}, label), make("b"));
  explainable(button, () => ({ figure: figureName, stage: told ?? fullest }));
  return { name, item: make("li", {}, button), button, value: button.lastElementChild };
}

function tell(index) {
  told = index;
  if (!answer) return;
  [...bars.children].forEach((bar, i) => put(bar, "tabindex", i === (told ?? fullest) ? "0" : "-1"));
  showLegend();
}

function showLegend() {
  const index = told ?? fullest;
  const stage = answer.plan.memory.stages[index];
  const many = answer.plan.memory.stages.length > 1;
  const title = `Stage ${stage.stage}${wordsOf(index)}${many && index === fullest ? " · fullest" : ""}`;
  say(legend.title, title);
  put(legend.title, "title", title);
  for (const row of rows) {
    const size = stage.by_category[row.name] ?? 0;
    say(row.value, inGib(size));
    put(row.item, "data-none", size === 0);
  }
  say(legend.total.value, inGib(stage.total_bytes));
  say(legend.margin.value, `± ${inGib(stage.margin_bytes)}`);
  say(legend.ceiling.value, `${inGib(answer.plan.memory.ceiling_bytes)} GiB`);
  say(legend.meters, `allocated ${gib(stage.allocated_bytes)} ≤ reserved ${gib(stage.reserved_bytes)} ≤ device ${gib(stage.total_bytes)}`);
  [...bars.children].forEach((bar, i) => put(bar, "data-told", i === index));
}

function travel(event) {
  const way = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!way) return;
  event.preventDefault();
  const last = bars.children.length - 1;
  const next = Math.max(0, Math.min(last, (told ?? fullest) + way));
  tell(next);
  bars.children[next].focus();
}

function showTable() {
  const head = ["Stage", ...CATEGORIES.map(([, label]) => label), "total", "margin", "verdict"];
  const lines = answer.plan.memory.stages.map((stage, i) => [
    `${stage.stage}${wordsOf(i)}`, ...CATEGORIES.map(([name]) => inGib(stage.by_category[name] ?? 0)),
    inGib(stage.total_bytes), `± ${inGib(stage.margin_bytes)}`, stage.verdict]);
  fillTable(byId("memory-table"), "Memory of each pipeline stage, in GiB", head, lines);
}
