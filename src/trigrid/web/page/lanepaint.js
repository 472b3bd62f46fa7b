// Painting of the timeline on its canvas: lanes, scale, and the memory of the chosen rank under them.

import { gib, percent, seconds } from "./format.js";
import { niceStep } from "./scale.js";

export const LEFT = 58, RIGHT = 72;
const TOP = 6, SCALE = 20, LEAST_CURVE = 92, GAP = 14;
const TALLEST = 38;
const ROOM_FOR_A_NUMBER = 15;

/** The lane under `y`, or null. */
export function laneAt(canvas, timeline, y) {
  const height = laneHeight(canvas, timeline);
  const rank = Math.floor((y - TOP) / height);
  return rank >= 0 && rank < timeline.rows.length ? rank : null;
}

const laneHeight = (canvas, timeline) => Math.min(TALLEST, (canvas.clientHeight - TOP - SCALE - LEAST_CURVE - GAP) / timeline.rows.length);

/**
 * @param {HTMLCanvasElement} canvas @param {import("./lanes.js").Timeline} timeline
 * @param {{from: number, to: number, rank: number, cursor: number|null, hover: {rank: number, index: number}|null}} view
 */
export function paint(canvas, timeline, view) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const fine = devicePixelRatio;
  if (canvas.width !== Math.round(width * fine) || canvas.height !== Math.round(height * fine)) {
    canvas.width = Math.round(width * fine);
    canvas.height = Math.round(height * fine);
  }
  const pen = canvas.getContext("2d");
  const ink = inks(canvas);
  pen.setTransform(fine, 0, 0, fine, 0, 0);
  pen.clearRect(0, 0, width, height);
  const inner = width - LEFT - RIGHT;
  const from = view.from * timeline.pipeline_s;
  const until = view.to * timeline.pipeline_s;
  const x = (t) => LEFT + ((t - from) / (until - from)) * inner;
  const row = laneHeight(canvas, timeline);
  timeline.rows.forEach((lane, rank) => paintLane(pen, ink, lane, rank, { x, row, from, until, inner, view, timeline, width }));
  const bottom = TOP + row * timeline.rows.length;
  paintScale(pen, ink, { x, from, until, bottom, inner });
  const top = bottom + SCALE + GAP;
  paintCurve(pen, ink, { x, from, until, inner, top, tall: height - top, timeline, view });
  if (view.cursor !== null) {
    pen.fillStyle = ink.text;
    pen.fillRect(x(view.cursor) - 0.75, TOP, 1.5, height - TOP);
  }
}

function inks(canvas) {
  const style = getComputedStyle(canvas);
  const ink = (name) => style.getPropertyValue(name).trim();
  return {
    F: ink("--kind-forward"), B: ink("--kind-backward"), I: ink("--kind-input"), W: ink("--kind-weight"), idle: ink("--idle"),
    text: ink("--text"), muted: ink("--muted"), line: ink("--line"), activations: ink("--activations"), over: ink("--over"), on: "#fff",
    font: `11px ${style.fontFamily}`, small: `10px ${style.fontFamily}`,
  };
}

function paintLane(pen, ink, lane, rank, at) {
  const { x, row, from, until, inner, view, timeline, width } = at;
  const y = TOP + rank * row;
  const tall = Math.max(1, row - (row > 8 ? 2 : 0.5));
  pen.fillStyle = ink.idle;
  pen.fillRect(LEFT, y, inner, tall);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, y, inner, tall);
  pen.clip();
  const first = Math.min(...lane.stage);
  pen.font = ink.small;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let i = firstAfter(lane.end_s, from); i < lane.start_s.length && lane.start_s[i] < until; i++) {
    const left = x(lane.start_s[i]);
    const wide = x(lane.end_s[i]) - left;
    pen.globalAlpha = lane.stage[i] === first ? 1 : 0.72;
    pen.fillStyle = ink[lane.kind[i]];
    pen.fillRect(left, y, Math.max(0.5, wide - (wide > 4 ? 1 : 0)), tall);
    pen.globalAlpha = 1;
    if (wide >= ROOM_FOR_A_NUMBER && row >= 12) {
      pen.fillStyle = ink.on;
      pen.fillText(String(lane.microbatch[i]), left + wide / 2, y + tall / 2 + 0.5);
    }
    if (view.hover?.rank === rank && view.hover.index === i) {
      pen.strokeStyle = ink.text;
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, y + 1, Math.max(1, wide - 3), tall - 2);
    }
  }
  pen.restore();
  if (row < 9 && rank % Math.ceil(11 / row)) return;
  pen.font = ink.font;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.fillStyle = rank === view.rank ? ink.text : ink.muted;
  pen.fillText(`${rank === view.rank ? "▸ " : ""}rank ${rank}`, LEFT - 8, y + tall / 2);
  pen.textAlign = "left";
  pen.fillStyle = ink.muted;
  pen.fillText(`${percent(timeline.idle_shares[rank])} idle`, width - RIGHT + 8, y + tall / 2);
}

/** The first index whose end is after `t`. */
function firstAfter(ends, t) {
  let low = 0;
  let high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > t) high = middle;
    else low = middle + 1;
  }
  return low;
}

function paintScale(pen, ink, { x, from, until, bottom, inner }) {
  pen.font = ink.small;
  pen.fillStyle = ink.muted;
  pen.strokeStyle = ink.line;
  pen.textBaseline = "top";
  pen.textAlign = "center";
  const step = niceStep((until - from) / Math.max(2, inner / 110));
  for (let t = Math.ceil(from / step) * step; t <= until; t += step) {
    pen.fillRect(x(t), bottom, 1, 4);
    pen.fillText(seconds(Math.abs(t) < step / 2 ? 0 : Number(t.toPrecision(6))), x(t), bottom + 6);
  }
}

function paintCurve(pen, ink, { x, from, until, inner, top, tall, timeline, view }) {
  const { t_s, bytes } = timeline.memory[view.rank];
  const most = Math.max(timeline.ceiling_bytes, ...bytes);
  const y = (size) => top + tall - 8 - (size / most) * (tall - 20);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, top - 12, inner, tall + 12);
  pen.clip();
  pen.beginPath();
  pen.moveTo(x(from), y(0));
  let i = Math.max(0, firstAfter(t_s, from) - 1);
  let height = bytes[i] ?? 0;
  pen.lineTo(x(from), y(height));
  for (; i < t_s.length && t_s[i] <= until; i++) {
    pen.lineTo(x(t_s[i]), y(height));
    height = bytes[i];
    pen.lineTo(x(t_s[i]), y(height));
  }
  pen.lineTo(x(until), y(height));
  pen.lineTo(x(until), y(0));
  pen.closePath();
  pen.globalAlpha = 0.35;
  pen.fillStyle = ink.activations;
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = ink.activations;
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.setLineDash([5, 4]);
  pen.strokeStyle = ink.over;
  pen.beginPath();
  pen.moveTo(LEFT, y(timeline.ceiling_bytes));
  pen.lineTo(LEFT + inner, y(timeline.ceiling_bytes));
  pen.stroke();
  pen.restore();
  pen.font = ink.small;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillStyle = ink.muted;
  pen.fillText("0", LEFT - 8, y(0));
  pen.fillText(gib(timeline.ceiling_bytes), LEFT - 8, y(timeline.ceiling_bytes));
  pen.textAlign = "left";
  pen.fillText("memory", LEFT + inner + 8, y(most / 2) - 6);
  pen.fillText(`rank ${view.rank}`, LEFT + inner + 8, y(most / 2) + 7);
}
