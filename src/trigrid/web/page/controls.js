// All dials: made from what the planner says of them, then updated in place.

import { byId, put, say } from "./dom.js";
import { makeDial } from "./dial.js";
import { lock, now, turn } from "./state.js";

/** @type {Map<string, ReturnType<typeof makeDial>>} */
const dials = new Map();
/** @type {Record<string, any>} */
let advice = {};

/** @param {import("./dial.js").Control[]} controls @param {{key: string, reason: string}[]} problems */
export function showControls(controls, problems) {
  // Where not even a model is described there are none: the dials stay as they were.
  if (!controls.length) return;
  const { locked } = now();
  const known = new Set(controls.map((control) => control.key));
  for (const [key, dial] of dials) {
    if (known.has(key)) continue;
    dial.element.remove();
    dials.delete(key);
  }
  for (const control of controls) {
    let dial = dials.get(control.key);
    if (!dial) {
      dial = makeDial(control, { turn, lock: control.knob ? lock : null });
      dials.set(control.key, dial);
      groupOf(control).append(dial.element);
    }
    // Where the fault lies with another dial no value of this one is legal: then all may be tried.
    const stuck = problems.length > 0 && !control.values.some((choice) => choice.legal);
    const values = stuck ? control.values.map((choice) => ({ ...choice, legal: true })) : control.values;
    const told = { ...control, values, recommended: control.knob ? (advice[control.key] ?? null) : null };
    dial.update(told, locked.includes(control.key), problems.find((problem) => problem.key === control.key));
  }
  put(byId("unlock"), "disabled", locked.length === 0);
  say(byId("unlock"), locked.length ? `Unlock ${locked.length}` : "Unlock all");
}

/** Marks what a search has found best. @param {Record<string, any>} best values of job keys */
export function recommend(best) {
  advice = best;
  for (const dial of dials.values()) if (dial.control.knob) dial.advise(best[dial.control.key] ?? null);
}

/** The label of a dial, for sentences about it. */
export const labelOf = (key) => dials.get(key)?.control.label ?? key;

/** Where the dials of a group stand, if they are not folded away. */
const PLACES = { cluster: "cluster", layout: "layout", batch: "batch", cost: "batch" };

function groupOf(control) {
  const name = (control.advanced ? undefined : PLACES[control.group]) ?? "advanced";
  return document.querySelector(`[data-group="${name}"]`);
}
