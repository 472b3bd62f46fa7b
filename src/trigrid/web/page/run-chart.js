// A chart of figures over the steps of a run: lines, dots, planned levels, and what is under the pointer or the keys.

import { make, put, say } from "./dom.js";
import { count } from "./format.js";
import { groundOf, plotIn, scale } from "./plot.js";

/**
 * @typedef {{name: string, kind: "line"|"dots"|"level", look: string, points: [number, number][]}} Series
 * a level has one point, whose second number counts for all steps
 */

/** Makes a chart in `box`; the function that it returns draws series in it. */
export function chart(box, title, format) {
  const canvas = make("canvas", { role: "img", tabindex: "0" });
  const key = make("p", { class: "run-key" });
  const tip = make("p", { class: "tip" });
  box.append(make("div", { class: "plot over-steps" }, canvas), key, tip);
  let shown = [];
  let made = null;
  let chosen = null;
  const draw = plotIn(canvas, (chart) => {
    made = chart;
    tell(chosen);
  });

  /** Tells the records nearest to a step, and marks their points; none of null. */
  const tell = (step) => {
    const near = shown.map(({ kind, points }, i) => ({ datasetIndex: i, index: kind === "level" || step === null ? -1 : nearest(points, step) })).filter(({ index }) => index >= 0);
    const at = ({ datasetIndex, index }) => shown[datasetIndex].points[index];
    chosen = near.length ? at(near[0])[0] : null;
    const told = near.map((one) => `${shown[one.datasetIndex].name} ${format(at(one)[1])}${at(one)[0] === chosen ? "" : ` (step ${count(at(one)[0])})`}`);
    say(tip, told.length ? `Step ${count(chosen)}: ${told.join(", ")}` : "");
    made?.setActiveElements(near);
    made?.render();
  };
  canvas.addEventListener("pointermove", (event) => made && tell(made.scales.x.getValueForPixel(event.offsetX)));
  canvas.addEventListener("pointerleave", () => tell(null));
  canvas.addEventListener("keydown", (event) => {
    const points = shown.find((series) => series.kind !== "level")?.points ?? [];
    const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!way || !points.length) return;
    event.preventDefault();
    const at = chosen === null ? points.length - (way > 0 ? 2 : 0) : nearest(points, chosen);
    tell(points[Math.max(0, Math.min(points.length - 1, at + way))][0]);
  });

  /** @param {Series[]} series @param {number} steps of the whole run */
  return (series, steps) => {
    const next = series.filter((one) => one.points.length);
    const to = Math.max(1, steps);
    const last = next.find((one) => one.kind !== "level")?.points.at(-1);
    put(canvas, "aria-label", `${title} over ${count(to)} steps${last ? `, now ${format(last[1])} at step ${count(last[0])}` : ""}. Left and right go from record to record.`);
    key.replaceChildren(...next.map((one) => make("span", {}, make("i", { class: `swatch ${one.look}` }), one.kind === "level" ? `${one.name} ${format(one.points[0][1])}` : one.name)));
    draw(() => {
      shown = next;
      return {
        datasets: next.map((one, i) => picture(one, groundOf(key.children[i].firstElementChild), to)),
        scales: { x: scale(count, 9, { min: 0, max: to, grid: { display: false } }), y: scale(format, 7) },
      };
    });
  };
}

/** A series as the library has it. */
function picture({ kind, points }, colour, to) {
  const data = kind === "level" ? [[0, points[0][1]], [to, points[0][1]]] : points;
  return {
    data: data.map(([x, y]) => ({ x, y })),
    showLine: kind !== "dots",
    borderColor: colour,
    backgroundColor: colour,
    borderWidth: kind === "dots" ? 0 : 1.8,
    borderDash: kind === "level" ? [7, 4] : [],
    // One record alone is no line.
    pointRadius: kind === "dots" || (kind === "line" && points.length === 1) ? 3 : 0,
    pointHoverRadius: 5,
    pointHoverBackgroundColor: colour,
    clip: 8,
  };
}

/** The index of the point whose step is nearest; points are in order of steps. */
function nearest(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle;
    else high = middle;
  }
  return step - points[low][0] <= points[high][0] - step ? low : high;
}
