// A question by name. A newer question of the same turn ends the older one: the latest wins.

import { send } from "./transport.js";

/** What was refused, as the command line says it: problems of {key, value, reason, nearest}. */
export class Refusal extends Error {
  /** @param {{key: string, value: any, reason: string, nearest?: any[]}[]} problems */
  constructor(problems) {
    super(problems.map((problem) => problem.reason).join("; "));
    this.problems = problems;
  }
}

/** A newer question of the same turn has been asked: its answer counts. */
export class Superseded extends Error {}

/** @type {Map<string, AbortController>} */
const asking = new Map();

/**
 * @param {string} name @param {object} body
 * @param {string} [turn] questions of one turn supersede each other; by default those of one name
 * @returns {Promise<any>}
 */
export async function ask(name, body, turn = name) {
  asking.get(turn)?.abort();
  const mine = new AbortController();
  asking.set(turn, mine);
  try {
    const reply = await send(name, body, mine.signal);
    if ("answer" in reply) return reply.answer;
    throw new Refusal(reply.problems);
  } catch (error) {
    if (mine.signal.aborted) throw new Superseded(name);
    throw error;
  } finally {
    if (asking.get(turn) === mine) asking.delete(turn);
  }
}

/** Ends the open question of that turn. */
export function stop(turn) {
  asking.get(turn)?.abort();
}
