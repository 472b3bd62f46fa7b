// A chart of figures over the steps of a run: lines, dots, planned levels, and what is under the pointer or the keys.

import { draw, make, put, say } from "./dom.js";
import { count } from "./format.js";
import { marks } from "./scale.js";

const HEIGHT = 190, LEFT = 52, RIGHT = 14, TOP = 10, BOTTOM = 24;

/**
 * @typedef {{name: string, kind: "line"|"dots"|"level", look: string, points: [number, number][]}} Series
 * a level has one point, whose second number counts for all steps
 */

/** Makes a chart in `box`; the function that it returns draws series in it. */
export function chart(box, title, format) {
  const svg = draw("svg", { class: "over-steps", role: "img", tabindex: "0", height: HEIGHT });
  const key = make("p", { class: "run-key" });
  const tip = make("p", { class: "tip" });
  box.append(svg, key, tip);
  let shown = [];
  let to = 1;
  let chosen = null;

  const paint = () => {
    const width = box.clientWidth;
    if (!width) return;
    put(svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = shown.flatMap((series) => series.points.map(([, y]) => y));
    const [low, high] = room(values);
    const x = (step) => LEFT + ((width - LEFT - RIGHT) * step) / to;
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low));
    const axis = draw("g", { class: "axis" });
    for (const at of marks(low, high, 4)) {
      axis.append(draw("line", { x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }));
      axis.append(draw("text", { x: LEFT - 7, y: y(at) + 4, "text-anchor": "end" }, format(at)));
    }
    for (const at of marks(0, to, width / 110)) axis.append(draw("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, count(at)));
    svg.replaceChildren(axis, ...shown.map((series) => picture(series, x, y, width)));
    if (chosen === null) return;
    svg.append(draw("line", { class: "run-cursor", x1: x(chosen), x2: x(chosen), y1: TOP, y2: HEIGHT - BOTTOM }));
  };

  const tell = (step) => {
    chosen = step;
    const near = shown.filter((series) => series.kind !== "level" && series.points.length).map((series) => [series, series.points[nearest(series.points, step)]]);
    if (near.length) chosen = near[0][1][0];
    say(tip, near.length ? `Step ${count(chosen)}: ${near.map(([series, [at, value]]) => `${series.name} ${format(value)}${at === chosen ? "" : ` (step ${count(at)})`}`).join(", ")}` : "");
    paint();
  };
  svg.addEventListener("pointermove", (event) => {
    const box_ = svg.getBoundingClientRect();
    tell(((event.clientX - box_.left - LEFT) / (box_.width - LEFT - RIGHT)) * to);
  });
  svg.addEventListener("pointerleave", () => {
    chosen = null;
    say(tip, "");
    paint();
  });
  svg.addEventListener("keydown", (event) => {
    const points = shown.find((series) => series.kind !== "level")?.points ?? [];
    const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!way || !points.length) return;
    event.preventDefault();
    const at = chosen === null ? points.length - (way > 0 ? 2 : 0) : nearest(points, chosen);
    tell(points[Math.max(0, Math.min(points.length - 1, at + way))][0]);
  });
  new ResizeObserver(paint).observe(box);

  /** @param {Series[]} series @param {number} steps of the whole run */
  return (series, steps) => {
    shown = series.filter((one) => one.points.length);
    to = Math.max(1, steps);
    const last = shown.find((one) => one.kind !== "level")?.points.at(-1);
    put(svg, "aria-label", `${title} over ${count(to)} steps${last ? `, now ${format(last[1])} at step ${count(last[0])}` : ""}. Left and right go from record to record.`);
    key.replaceChildren(...shown.map((one) => make("span", {}, make("i", { class: `swatch ${one.look}` }), one.kind === "level" ? `${one.name} ${format(one.points[0][1])}` : one.name)));
    paint();
  };
}

function picture(series, x, y, width) {
  if (series.kind === "level") {
    const at = y(series.points[0][1]);
    return draw("line", { class: `run-level ${series.look}`, x1: LEFT, x2: width - RIGHT, y1: at, y2: at });
  }
  if (series.kind === "dots") {
    return draw("g", { class: `run-dots ${series.look}` }, ...series.points.map(([step, value]) => draw("circle", { cx: x(step), cy: y(value), r: 3 })));
  }
  const path = series.points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  return draw("path", { class: `run-line ${series.look}`, d: path });
}

/** The lowest and highest value with some room. */
function room(values) {
  if (!values.length) return [0, 1];
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  const air = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low >= 0 ? Math.max(0, low - air) : low - air, high + air];
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
