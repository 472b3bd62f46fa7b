// Which model: a name of the catalogue, a size alone, or a config.json that is opened or dropped.

import { byId, make, put, say } from "./dom.js";
import { big } from "./format.js";
import { choose, now } from "./state.js";

const MOST_BYTES = 64 * 1024;
const parts = {};

/** Builds the fieldset. @param {{models: {name: string, family: string, parameters: number}[]}} catalogue */
export function makeModel(catalogue) {
  const families = new Map();
  for (const m of catalogue.models) families.set(m.family, [...(families.get(m.family) ?? []), m]);
  const option = (m) => make("option", { value: m.name }, `${m.name} · ${big(m.parameters)}`);
  parts.select = make("select", { id: "model-name", on: { change: () => chosen(parts.select.value) } });
  for (const [family, models] of families) {
    parts.select.append(make("optgroup", { label: family }, ...models.map(option)));
  }
  parts.other = make("option", { value: "", hidden: true }, "own");
  parts.select.append(parts.other);
  parts.size = make("input", { id: "model-size", class: "entry", inputmode: "decimal", placeholder: "any", title: "A size alone: a dense decoder of the usual shape is derived from it" });
  parts.size.addEventListener("change", () => sized(parts.size.value));
  parts.file = make("input", { type: "file", accept: ".json,application/json", class: "off-screen", tabindex: "-1", "aria-hidden": "true" });
  parts.file.addEventListener("change", () => parts.file.files[0] && open(parts.file.files[0]));
  parts.shape = make("p", { class: "shape", id: "model-shape" });
  parts.trouble = make("p", { class: "why", role: "alert", hidden: true });
  byId("group-model").append(
    make("div", { class: "dial-head" }, make("label", { for: "model-name" }, "Preset"), parts.select),
    make("div", { class: "dial-head" }, make("label", { for: "model-size" }, "Or a size"), make("span", { class: "with-unit" }, parts.size, make("span", { class: "unit" }, "billion")),
      make("button", { type: "button", class: "quiet", title: "Or drop it anywhere on the page", on: { click: () => parts.file.click() } }, "config.json…"), parts.file),
    parts.trouble, parts.shape);
  listenForDrops();
}

/** @param {{words?: string}} shape what the planner made of the state's model */
export function showModel(shape) {
  const { model, params, config } = now();
  const name = model ?? (config ? `config.json${shape?.name ? ` (${shape.name})` : ""}` : params ? `${params} parameters` : "none yet");
  const listed = Boolean(model) && [...parts.select.options].some((option) => option.value === model);
  if (listed && parts.select.value !== model) parts.select.value = model;
  if (!listed) {
    say(parts.other, name);
    put(parts.other, "hidden", null);
    parts.other.selected = true;
  } else put(parts.other, "hidden", true);
  if (document.activeElement !== parts.size) parts.size.value = params ? billions(params) : "";
  say(parts.shape, shape?.words ?? "");
}

const SUFFIXES = { "": 1e-9, M: 1e-3, B: 1, T: 1e3 };

/** A size as the entry counts it: 1T is 1000 there. */
function billions(params) {
  const [, number, suffix] = /^([\d.]+(?:e\d+)?)([MBT]?)$/i.exec(params) ?? [];
  return number ? String(Number((number * SUFFIXES[suffix.toUpperCase()]).toPrecision(12))) : params;
}

function chosen(name) {
  complain("");
  if (name) choose({ model: name });
}

function sized(text) {
  const typed = text.trim().replaceAll(",", "");
  if (!typed) return;
  complain("");
  choose({ params: /^[\d.]+$/.test(typed) ? `${typed}B` : typed });
}

/** @param {File} file */
async function open(file) {
  parts.file.value = "";
  if (file.size > MOST_BYTES) return complain(`${file.name} has ${big(file.size)} bytes: a config.json has at most 64 KiB`);
  try {
    const config = JSON.parse(await file.text());
    if (typeof config !== "object" || config === null || Array.isArray(config)) throw new Error("not an object");
    complain("");
    choose({ config });
  } catch (error) {
    complain(`${file.name} is no config.json: ${error.message}`);
  }
}

function complain(text) {
  say(parts.trouble, text);
  put(parts.trouble, "hidden", !text);
}

function listenForDrops() {
  const veil = byId("drop");
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    veil.hidden = false;
  });
  addEventListener("dragleave", (event) => !event.relatedTarget && (veil.hidden = true));
  addEventListener("drop", (event) => {
    veil.hidden = true;
    if (!carries(event)) return;
    event.preventDefault();
    if (event.dataTransfer.files[0]) open(event.dataTransfer.files[0]);
  });
}
