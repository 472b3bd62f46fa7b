// What else could be chosen: the search, its best layouts and its Pareto front, each a press away.

import { kindOf } from "./answer.js";
import { ask, stop, Superseded } from "./ask.js";
import { labelOf, recommend } from "./controls.js";
import { byId, make, put, say } from "./dom.js";
import { written } from "./dial.js";
import { big, gib, inGib, seconds, sentence } from "./format.js";
import { leap, now } from "./state.js";
import { makeScatter } from "./scatter.js";
import { fillTable, tableOf } from "./table.js";

const drawPoints = makeScatter(byId("scatter"), "Layouts: memory of the fullest GPU against tokens a second");
/** The last search, and what was asked of it. */
let found = null;
let asked = "";
let sought = null;
let current = null;
let choosing = false;
let searches = 0;
let inSight = false;
let walking = false;
const refreshTable = tableOf(byId("choice-table"), () => found && showTable());

/** What a search from `state` depends on: all but the knobs that it opens. */
function question(state) {
  const { values, locked, ...rest } = state;
  const open = found?.open ?? [];
  const kept = Object.entries(values).filter(([key]) => locked.includes(key) || !open.includes(key)).sort();
  return JSON.stringify([rest, kept, [...locked].sort()]);
}

/** Searches where the question has changed. @param {boolean} chosen whether the best is loaded on the dials */
async function search(chosen) {
  const state = now();
  if (!state.gpus) return say(byId("choice-say"), "Say how many GPUs there are, and their layouts are searched.");
  // What was asked for by hand is not given up for what the page asks by itself.
  if (!chosen && (choosing || (found && question(state) === asked))) return;
  const mine = ++searches;
  stop("smaller");
  choosing = chosen;
  busy(chosen ? "Searching all legal layouts …" : "Looking at other layouts …", chosen);
  const started = performance.now();
  try {
    found = await ask("best", { state });
    asked = question(state);
    sought = state;
    say(byId("finding"), chosen ? sentence(`${found.words}, found in ${((performance.now() - started) / 1000).toFixed(1)} s`) : "");
    showFound();
    // Dials that were turned meanwhile are not turned back.
    if (chosen && found.fits && state === now()) leap(found.state);
  } catch (error) {
    if (error instanceof Superseded) return;
    found = null;
    say(byId("choice-say"), error.message);
    if (chosen) say(byId("finding"), error.message);
  } finally {
    if (mine === searches) rest();
  }
}

function rest() {
  choosing = false;
  put(byId("choice"), "aria-busy", null);
  put(byId("find"), "data-busy", null);
  say(byId("find"), "Find the best");
}

function busy(words, chosen) {
  put(byId("choice"), "aria-busy", "true");
  say(byId("choice-say"), words);
  if (!chosen) return;
  say(byId("finding"), words);
  put(byId("find"), "data-busy", true);
  say(byId("find"), "Searching … press to end");
}

byId("find").addEventListener("click", () => {
  if (byId("find").hasAttribute("data-busy")) {
    stop("best");
    for (const id of ["finding", "choice-say"]) say(byId(id), "The search was ended.");
  } else search(true);
});

/** Searches where the question has changed: the dials show what is best, the panel what else there is. */
export const showChoice = () => search(false);

/** The layout on the dials, as a point. @param {any} answer of `plan` */
export function standHere(answer) {
  current = answer;
  if (found) showPoints();
}

function showFound() {
  recommend(found.fits ? found.state.values : {});
  say(byId("choice-say"), [found.words, found.how, found.spare].filter(Boolean).map(sentence).join(" "));
  byId("whys").replaceChildren(...found.why.map((why) =>
    make("li", {}, make("b", {}, `${labelOf(why.key)} ${written(why.value)}`), ` — ${why.reason}`)));
  showPoints();
  refreshTable();
  goOn();
}

/** Adds to the front, one by one, what is fastest with less and less memory, while the panel is in sight. */
async function goOn() {
  if (walking || !inSight || !found?.fits || found.whole) return;
  const mine = found;
  walking = true;
  say(byId("front-say"), "Looking for layouts with less memory …");
  try {
    while (inSight && mine === found && !mine.whole) {
      const { layout } = await ask("smaller", { state: sought, than_bytes: mine.front.at(-1).total_bytes, best_s: mine.ranked[0].step_s });
      if (mine !== found) break;
      if (layout) mine.front.push(layout);
      else mine.whole = true;
      showPoints();
      refreshTable();
    }
    say(byId("front-say"), "");
  } catch (error) {
    if (!(error instanceof Superseded)) mine.whole = true;
    say(byId("front-say"), error instanceof Superseded ? "" : error.message);
  } finally {
    walking = false;
    if (mine !== found) goOn();
  }
}

new IntersectionObserver(([entry]) => {
  inSight = entry.isIntersecting;
  goOn();
}).observe(byId("choice"));

function points() {
  const seen = new Map();
  for (const [kind, layouts] of [["front", found.front], ["ranked", found.ranked]]) {
    for (const layout of layouts) if (!seen.has(layout.words)) seen.set(layout.words, { ...layout, kind });
  }
  return [...seen.values()];
}

function showPoints() {
  const dots = points().map((layout) => ({
    x: layout.total_bytes / 2 ** 30, y: layout.tokens_per_s, kind: layout.kind,
    label: `${layout.words}: ${gib(layout.total_bytes)}, ${big(layout.tokens_per_s)} tokens/s. Press to load`, press: () => leap(layout.state),
  }));
  let limit = null;
  if (current?.plan) {
    const { memory, throughput } = current.plan;
    const most = Math.max(...memory.stages.map((stage) => stage.total_bytes));
    dots.push({ x: most / 2 ** 30, y: throughput.tokens_per_s, kind: `here ${kindOf(current.verdict)}`, label: `on the dials: ${gib(most)}, ${big(throughput.tokens_per_s)} tokens/s`, press: null });
    limit = { x: memory.ceiling_bytes / 2 ** 30, label: "ceiling" };
  }
  if (dots.length) drawPoints(dots, { label: "memory of the fullest GPU, GiB", written: String }, { label: "tokens a second", written: big }, limit);
}

function showTable() {
  const lines = points().map((layout) => [
    layout.words, layout.kind === "front" ? "front" : "among the best", inGib(layout.total_bytes), big(layout.tokens_per_s), seconds(layout.step_s),
    make("button", { type: "button", class: "quiet", on: { click: () => leap(layout.state) } }, "Load")]);
  fillTable(byId("choice-table"), "Layouts found", ["Layout", "kind", "GiB", "tokens/s", "step", ""], lines);
}
