// A scatter of named points: the chart library draws it, and on each point lies a button.

import { each, make, put, say } from "./dom.js";
import { groundOf, inkOf, plotIn, scale } from "./plot.js";

/**
 * @typedef {{x: number, y: number, label: string, kind: string, press: (() => void)|null}} Point
 * @typedef {{label: string, written: (value: number) => string}} Axis
 */

/** Builds an empty scatter in `box`; returns what draws points on it. @param {Element} box @param {string} name */
export function makeScatter(box, name) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const line = make("div", { class: "limit", hidden: true });
  const dots = make("div", { role: "group", "aria-label": name });
  box.replaceChildren(make("div", { class: "plot" }, canvas, line, dots));
  let shown = [];
  let limit = null;

  const draw = plotIn(canvas, ({ chartArea, scales }) => {
    shown.forEach((point, i) => {
      dots.children[i].style.left = `${scales.x.getPixelForValue(point.x)}px`;
      dots.children[i].style.top = `${scales.y.getPixelForValue(point.y)}px`;
    });
    put(line, "hidden", !limit);
    if (!limit) return;
    Object.assign(line.style, { left: `${scales.x.getPixelForValue(limit.x)}px`, top: `${chartArea.top}px`, height: `${chartArea.height}px` });
    say(line, limit.label);
  });

  /** @param {Point[]} points @param {Axis} xAxis @param {Axis} yAxis @param {{x: number, label: string}|null} next */
  return (points, xAxis, yAxis, next) => {
    shown = points;
    limit = next;
    each(dots, points, makeDot, (dot, point) => {
      put(dot, "class", `dot ${point.kind}`);
      put(dot, "tabindex", point.press ? null : "-1");
      put(dot, "aria-disabled", point.press ? null : "true");
      put(dot, "aria-label", point.label);
      put(dot, "title", point.label);
      dot.press = point.press;
    });
    draw(() => ({
      datasets: [{ data: points.map(({ x, y }) => ({ x, y })), clip: false, pointRadius: 5.5, ...looks([...dots.children]) }],
      scales: {
        x: scale(xAxis.written, 9, { title: xAxis.label, suggestedMax: limit?.x }),
        y: scale(yAxis.written, 8, { title: yAxis.label }),
      },
    }));
  };
}

/** How points look: filled, but for the one on the dials, which is a ring. The style sheet gives each its colour. */
function looks(all) {
  const ground = groundOf(document.querySelector(".panel"));
  const isRing = (dot) => dot.classList.contains("here");
  return {
    pointBackgroundColor: all.map((dot) => (isRing(dot) ? ground : inkOf(dot))),
    pointBorderColor: all.map((dot) => (isRing(dot) ? inkOf(dot) : ground)),
    pointBorderWidth: all.map((dot) => (isRing(dot) ? 3.5 : 1.5)),
  };
}

function makeDot() {
  const dot = make("button", { type: "button", on: { click: () => dot.press?.() } });
  return dot;
}
