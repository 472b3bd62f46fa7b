// The table beside a chart, filled only while it is open.

import { each, make, put, replace, say } from "./dom.js";

/**
 * Fills `box` with a table; numbers are set to the right.
 * @param {Element} box @param {string} caption @param {string[]} head @param {(string|Node)[][]} rows the first of each row names it
 */
export function fillTable(box, caption, head, rows) {
  let table = box.querySelector("table");
  if (!table) {
    table = make("table", {}, make("caption", { class: "off-screen" }), make("thead", {}, make("tr")), make("tbody"));
    box.replaceChildren(table);
  }
  const [title, top, body] = table.children;
  say(title, caption);
  // It scrolls where it is wide, with the keys as well.
  for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", caption]]) put(box, name, value);
  each(top.firstElementChild, head, () => make("th", { scope: "col" }), say);
  each(body, rows, () => make("tr"), (row, cells) => {
    while (row.children.length > cells.length) row.lastElementChild.remove();
    while (row.children.length < cells.length) row.append(row.children.length ? make("td") : make("th", { scope: "row" }));
    cells.forEach((cell, i) => (typeof cell === "string" ? say(row.children[i], cell) : replace(row.children[i], cell)));
  });
}

/** Calls `fill` when the details around the table opens, and from `refresh` while it is open. */
export function tableOf(box, fill) {
  const details = box.closest("details");
  const refresh = () => details.open && fill();
  details.addEventListener("toggle", refresh);
  return refresh;
}
