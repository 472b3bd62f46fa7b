// What lies beside the layout on the dials: each knob one notch, and the nearest layouts that fit.

import { kindOf, signed } from "./answer.js";
import { byId, draw, make, put, replace, say } from "./dom.js";
import { change, gib, seconds, sentence } from "./format.js";
import { leap } from "./state.js";
import { fillTable } from "./table.js";

/** Changes of this size fill half a gauge. */
const FULL = 0.5;

/** @param {any} answer of the question `sensitivity` */
export function showSensitivity(answer) {
  const legal = answer.rows.filter((row) => row.legal);
  // Another batch or cluster is another question, not a better answer to this one.
  const isLayout = (row) => row.key.startsWith("parallel.") || row.key === "batch.micro_batch";
  const gain = legal.filter((row) => isLayout(row) && row.step_change < -5e-4 && row.verdict !== "DOES NOT FIT").length;
  const told = gain ? `${gain} single ${gain === 1 ? "change" : "changes"} of the layout would be faster and fit.` : "No single change of the layout is faster and fits.";
  say(byId("sensitivity-say"), answer.words || told);
  const lines = legal.map((row) => {
    const tint = !isLayout(row) || Math.abs(row.step_change) < 5e-4 ? "same" : row.step_change < 0 ? "good" : "bad";
    return [
      make("span", {}, make("b", {}, row.label), ` ${row.value || "–"} → ${row.to}`), gauge(row.step_change, tint), make("span", { class: `tint ${tint}` }, change(row.step_change)), more(row.bytes_change),
      make("span", { class: "verdict small", "data-kind": kindOf(row.verdict) }, signed(row.verdict)),
      make("button", { type: "button", class: "quiet", "aria-label": `Try ${row.label} at ${row.to}`, on: { click: () => leap(row.state) } }, "Try")];
  });
  fillTable(byId("sensitivity-table"), "Each knob one notch", ["Knob", "", "step", "memory", "verdict", ""], lines);
  const not = answer.rows.filter((row) => !row.legal);
  const [summary, list] = byId("not-legal").children;
  say(summary, `${not.length} notches are not legal`);
  list.replaceChildren(...not.map((row) => make("li", {}, make("b", {}, `${row.label} ${row.to}`), `: ${row.reason}`)));
  put(byId("not-legal"), "hidden", not.length === 0);
}

/** A change as a bar to the left or right of the middle. */
function gauge(share, tint) {
  const width = Math.min(1, Math.abs(share) / FULL) * 48;
  return draw("svg", { class: "gauge", viewBox: "0 0 96 10", "aria-hidden": "true" },
    draw("rect", { class: tint, x: share < 0 ? 48 - width : 48, y: 1, width, height: 8 }), draw("line", { x1: 48, x2: 48, y1: 0, y2: 10 }));
}

const more = (bytes) => `${bytes > 0 ? "+" : bytes < 0 ? "−" : "±"}${gib(Math.abs(bytes))}`;

/** @param {any} answer of the question `fitting` */
export function showFitting(answer) {
  say(byId("fitting-say"), sentence(answer.words));
  const changes = answer.changes.map((change) => ({ what: change.what, ...change.layout }));
  const known = new Set(changes.map((change) => change.words));
  const nearest = answer.nearest && !known.has(answer.nearest.words) ? [{ what: "with all knobs open", ...answer.nearest }] : [];
  const ways = [...changes, ...nearest];
  replace(byId("fitting-list"), ...ways.map((way) =>
    make("li", {}, make("span", {}, make("b", {}, way.what), make("br"), make("small", {}, way.words)), make("small", {}, `${seconds(way.step_s)}, ${gib(way.total_bytes)}`),
      make("button", { type: "button", class: "quiet", "aria-label": `Load the layout ${way.what}`, on: { click: () => leap(way.state) } }, "Load"))));
  put(byId("fitting-list"), "hidden", ways.length === 0);
}
