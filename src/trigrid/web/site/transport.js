// Questions answered in this browser, by workers, with no server: those that are quick and those that take seconds
// apart, so that dials stay quick while a search goes on.

import { SLOW } from "./slow.js";

/** What an answer that nobody wants any more may still take; then its worker ends, for Python takes seconds to start. */
const GRACE_MS = 3000;

/** One worker and the questions before it. One at a time is with it, so that one no longer wanted costs nothing. */
class Desk {
  constructor() {
    this.waiting = [];
    this.count = 0;
    this.open();
  }

  open() {
    this.current = null;
    this.broken = null;
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => this.hear(data));
    this.worker.addEventListener("error", (event) => this.fail(event.message || "worker.js cannot be loaded"));
  }

  ask(name, body, signal) {
    return new Promise((resolve, reject) => {
      if (signal?.aborted || this.broken) return reject(signal?.reason ?? this.broken);
      const question = { id: ++this.count, name, body, resolve, reject };
      signal?.addEventListener("abort", () => this.drop(question, signal.reason), { once: true });
      this.waiting.push(question);
      this.next();
    });
  }

  next() {
    if (this.current || !this.waiting.length) return;
    this.current = this.waiting.shift();
    const { id, name, body } = this.current;
    this.worker.postMessage({ id, name, body });
  }

  drop(question, reason) {
    question.reject(reason);
    this.waiting = this.waiting.filter((other) => other !== question);
    if (this.current === question) setTimeout(() => this.end(question), GRACE_MS);
  }

  end(question) {
    if (this.current !== question) return;
    this.worker.terminate();
    this.open();
    this.next();
  }

  hear({ id, reply, failed }) {
    if (this.current?.id !== id) return;
    const { resolve, reject } = this.current;
    this.current = null;
    if (failed === undefined) resolve(reply);
    else reject(new Error(failed));
    this.next();
  }

  fail(reason) {
    this.broken = new Error(reason);
    for (const { reject } of [this.current, ...this.waiting].filter(Boolean)) reject(this.broken);
    this.current = null;
    this.waiting = [];
  }
}

// Until the first answer takes its place.
document.getElementById("headline").textContent = "Python is on its way into this browser: 14 MB, the first time.";

/** @type {{quick?: Desk, long?: Desk}} */
const desks = {};

/**
 * @param {string} name @param {object} body @param {AbortSignal} [signal]
 * @returns {Promise<{answer?: any, problems?: any[]}>}
 */
export async function send(name, body, signal) {
  const place = SLOW.has(name) ? "long" : "quick";
  desks[place] ??= new Desk();
  const { sound, text } = await desks[place].ask(name, JSON.stringify(body), signal);
  return sound ? { answer: JSON.parse(text) } : JSON.parse(text);
}
