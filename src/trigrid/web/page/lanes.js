// The pipeline's timeline: a lane for each rank, zoom and pan, what is under the pointer, and a step that plays.

import { byId, make, put, say, still } from "./dom.js";
import { gib, percent, seconds } from "./format.js";
import { paint, LEFT, RIGHT, laneAt } from "./lanepaint.js";
import { KINDS } from "./palette.js";
import { fillTable, tableOf } from "./table.js";

const PLAY_S = 8;
const NARROWEST = 1e-4;
/**
 * @typedef {{start_s: number[], end_s: number[], kind: string[], stage: number[], microbatch: number[]}} Row
 * @typedef {{pipeline_s: number, rows: Row[], idle_shares: number[], memory: {t_s: number[], bytes: number[]}[], ceiling_bytes: number, bubble_ratio: number, idle_share: number}} Timeline
 */
/** @type {Timeline|null} */
let timeline = null;
const view = { from: 0, to: 1, rank: 0, cursor: null, hover: null };
let playing = 0;

const canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": "No step is played yet." });
byId("lanes").append(canvas);
const refreshTable = tableOf(byId("timeline-table"), () => timeline && showTable());
new ResizeObserver(repaint).observe(byId("lanes"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("themechange", repaint);

/** @param {any} answer of the question `timeline` */
export function showTimeline(answer) {
  const same = timeline && timeline.rows.length === answer.rows.length;
  timeline = answer;
  stopPlaying();
  if (!same) Object.assign(view, { from: 0, to: 1, rank: 0, cursor: null, hover: null });
  say(byId("timeline-say"), answer.words);
  put(canvas, "aria-label", `${answer.words} Plus and minus zoom, left and right move, up and down choose the rank whose memory is drawn.`);
  showKey();
  tellRank();
  repaint();
  refreshTable();
}

function repaint() {
  if (timeline) paint(canvas, timeline, view);
}

function showKey() {
  const used = new Set(timeline.rows.flatMap((row) => [...new Set(row.kind)]));
  byId("timeline-key").replaceChildren(...Object.entries(KINDS).filter(([kind]) => used.has(kind))
    .map(([kind, word]) => make("span", {}, make("i", { class: `swatch kind-${kind}` }), word)), make("span", {}, make("i", { class: "swatch idle" }), "idle"));
}

/** Keeps the second under `at` (0 to 1 of the width) where it is. */
function zoom(factor, at = 0.5) {
  const middle = view.from + (view.to - view.from) * at;
  const width = Math.min(1, Math.max(NARROWEST, (view.to - view.from) / factor));
  look(middle - width * at, width);
}

function look(from, width) {
  view.from = Math.max(0, Math.min(1 - width, from));
  view.to = view.from + width;
  repaint();
}

const pan = (share) => look(view.from + (view.to - view.from) * share, view.to - view.from);

function shareAt(event) {
  const box = canvas.getBoundingClientRect();
  return (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
}

byId("zoom-in").addEventListener("click", () => zoom(2));
byId("zoom-out").addEventListener("click", () => zoom(0.5));
byId("zoom-all").addEventListener("click", () => look(0, 1));
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY)) return;
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 200), shareAt(event));
  else pan((event.deltaX || event.deltaY) / 600);
}, { passive: false });
canvas.addEventListener("dblclick", (event) => zoom(3, shareAt(event)));
canvas.addEventListener("keydown", (event) => {
  const hand = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => look(0, 1), Home: () => look(0, view.to - view.from),
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => choose(view.rank - 1), ArrowDown: () => choose(view.rank + 1), " ": play,
  }[event.key];
  if (!hand || !timeline) return;
  event.preventDefault();
  hand();
});

