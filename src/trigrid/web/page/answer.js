// The answer: the verdict in colour and words, the figures that matter, and what is not legal with its way out.

import { byId, each, make, put, replace, say } from "./dom.js";
import { written } from "./dial.js";
import { big, count, figure, percent, seconds } from "./format.js";
import { explainable } from "./explain.js";
import { turn } from "./state.js";

/** A tile: its label, the figure that it explains, its text, and the small print. */
const TILES = [
  { label: "Step", figure: "step_s", text: (a) => figure(a.figures.step_s), small: (a) => `${seconds(a.figures["step_s.low"].value)} – ${seconds(a.figures["step_s.high"].value)}` },
  { label: "Tokens/s", figure: "tokens_per_s", text: (a) => big(a.figures.tokens_per_s.value), small: (a) => `${count(a.figures.tokens_per_s_per_gpu.value)} per GPU` },
  { label: "MFU", figure: "mfu_full_attention", text: (a) => figure(a.figures.mfu_full_attention), small: (a) => `causal half ${percent(a.figures.mfu_causal.value)}` },
  { label: "Idle share", figure: "idle_share", text: (a) => figure(a.figures.idle_share), small: (a) => `${percent(a.figures["idle_share.equal"].value)} if equal` },
  { label: "Data parallel", figure: null, id: "dp", text: (a) => count(a.dp), small: (a) => (a.spare_gpus ? `${count(a.spare_gpus)} GPUs spare` : "model copies") },
  { label: "Microbatches", figure: null, id: "microbatches", text: (a) => count(a.microbatches), small: () => "per pipeline" },
  { label: "Training", figure: "training.seconds", text: (a) => seconds(a.training.seconds), small: (a) => `${big(a.training.tokens)} tokens` },
  { label: "Cost", figure: "training.cost", fallback: "training.energy_kwh", text: (a) => (a.training.cost ? big(a.training.cost) : `${big(a.training.energy_kwh)}`), small: (a) => (a.training.cost ? `${big(a.training.energy_kwh)} kWh` : "kWh, no price") },
];

const KINDS = { SAFE: "safe", TIGHT: "tight", "DOES NOT FIT": "over" };
const SIGNS = { SAFE: "✓", TIGHT: "!", "DOES NOT FIT": "✕" };

/** The class and sign of a verdict. */
export const kindOf = (verdict) => KINDS[verdict] ?? "none";
export const signed = (verdict) => `${SIGNS[verdict] ?? "–"} ${verdict}`;

/** @param {any} answer of the question `plan` */
export function showAnswer(answer) {
  const legal = Boolean(answer.plan);
  const verdict = legal ? answer.verdict : "NOT LEGAL";
  put(byId("verdict"), "data-kind", legal ? kindOf(verdict) : "over");
  say(byId("verdict"), legal ? signed(verdict) : `✕ ${verdict}`);
  const stale = byId("tiles").children.length > 0 ? " What is below belongs to the last layout that did." : "";
  say(byId("headline"), legal ? answer.headline : `These dials do not go together.${stale}`);
  put(byId("answer"), "data-stale", !legal);
  showProblems(answer.problems ?? []);
  say(byId("aloud"), legal ? `${verdict}. ${answer.headline}` : `Not legal: ${answer.problems.map((p) => p.reason).join("; ")}`);
  const brief = legal ? `${verdict} · ${seconds(answer.figures.step_s.value)} · ${big(answer.figures.tokens_per_s.value)} tokens/s · MFU ${percent(answer.figures.mfu_full_attention.value)}` : verdict;
  say(byId("brief"), brief);
  put(byId("brief"), "data-kind", legal ? kindOf(verdict) : "over");
  document.title = legal ? `${verdict}: ${answer.shape.name} on ${count(answer.world)} GPUs · trigrid planner` : `${verdict} · trigrid planner`;
  say(byId("grid"), legal ? [answer.words.grid, answer.words.batch].filter(Boolean).join("; ") : "");
  if (!legal) return;
  each(byId("tiles"), TILES, makeTile, (tile, spec) => showTile(tile, spec, answer));
}

function makeTile() {
  const button = make("button", { type: "button", class: "tile" }, make("span", { class: "name" }), make("strong"), make("small"));
  return make("li", {}, button);
}

function showTile(tile, spec, answer) {
  const button = tile.firstElementChild;
  const [name, strong, small] = button.children;
  say(name, spec.label);
  say(strong, spec.text(answer));
  say(small, spec.small(answer));
  const named = spec.figure && answer.figures[spec.figure] ? spec.figure : (spec.fallback ?? spec.figure);
  put(button, "data-figure", named ?? spec.id);
  if (!button.dataset.explains) {
    button.dataset.explains = "yes";
    if (spec.figure) explainable(button, () => ({ figure: button.dataset.figure }));
    else put(button, "disabled", true);
  }
}

/** Each problem as the command line says it, with the nearest legal values to press. */
function showProblems(problems) {
  const box = byId("problems");
  put(box, "hidden", problems.length === 0);
  replace(box, ...problems.map((problem) =>
    make("p", {}, make("b", {}, `${problem.key} ${written(problem.value)}: `), problem.reason, ...ways(problem))));
}

function ways(problem) {
  const values = (problem.nearest ?? []).filter((value) => typeof value !== "object");
  return values.map((value) => make("button", { type: "button", class: "way", on: { click: () => turn(problem.key, value) } }, written(value)));
}
