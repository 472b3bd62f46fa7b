// The memory wall of the whole model against one server, and ZeRO's stages side by side.

import { kindOf, signed } from "./answer.js";
import { byId, each, make, put, say } from "./dom.js";
import { explainable } from "./explain.js";
import { gb, inGib, seconds } from "./format.js";
import { leap } from "./state.js";
import { fillTable } from "./table.js";

const BARS = [
  ["state", "the model's state", "memory_wall.state", (wall) => wall.state_bytes],
  ["server", "HBM of one server", "memory_wall.server", (wall) => wall.server_bytes],
];

/** The stage on the dials. */
let here = 0;

/** @param {any} answer of `plan`, with a plan */
export function showWall(answer) {
  here = answer.plan.layout.zero;
  const wall = answer.memory_wall;
  const most = Math.max(wall.state_bytes, wall.server_bytes);
  say(byId("wall-say"), wall.deficit_bytes > 0
    ? `${gb(wall.deficit_bytes)} more than one server holds, at ${wall.bytes_per_parameter} bytes per parameter, before any activation.`
    : `One server holds the state, at ${wall.bytes_per_parameter} bytes per parameter, before any activation.`);
  each(byId("wall-bars"), BARS, makeBar, (row, [kind, label, figure, size]) => {
    row.dataset.figure = figure;
    const [name, track, value] = row.children;
    say(name, label);
    put(track.firstElementChild, "class", `length ${kind}`);
    track.firstElementChild.style.width = `${(100 * size(wall)) / most}%`;
    say(value, gb(size(wall)));
  });
}

function makeBar() {
  const row = make("button", { type: "button", class: "meter" }, make("span"), make("span", { class: "track" }, make("i")), make("b"));
  explainable(row, () => ({ figure: row.dataset.figure }));
  return row;
}

const STATE = ["weights", "master", "gradients", "optimizer"];
const WORDS = { weights: "weights", master: "master", gradients: "grads", optimizer: "moments" };

/** @param {any} answer of the question `zero` */
export function showZero(answer) {
  say(byId("zero-say"), `Unsharded, ${answer.policy.words}. What is left of it on the fullest GPU, in GiB, and in bytes per parameter:`);
  const lines = answer.stages.map((stage) => {
    return [
      make("b", {}, `ZeRO-${stage.zero}`),
      ...STATE.map((name) => (stage.legal ? inGib(stage.by_category[name] ?? 0) : "–")),
      stage.legal ? stage.bytes_per_parameter.toFixed(2) : "–",
      stage.legal ? inGib(stage.total_bytes) : "–",
      stage.legal ? seconds(stage.step_s) : "–",
      !stage.legal ? make("span", { class: "muted" }, stage.reason) : make("span", { class: "verdict small", "data-kind": kindOf(stage.verdict) }, signed(stage.verdict)),
      stage.zero === here ? make("span", { class: "muted" }, "on the dials") : stage.legal ? make("button", { type: "button", class: "quiet", "aria-label": `Try ZeRO ${stage.zero}`, on: { click: () => leap(stage.state) } }, "Try") : "",
    ];
  });
  fillTable(byId("zero-table"), "ZeRO stages", ["Stage", ...STATE.map((name) => WORDS[name]), "bytes/p.", "total", "step", "verdict", ""], lines);
  fillTable(byId("policy-table"), "Precision policies: bytes of a parameter", ["Policy", "weights", "master", "grads", "moments", "total"],
    answer.policies.map((policy) => [policy.name, ...["weights", "master", "gradients", "moments", "total"].map((name) => String(policy[name]))]));
}

