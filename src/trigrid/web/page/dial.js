// One dial: a label, an entry, a slider or choices, a lock, and why a value is not legal.

import { draw, make, put, say } from "./dom.js";
import { count } from "./format.js";

/**
 * @typedef {{value: any, legal: boolean, reason?: string, also?: Record<string, any>}} Choice
 * @typedef {{key: string, label: string, help: string, unit: string, kind: "choice"|"whole"|"number"|"text", value: any,
 *   default: any, values: Choice[], recommended?: any, advanced: boolean, group: string, knob: boolean}} Control
 * @typedef {{turn: (key: string, value: any, also?: object) => void, lock: ((key: string, locked: boolean) => void)|null}} Hands
 */

const SEGMENTS = 4;

/** @param {Control} control @param {Hands} hands */
export function makeDial(control, hands) {
  return new Dial(control, hands);
}

class Dial {
  constructor(control, hands) {
    this.control = control;
    this.hands = hands;
    this.id = `dial-${control.key.replace(/\W/g, "-")}`;
    this.why = make("p", { class: "why", id: `${this.id}-why`, role: "alert", hidden: true });
    this.recommend = make("button", { type: "button", class: "recommend", on: { click: () => this.set(this.control.recommended) } });
    this.widget = widgetOf(this, control);
    this.lock = hands.lock ? lockOf(this) : null;
    // Choices in sight mark the recommended one themselves.
    const advice = control.kind === "choice" ? [] : [this.recommend];
    const head = make("div", { class: "dial-head" }, this.widget.title, ...advice, ...this.widget.entry, ...(this.lock ? [this.lock] : []));
    this.element = make("div", { class: "dial", "data-key": control.key }, head, ...this.widget.body, this.why);
    this.element.addEventListener("keydown", (event) => event.key === "Escape" && this.forgive());
    this.element.addEventListener("focusout", (event) => !this.element.contains(event.relatedTarget) && this.forgive());
  }

  /** Takes what the planner says of this dial now. @param {Control} control @param {boolean} locked @param {object} problem */
  update(control, locked, problem) {
    this.control = control;
    this.wanted = control.value;
    put(this.element, "data-illegal", Boolean(problem));
    this.illegal = problem;
    this.locked = locked;
    this.widget.update(control, problem);
    const advised = control.recommended !== null && control.recommended !== undefined && control.recommended !== control.value;
    put(this.recommend, "data-shown", advised);
    say(this.recommend, advised ? `▴ ${written(control.recommended)}` : "");
    put(this.recommend, "tabindex", advised ? null : "-1");
    put(this.recommend, "aria-label", advised ? `Use the recommended ${control.label}, ${written(control.recommended)}` : "nothing to recommend");
    if (this.lock) {
      put(this.lock, "aria-pressed", locked ? "true" : "false");
      put(this.lock, "aria-label", `Lock ${control.label}`);
    }
  }

  /** Marks another value as the recommended one. */
  advise(recommended) {
    if (recommended !== this.control.recommended) this.update({ ...this.control, recommended }, this.locked, this.illegal);
  }

  /** Asks for a value; the next key press counts from it, before the answer is here. */
  set(value) {
    this.forgive();
    this.wanted = value;
    this.hands.turn(this.control.key, value, this.control.values.find((choice) => choice.value === value)?.also);
  }

  /** Says why `choice` is not legal; the dial stays where it is. */
  refuse(choice) {
    say(this.why, `${written(choice.value)}: ${choice.reason}`);
    put(this.why, "hidden", null);
  }

  forgive() {
    put(this.why, "hidden", true);
  }
}

/** A value as a dial shows it. */
export function written(value) {
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : String(value);
  if (typeof value === "boolean") return value ? "on" : "off";
  if (Array.isArray(value)) return value.join(", ");
  return value === null || value === undefined || value === "" ? "–" : String(value);
}

function lockOf(dial) {
  const icon = draw("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" },
    draw("path", { class: "shackle", d: "M5 7V5a3 3 0 0 1 6 0v2" }), draw("rect", { x: 3, y: 7, width: 10, height: 7, rx: 1.5 }));
  const press = () => dial.hands.lock(dial.control.key, dial.lock.getAttribute("aria-pressed") !== "true");
  return make("button", { type: "button", class: "lock", title: "Keep this value in a search", on: { click: press } }, icon);
}

function widgetOf(dial, control) {
  const simple = control.values.length > 0 && control.values.length <= SEGMENTS && control.values.every((c) => written(c.value).length <= 12);
  if (control.kind === "choice") return simple ? segments(dial) : chooser(dial);
  return entry(dial, control.values.length > 1);
}

/** A label and an entry; with a slider over the values that make sense. */
function entry(dial, sliding) {
  const { id, control } = dial;
  const text = control.kind === "text";
  const input = make("input", { id, class: "entry", inputmode: text ? "text" : "decimal", spellcheck: "false", "aria-describedby": `${id}-why`, title: control.help });
  const read = () => {
    const typed = input.value.trim();
    const value = text ? typed : Number(typed.replaceAll(",", ""));
    if (typed === "") return dial.set(undefined);
    if (!text && !Number.isFinite(value)) return dial.refuse({ value: typed, reason: "a number is needed" });
    if (value !== dial.control.value) dial.set(value);
  };
  input.addEventListener("change", read);
  if (!text) input.addEventListener("keydown", (event) => stepByKey(event, dial));
  const slider = sliding ? sliderOf(dial, input) : null;
  return {
    title: make("label", { for: id, title: control.help }, control.label, ...(control.unit ? [" ", make("span", { class: "unit" }, control.unit)] : [])),
    entry: [input],
    body: slider ? [slider.element] : [],
    update(next, problem) {
      const shown = typeof next.value === "number" ? written(next.value) : (next.value ?? "");
      if (document.activeElement !== input || Number(input.value.replaceAll(",", "")) !== next.value) input.value = shown;
      put(input, "aria-invalid", problem ? "true" : null);
      slider?.update(next);
    },
  };
}

