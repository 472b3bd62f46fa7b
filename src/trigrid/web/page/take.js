// Take away: the link, the command line, files, and flags for other trainers.

import { ask, Refusal, Superseded } from "./ask.js";
import { byId, make, say } from "./dom.js";
import { now } from "./state.js";

const FILES = [
  ["job", "job.toml"],
  ["json", "Plan as JSON"],
  ["trace", "Chrome trace"],
];
const TRAINERS = [["megatron", "Megatron-LM"], ["torchtitan", "torchtitan"], ["deepspeed", "DeepSpeed"]];

byId("downloads").append(
  ...FILES.map(([name, label]) => make("button", { type: "button", on: { click: () => download(name) } }, label)),
  ...TRAINERS.map(([target, label]) => make("button", { type: "button", "aria-controls": "flags", on: { click: () => showFlags(target, label) } }, `Flags for ${label}`)));
byId("copy-command").addEventListener("click", () => copy(byId("command").textContent, byId("copy-command")));
byId("share").addEventListener("click", () => copy(location.href, byId("share")));

/** @param {any} answer of `plan` */
export function showTake(answer) {
  say(byId("command"), answer.command);
  byId("flags").hidden = true;
}

async function download(name) {
  try {
    const answer = await ask(name, { state: now() }, `take ${name}`);
    save(new Blob([answer.text], { type: answer.type }), answer.name);
    byId("flags").replaceChildren(...listed(answer.notes));
    byId("flags").hidden = answer.notes.length === 0;
  } catch (error) {
    tell(error);
  }
}

const listed = (notes) => (notes.length ? [make("ul", { class: "plain" }, ...notes.map((note) => make("li", {}, note)))] : []);

function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function showFlags(target, label) {
  try {
    const answer = await ask("export", { state: now(), target });
    const { text, notes } = answer;
    const button = make("button", { type: "button", on: { click: () => copy(text, button) } }, "Copy");
    const keep = make("button", { type: "button", on: { click: () => save(new Blob([text], { type: answer.type }), answer.name) } }, "Download");
    byId("flags").replaceChildren(
      make("h3", {}, `Flags for ${label}`), make("pre", { tabindex: "0" }, text), make("div", { class: "tools" }, button, keep),
      ...listed(notes));
    byId("flags").hidden = false;
  } catch (error) {
    tell(error);
  }
}

function tell(error) {
  if (error instanceof Superseded) return;
  byId("flags").replaceChildren(make("p", { class: "problems" }, error instanceof Refusal ? error.problems.map((p) => `${p.key}: ${p.reason}`).join("; ") : error.message));
  byId("flags").hidden = false;
}

async function copy(text, button) {
  button.dataset.label ??= button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    say(button, "Copied");
  } catch {
    // Without the right to the clipboard the text can still be taken by hand.
    prompt("Copy:", text);
  }
  setTimeout(() => say(button, button.dataset.label), 1500);
}
