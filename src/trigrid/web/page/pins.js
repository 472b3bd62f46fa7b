// Two layouts side by side: A is pinned, B is on the dials. And a measured value beside the planned one.

import { ask, Superseded } from "./ask.js";
import { byId, make, put, say } from "./dom.js";
import { change, figure } from "./format.js";
import { leap, now } from "./state.js";
import { fillTable } from "./table.js";

let pinned = null;

/** Compares A with the state on the dials. */
export async function showPins() {
  byId("swap").disabled = byId("unpin").disabled = !pinned;
  if (!pinned) {
    byId("pins-table").replaceChildren();
    byId("pins-all").closest("details").hidden = true;
    return say(byId("pins-say"), "Pin the layout on the dials as A, turn them, and read what changed.");
  }
  try {
    show(await ask("compare", { a: pinned, b: now() }));
  } catch (error) {
    if (!(error instanceof Superseded)) say(byId("pins-say"), error.message);
  }
}

/** Figures that are compared at first sight. */
const FIRST = ["step_s", "tokens_per_s", "mfu_full_attention", "idle_share", "memory.total", "memory.activations", "training.seconds", "training.energy_kwh", "training.cost"];

function show(answer) {
  const what = answer.differs.map((knob) => `${knob.label} ${knob.a || "–"} → ${knob.b || "–"}`);
  say(byId("pins-say"), what.length ? `A → B: ${what.join(", ")}.` : "A and B are the same layout: turn a dial.");
  const lines = (rows) => rows.map((row) => [
    row.label, figure({ value: row.a, unit: row.unit }), figure({ value: row.b, unit: row.unit }),
    make("span", { class: `tint ${row.better === "b" ? "good" : row.better === "a" ? "bad" : "same"}` }, row.change === null ? "–" : change(row.change)), row.better ? row.better.toUpperCase() : "–"]);
  const head = ["Figure", "A", "B", "B to A", "better"];
  fillTable(byId("pins-table"), "A and B", head, lines(answer.rows.filter((row) => FIRST.includes(row.figure))));
  fillTable(byId("pins-all"), "A and B, every figure", head, lines(answer.rows));
  byId("pins-all").closest("details").hidden = false;
}

byId("pin").addEventListener("click", () => {
  pinned = structuredClone(now());
  showPins();
});
byId("unpin").addEventListener("click", () => {
  pinned = null;
  showPins();
});
byId("swap").addEventListener("click", () => {
  const here = structuredClone(now());
  const there = pinned;
  pinned = here;
  leap(there);
});

/** Figures that a run tells, the unit in which people type them, and how many of the plan's units that is. */
const MEASURABLE = [
  ["step_s", "time of a step", "s", 1],
  ["tokens_per_s", "tokens a second, all GPUs", "tokens/s", 1],
  ["tokens_per_s_per_gpu", "tokens a second and GPU", "tokens/s", 1],
  ["mfu_full_attention", "MFU, full attention", "%", 0.01],
  ["mfu_causal", "MFU, causal half", "%", 0.01],
  ["memory.allocated", "memory allocated, most", "GiB", 2 ** 30],
  ["memory.reserved", "memory reserved, most", "GiB", 2 ** 30],
  ["memory.total", "memory on the device, most", "GiB", 2 ** 30],
  ["memory.activations", "activations, most", "GiB", 2 ** 30],
];

const select = /** @type {HTMLSelectElement} */ (byId("measured-figure"));
const input = /** @type {HTMLInputElement} */ (byId("measured-value"));
select.append(...MEASURABLE.map(([name, label]) => make("option", { value: name }, label)));
select.addEventListener("change", showMeasured);
input.addEventListener("input", showMeasured);
byId("measured-form").addEventListener("submit", (event) => event.preventDefault());

/** The residual of what was typed, by the plan on the dials. */
export async function showMeasured() {
  const [name, , unit, size] = MEASURABLE[select.selectedIndex];
  say(byId("measured-unit"), unit);
  const typed = input.value.trim().replaceAll(",", "");
  put(byId("residual"), "data-kind", null);
  if (!typed) return say(byId("residual"), "");
  if (!(Number(typed) > 0)) return say(byId("residual"), `${input.value} is not a number above 0.`);
  try {
    const answer = await ask("measured", { state: now(), figure: name, value: Number(typed) * size });
    put(byId("residual"), "data-kind", answer.within_margin === null ? null : answer.within_margin ? "safe" : "tight");
    say(byId("residual"), `${answer.words}.`);
  } catch (error) {
    if (!(error instanceof Superseded)) say(byId("residual"), error.message);
  }
}