/** Up and down in the entry go to the next legal value. */
function stepByKey(event, dial) {
  const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!way || !dial.control.values.length) return;
  event.preventDefault();
  step(dial, way);
}

function step(dial, way) {
  const { values } = dial.control;
  const value = dial.wanted;
  const ahead = way > 0 ? values.filter((c) => c.value > value) : values.filter((c) => c.value < value).reverse();
  const next = ahead.find((c) => c.legal);
  const passed = ahead.slice(0, next ? ahead.indexOf(next) : ahead.length).find((c) => !c.legal);
  if (next) dial.set(next.value);
  if (passed) dial.refuse(passed);
}

function sliderOf(dial, input) {
  const range = make("input", { type: "range", min: 0, step: 1, "aria-label": dial.control.label, "aria-describedby": `${dial.id}-why` });
  const ticks = make("div", { class: "ticks", "aria-hidden": "true" });
  const place = () => {
    const { values, value } = dial.control;
    const at = values.findIndex((c) => c.value >= value);
    return at < 0 ? values.length - 1 : at;
  };
  range.addEventListener("keydown", (event) => {
    const way = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    step(dial, way);
  });
  range.addEventListener("input", () => {
    const choice = dial.control.values[Number(range.value)];
    if (choice.legal) return dial.set(choice.value);
    dial.refuse(choice);
    range.value = String(place());
  });
  return {
    element: make("div", { class: "slider" }, range, ticks),
    update(control) {
      const last = control.values.length - 1;
      put(range, "max", last);
      range.value = String(place());
      put(range, "aria-valuetext", `${written(control.value)} ${control.unit}`.trim());
      while (ticks.children.length > last + 1) ticks.lastElementChild.remove();
      while (ticks.children.length < last + 1) ticks.append(make("i"));
      control.values.forEach((choice, i) => {
        const tick = ticks.children[i];
        const kind = choice.value === control.recommended ? "best" : choice.legal ? "legal" : "illegal";
        put(tick, "class", kind);
        const left = `${last ? (100 * i) / last : 50}%`;
        if (tick.style.left !== left) tick.style.left = left;
        put(tick, "title", choice.legal ? written(choice.value) : `${written(choice.value)}: ${choice.reason}`);
      });
      if (document.activeElement !== input) put(input, "size", null);
    },
  };
}

/** Few choices, all in sight. */
function segments(dial) {
  const { id, control } = dial;
  const group = make("div", { class: "segments", role: "radiogroup", "aria-labelledby": `${id}-label`, "aria-describedby": `${id}-why` });
  const fit = (values) => {
    while (group.children.length > values.length) group.lastElementChild.remove();
    while (group.children.length < values.length) {
      const i = group.children.length;
      const radio = make("input", { type: "radio", name: id, id: `${id}-${i}` });
      radio.addEventListener("change", () => {
        const choice = dial.control.values[i];
        if (choice.legal) return dial.set(choice.value);
        dial.refuse(choice);
        show(dial.control);
      });
      group.append(make("span", { class: "segment" }, radio, make("label", { for: `${id}-${i}` })));
    }
  };
  const show = (next) => {
    fit(next.values);
    next.values.forEach((choice, i) => {
      const [radio, label] = group.children[i].children;
      radio.checked = choice.value === next.value;
      put(group.children[i], "data-legal", choice.legal ? "yes" : "no");
      put(group.children[i], "data-best", choice.value === next.recommended);
      put(group.children[i], "title", choice.legal ? null : choice.reason);
      say(label, written(choice.value));
    });
  };
  return { title: make("span", { id: `${id}-label`, class: "label", title: control.help }, control.label), entry: [group], body: [], update: show };
}

/** Many choices: a list. */
function chooser(dial) {
  const { id, control } = dial;
  const select = make("select", { id, "aria-describedby": `${id}-why`, title: control.help });
  const update = (next, problem) => {
    while (select.options.length > next.values.length) select.lastElementChild.remove();
    while (select.options.length < next.values.length) select.append(make("option"));
    next.values.forEach((choice, i) => {
      const best = choice.value === next.recommended ? " · best" : "";
      say(select.options[i], `${written(choice.value)}${best}${choice.legal ? "" : " (not legal)"}`);
      put(select.options[i], "value", i);
      if (choice.value === next.value) select.selectedIndex = i;
    });
    put(select, "aria-invalid", problem ? "true" : null);
  };
  select.addEventListener("change", () => {
    const choice = dial.control.values[select.selectedIndex];
    if (choice.legal) return dial.set(choice.value);
    dial.refuse(choice);
    update(dial.control);
  });
  return { title: make("label", { for: id, title: control.help }, control.label), entry: [select], body: [], update };
}
