// Published runs: what was measured beside what is predicted, each a press away.

import { byId, make, say } from "./dom.js";
import { change, figure, sentence } from "./format.js";
import { leap } from "./state.js";

/** @param {{presets: any[]}} answer of the question `presets` */
export function showPresets({ presets }) {
  say(byId("presets-say"), "Each opens on the dials. What was measured is the publisher's; the difference is the planner's error.");
  byId("presets-list").replaceChildren(...presets.map(card));
  const menu = /** @type {HTMLSelectElement} */ (byId("runs-menu"));
  menu.append(...presets.map((preset, i) => make("option", { value: i }, preset.title)));
  menu.addEventListener("change", () => {
    if (menu.value) open(presets[Number(menu.value)]);
    menu.selectedIndex = 0;
  });
}

/** A value without the unit that its label tells. */
const bare = ({ unit }, value) => figure({ value, unit }).replace(" tokens/s", "");

function card(preset) {
  const rows = preset.figures.map((f) => make("tr", {}, make("th", { scope: "row" }, f.label),
    make("td", {}, bare(f, f.measured)), make("td", {}, bare(f, f.predicted)), make("td", {}, change(f.error))));
  const table = make("table", {}, make("caption", { class: "off-screen" }, `${preset.title}: measured and predicted`),
    make("thead", {}, make("tr", {}, ...["", "measured", "predicted", "error"].map((head) => make(head ? "th" : "td", head ? { scope: "col" } : {}, head)))), make("tbody", {}, ...rows));
  return make("li", { class: "run" }, make("h3", {}, preset.title), make("p", {}, sentence(preset.words)), ...(rows.length ? [table] : []),
    make("p", { class: "source" }, preset.source || "not published: nothing to compare with"), make("button", { type: "button", on: { click: () => open(preset) } }, "Open on the dials"));
}

function open(preset) {
  leap(preset.state);
  scrollTo({ top: 0 });
  byId("answer").focus({ preventScroll: true });
}
