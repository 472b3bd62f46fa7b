// The state of the dials: one object, the same for the URL, the questions and the command line.

/**
 * @typedef {{model?: string, params?: string, config?: object, gpus: number, software?: string, policy?: string|null,
 *   tokens?: string, values: Record<string, any>, locked: string[]}} State
 */

/** @type {State} */
let state = { gpus: 0, values: {}, locked: [] };
/** @type {((state: State, leapt: boolean) => void)[]} */
const listeners = [];

/** @returns {State} */
export const now = () => state;

/** Calls `listener` after every change; leapt: whether it is one to come back from. */
export const onChange = (listener) => listeners.push(listener);

/** Replaces the whole state. @param {State} next */
export function load(next, leapt = false) {
  state = next;
  for (const listener of listeners) listener(state, leapt);
}

/** Replaces the state as a preset, a search or another layout does: the browser's way back leads to the one before. */
export const leap = (next) => load(next, true);

/** Keys that stand beside the job's keys, not among them. */
const OWN = ["gpus", "software", "policy", "tokens", "expandable_segments"];

/**
 * Turns one dial, and those that go along with it. A value of undefined leaves it to its default.
 * @param {string} key @param {any} value @param {Record<string, any>} [also]
 */
export function turn(key, value, also = {}) {
  const next = { ...state, values: { ...state.values } };
  for (const [name, its] of Object.entries({ [key]: value, ...also })) {
    const table = OWN.includes(name) ? next : next.values;
    if (its === undefined) delete table[name];
    else table[name] = its;
  }
  load(next);
}

/** Chooses the model: one of {model}, {params}, {config}. */
export function choose(model) {
  const { model: _m, params: _p, config: _c, ...rest } = state;
  load({ ...model, ...rest });
}

/** Locks or frees a knob for the search. */
export function lock(key, locked) {
  load({ ...state, locked: locked ? [...state.locked, key] : state.locked.filter((other) => other !== key) });
}

export function unlockAll() {
  load({ ...state, locked: [] });
}
