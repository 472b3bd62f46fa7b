// Why a figure is what it is: formula, inputs and source, beside the figure that is pointed at or focused.

import { ask, Superseded } from "./ask.js";
import { byId, make, say } from "./dom.js";
import { anything, figure } from "./format.js";
import { now } from "./state.js";

const PATIENCE_MS = 350;
/** @type {Element|null} */
let anchor = null;
let pinned = false;
let timer = 0;

/**
 * Makes `element` explain itself: on hover after a moment, on focus by Enter, and pinned by a click.
 * @param {Element} element @param {() => {figure: string, stage?: number}|null} what
 */
export function explainable(element, what) {
  element.addEventListener("pointerenter", (event) => {
    if (pinned || event.pointerType === "touch") return;
    clearTimeout(timer);
    timer = setTimeout(() => open(element, what(), false), PATIENCE_MS);
  });
  element.addEventListener("pointerleave", () => {
    clearTimeout(timer);
    if (!pinned) close();
  });
  element.addEventListener("focus", () => element.matches(":focus-visible") && !pinned && open(element, what(), false));
  element.addEventListener("blur", () => !pinned && close());
  element.addEventListener("click", () => {
    clearTimeout(timer);
    if (pinned && anchor === element) return close();
    open(element, what(), true);
  });
}

async function open(element, wanted, pin) {
  if (!wanted?.figure) return;
  anchor = element;
  pinned = pin;
  try {
    const answer = await ask("explain", { state: now(), ...wanted });
    if (anchor === element) show(answer);
  } catch (error) {
    if (error instanceof Superseded) return;
    if (anchor === element) refuse(wanted.figure, error);
  }
}

function show(answer) {
  say(byId("explain-title"), `${answer.label ?? answer.figure}: ${figure(answer)}`);
  const rows = Object.entries(answer.inputs).map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, anything(value))));
  byId("explain-body").replaceChildren(
    make("p", { class: "formula" }, answer.formula),
    make("table", {}, make("caption", { class: "off-screen" }, "Inputs"), make("tbody", {}, ...rows)),
    make("p", { class: "source" }, `Source: ${answer.source}`));
  place();
  // The box has no focus of its own: who came by the keys hears it.
  if (anchor === document.activeElement) say(byId("aloud"), `${byId("explain-title").textContent}. ${answer.formula}. Source: ${answer.source}`);
}

function refuse(name, error) {
  say(byId("explain-title"), name);
  byId("explain-body").replaceChildren(make("p", {}, error.message));
  place();
}

/** Beside its anchor, inside the window. */
function place() {
  const box = byId("explain");
  box.hidden = false;
  box.dataset.pinned = pinned ? "yes" : "no";
  const at = anchor.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = box;
  const left = Math.max(8, Math.min(at.left + at.width / 2 - width / 2, innerWidth - width - 8));
  const below = at.bottom + 8;
  const top = below + height < innerHeight - 8 ? below : Math.max(8, at.top - height - 8);
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

function close() {
  byId("explain").hidden = true;
  anchor = null;
  pinned = false;
}

addEventListener("keydown", (event) => event.key === "Escape" && close());
addEventListener("scroll", () => !byId("explain").hidden && close(), { passive: true });
addEventListener("click", (event) => pinned && !byId("explain").contains(event.target) && !anchor?.contains(event.target) && close());
byId("explain-close").addEventListener("click", close);
