// The page: a turn of a dial asks for the plan at once; what lies deeper is asked when the hand rests and it is in sight.

import { showAnswer } from "./answer.js";
import { ask, Superseded } from "./ask.js";
import { showFitting, showSensitivity } from "./beside.js";
import { showChoice, standHere } from "./choice.js";
import { showCluster } from "./cluster.js";
import { showControls } from "./controls.js";
import { byId, make, put, say } from "./dom.js";
import { showTimeline } from "./lanes.js";
import { showMemory } from "./memory.js";
import { makeModel, showModel } from "./model.js";
import { showMeasured, showPins } from "./pins.js";
import { showPresets } from "./presets.js";
import { showSplit } from "./split.js";
import { load, now, onChange, unlockAll } from "./state.js";
import { showTake } from "./take.js";
import { listenForTheme } from "./themes.js";
import { showWall, showZero } from "./wall.js";

const REST_MS = 140;
const SEARCH_MS = 800;
const LINK_MS = 250;
/** Panels that ask for themselves: what is asked, and who shows it. */
const PANELS = [
  ["timeline", () => showAnswerOf("timeline", showTimeline)],
  ["cluster", () => showAnswerOf("cluster", showCluster)],
  ["zero", () => showAnswerOf("zero", showZero)],
  ["sensitivity", () => showAnswerOf("sensitivity", showSensitivity)],
  ["fitting", () => showAnswerOf("fitting", showFitting)],
  ["pins", showPins],
  ["measured", showMeasured],
];
let turns = 0;
/** The state that the last plan was for, where it is legal; a newer one may not be. */
let legal = null;
let resting = 0;
let searching = 0;
let linking = 0;
let query = "";

async function showAnswerOf(name, show) {
  const state = now();
  const answer = await ask(name, { state });
  // Dials that have been turned meanwhile ask again.
  if (state === now()) show(answer);
}

/** Asks for the plan of the state as it is and draws it. */
async function answerNow() {
  const state = now();
  let answer;
  try {
    answer = await ask("plan", { state });
  } catch (error) {
    if (!(error instanceof Superseded)) trouble(error);
    return;
  }
  showControls(answer.controls, answer.problems ?? []);
  showModel(answer.shape);
  showAnswer(answer);
  if (answer.plan) {
    showMemory(answer);
    showSplit(answer);
    showNotes(answer);
    showWall(answer);
    standHere(answer);
  }
  showTake(answer);
  legal = answer.plan ? state : null;
  put(byId("answer"), "data-turn", ++turns);
  query = answer.query;
  clearTimeout(linking);
  linking = setTimeout(writeAddress, LINK_MS);
  clearTimeout(resting);
  clearTimeout(searching);
  if (!legal) return;
  resting = setTimeout(askDeeper, REST_MS);
  searching = setTimeout(() => isHidden() || showChoice(), SEARCH_MS);
}

/** While a run is in view the planner rests: it costs the machine that trains. */
const isHidden = () => document.body.dataset.view === "run";
const writeAddress = () => query && !isHidden() && history.replaceState(null, "", `#${query}`);

/** Leaves the state before a leap in the browser's history. */
function keepAddress() {
  clearTimeout(linking);
  writeAddress();
  history.pushState(null, "", location.href);
}

function showNotes({ plan, assumed, words }) {
  byId("warnings").replaceChildren(...(plan.warnings.length ? plan.warnings : [{ code: "none", message: "Nothing: no golden rule is broken and no traffic is multiplied." }])
    .map((note) => make("li", { "data-code": note.code }, note.message)));
  const known = [...assumed, ...plan.assumptions, `training: ${words.training}`, `goodput: ${words.goodput}`];
  byId("assumptions").replaceChildren(...known.map((text) => make("li", {}, text)));
}

function trouble(error) {
  say(byId("verdict"), "✕ NO ANSWER");
  put(byId("verdict"), "data-kind", "over");
  say(byId("headline"), error.problems ? error.problems.map((p) => `${p.key}: ${p.reason}`).join("; ") : `${error.message}. Is the server still running?`);
  put(byId("answer"), "data-stale", true);
}

/** Which panels are in sight, and for which of them the answer is old. */
const inSight = new Set();
const old = new Set();

async function askDeeper() {
  if (isHidden()) return;
  for (const [name, show] of PANELS) {
    if (legal !== now()) return;
    if (!old.has(name) || !inSight.has(name)) continue;
    old.delete(name);
    try {
      await show();
    } catch (error) {
      if (error instanceof Superseded) return;
      const line = document.getElementById(`${name}-say`);
      if (line) say(line, error.message);
    }
  }
}

function watchPanels() {
  const seen = (entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) inSight.add(entry.target.id);
      else inSight.delete(entry.target.id);
    }
    if (turns) askDeeper();
  };
  const watcher = new IntersectionObserver(seen, { rootMargin: "200px" });
  for (const [name] of PANELS) watcher.observe(byId(name));
}

/** Loads the state that the address holds; else that of the catalogue's default. */
async function loadAddress(fallback) {
  const state = await stateOfAddress(fallback);
  if (state) load(state);
}

/** The same state; null where the address has changed again. */
async function stateOfAddress(fallback) {
  put(byId("link-trouble"), "hidden", true);
  const query = location.hash.slice(1);
  if (!query.includes("=")) return fallback;
  try {
    return (await ask("link", { query })).state;
  } catch (error) {
    if (error instanceof Superseded) return null;
    const why = error.problems ? error.problems.map((p) => `${p.key} ${p.value}: ${p.reason}`).join("; ") : error.message;
    say(byId("link-trouble"), `The link cannot be read: ${why}. This is the planner's own first layout.`);
    put(byId("link-trouble"), "hidden", null);
    return fallback;
  }
}

async function start() {
  listenForTheme();
  const catalogue = await ask("catalogue", {});
  makeModel(catalogue);
  onChange((_, leapt) => {
    for (const [name] of PANELS) old.add(name);
    if (leapt) keepAddress();
    answerNow();
  });
  watchPanels();
  byId("unlock").addEventListener("click", unlockAll);
  addEventListener("hashchange", () => {
    // A jump to a part of the page is no state.
    if (location.hash.includes("=")) loadAddress(catalogue.default);
    else writeAddress();
  });
  byId("dials").addEventListener("submit", (event) => event.preventDefault());
  if (matchMedia("(max-width: 760px)").matches) for (const group of document.querySelectorAll("details.group")) group.open = false;
  await loadAddress(catalogue.default);
  if (catalogue.run) import("./run.js").then(({ openRun }) => openRun(catalogue.run)).catch(trouble);
  ask("presets", {}).then(showPresets).catch((error) => say(byId("presets-say"), error.message));
}

start().catch(trouble);