let dragged = null;
canvas.addEventListener("pointerdown", (event) => {
  if (!timeline) return;
  dragged = { x: event.clientX, from: view.from, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!timeline) return;
  if (dragged && Math.abs(event.clientX - dragged.x) > 3) {
    dragged.moved = true;
    const width = canvas.clientWidth - LEFT - RIGHT;
    look(dragged.from - ((event.clientX - dragged.x) / width) * (view.to - view.from), view.to - view.from);
    return;
  }
  point(event);
});
canvas.addEventListener("pointerup", (event) => {
  if (dragged && !dragged.moved) {
    const rank = laneAt(canvas, timeline, event.offsetY);
    if (rank !== null) choose(rank);
  }
  dragged = null;
});
// The browser has taken the touch to scroll with.
canvas.addEventListener("pointercancel", () => (dragged = null));
canvas.addEventListener("pointerleave", () => {
  view.hover = null;
  tellRank();
  repaint();
});

function point(event) {
  const rank = laneAt(canvas, timeline, event.offsetY);
  const share = shareAt(event);
  if (rank === null || share < 0 || share > 1) return;
  const at = (view.from + (view.to - view.from) * share) * timeline.pipeline_s;
  const index = actionAt(timeline.rows[rank], at);
  view.hover = index === null ? null : { rank, index };
  say(byId("lane-tip"), index === null ? `rank ${rank} is idle at ${seconds(at)}` : words(rank, index));
  repaint();
}

/** The action that runs at `at`; rows are in order of time. */
function actionAt(row, at) {
  let low = 0;
  let high = row.start_s.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (row.end_s[middle] <= at) low = middle + 1;
    else if (row.start_s[middle] > at) high = middle - 1;
    else return middle;
  }
  return null;
}

function words(rank, index) {
  const row = timeline.rows[rank];
  const from = row.start_s[index];
  const to = row.end_s[index];
  return `rank ${rank}: ${KINDS[row.kind[index]]} of microbatch ${row.microbatch[index]}, stage ${row.stage[index]}, ${seconds(from)} to ${seconds(to)}`;
}

function choose(rank) {
  view.rank = Math.max(0, Math.min(timeline.rows.length - 1, rank));
  tellRank();
  repaint();
}

function tellRank() {
  if (!timeline) return;
  const peak = Math.max(...timeline.memory[view.rank].bytes);
  say(byId("lane-tip"), `rank ${view.rank}: ${percent(timeline.idle_shares[view.rank])} idle, at most ${gib(peak)}: the curve under the lanes. Point at an action for its name.`);
}

function play() {
  if (playing) return stopPlaying();
  put(byId("play"), "aria-pressed", "true");
  say(byId("play"), "Stop");
  const few = still();
  const start = performance.now();
  const first = view.from;
  const frame = (time) => {
    const done = Math.min(1, (time - start) / 1000 / PLAY_S);
    // With less movement the cursor goes in a few steps, not smoothly.
    const share = few ? Math.floor(done * 16) / 16 : done;
    view.cursor = (first + (view.to - first) * share) * timeline.pipeline_s;
    const index = actionAt(timeline.rows[view.rank], view.cursor);
    const busy = timeline.rows.filter((row) => actionAt(row, view.cursor) !== null).length;
    say(byId("lane-tip"), `${seconds(view.cursor)}: ${busy} of ${timeline.rows.length} ranks busy; ${index === null ? `rank ${view.rank} idle` : words(view.rank, index)}`);
    repaint();
    if (done >= 1) stopPlaying();
    else playing = requestAnimationFrame(frame);
  };
  playing = requestAnimationFrame(frame);
}

function stopPlaying() {
  cancelAnimationFrame(playing);
  playing = 0;
  view.cursor = null;
  put(byId("play"), "aria-pressed", "false");
  say(byId("play"), "Play");
  repaint();
}

byId("play").addEventListener("click", () => timeline && play());

function showTable() {
  const head = ["Rank", "actions", "idle", "first action", "last action ends", "most memory"];
  const lines = timeline.rows.map((row, rank) => [
    String(rank), String(row.kind.length), percent(timeline.idle_shares[rank]), seconds(row.start_s[0] ?? 0), seconds(row.end_s.at(-1) ?? 0), gib(Math.max(...timeline.memory[rank].bytes))]);
  fillTable(byId("timeline-table"), "Ranks of the pipeline", head, lines);
}
