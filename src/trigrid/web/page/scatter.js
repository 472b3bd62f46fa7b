// A scatter of named points, each a button.

import { draw, each, put, say } from "./dom.js";
import { marks } from "./scale.js";

const WIDTH = 560, HEIGHT = 300, LEFT = 62, RIGHT = 16, TOP = 14, BOTTOM = 40;

/**
 * @typedef {{x: number, y: number, label: string, kind: string, press: (() => void)|null}} Point
 * @typedef {{label: string, written: (value: number) => string}} Axis
 */

/** Builds an empty scatter in `box`; returns what draws points on it. @param {Element} box @param {string} name */
export function makeScatter(box, name) {
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": name });
  const [across, up, limits, dots] = ["axis", "axis", "limits", "dots"].map((kind) => draw("g", { class: kind }));
  const labels = [
    draw("text", { class: "axis-name", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }),
    draw("text", { class: "axis-name", x: -(TOP + HEIGHT - BOTTOM) / 2, y: 12, transform: "rotate(-90)", "text-anchor": "middle" }),
  ];
  svg.append(across, up, limits, dots, ...labels);
  box.replaceChildren(svg);

  /** @param {Point[]} points @param {Axis} xAxis @param {Axis} yAxis @param {{x: number, label: string}|null} limit */
  return (points, xAxis, yAxis, limit) => {
    const [left, right] = span(points.map((p) => p.x).concat(limit ? [limit.x] : []));
    const [low, high] = span(points.map((p) => p.y));
    const x = (value) => LEFT + ((value - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    say(labels[0], xAxis.label);
    say(labels[1], yAxis.label);
    each(across, marks(left, right, 6), () => mark(), (g, at) => {
      setLine(g, x(at), x(at), TOP, HEIGHT - BOTTOM);
      setText(g, x(at), HEIGHT - BOTTOM + 15, "middle", xAxis.written(at));
    });
    each(up, marks(low, high, 5), () => mark(), (g, at) => {
      setLine(g, LEFT, WIDTH - RIGHT, y(at), y(at));
      setText(g, LEFT - 6, y(at) + 4, "end", yAxis.written(at));
    });
    each(limits, limit ? [limit] : [], () => mark(), (g, { x: at, label }) => {
      setLine(g, x(at), x(at), TOP, HEIGHT - BOTTOM);
      setText(g, x(at) - 5, HEIGHT - BOTTOM - 6, "end", label);
    });
    each(dots, points, makeDot, (dot, point) => {
      put(dot, "class", `dot ${point.kind}`);
      put(dot, "transform", `translate(${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)})`);
      put(dot, "role", point.press ? "button" : "img");
      put(dot, "tabindex", point.press ? "0" : null);
      put(dot, "aria-label", point.label);
      say(dot.firstElementChild, point.label);
      dot.press = point.press;
    });
  };
}

const mark = () => draw("g", {}, draw("line"), draw("text"));

function makeDot() {
  const dot = draw("g", {}, draw("title"), draw("circle", { class: "touch", r: 12 }), draw("circle", { class: "seen", r: 5.5 }));
  dot.addEventListener("click", () => dot.press?.());
  dot.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    dot.press?.();
  });
  return dot;
}

function setLine(g, x1, x2, y1, y2) {
  for (const [name, value] of Object.entries({ x1, x2, y1, y2 })) put(g.firstElementChild, name, value.toFixed(1));
}

function setText(g, x, y, anchor, words) {
  const text = g.lastElementChild;
  put(text, "x", x.toFixed(1));
  put(text, "y", y.toFixed(1));
  put(text, "text-anchor", anchor);
  say(text, words);
}

/** The ends of an axis, with air around the points. */
function span(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const air = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - air, high + air];
}
