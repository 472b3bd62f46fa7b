// The step that a run recorded, under the planned one: lanes of both on one scale each, and their figures by rank.

import { make, put, say } from "./dom.js";
import { percent, seconds } from "./format.js";
import { paint } from "./lanepaint.js";
import { panel, underneath } from "./run-panels.js";
import { fillTable } from "./table.js";

const LANE = 26, SCALE = 30, BELOW = 140;

export function makeTimeline() {
  const made = panel("run-timeline", "A step, planned over real");
  const planned = strip("planned");
  const measured = strip("measured");
  const choose = make("select", { "aria-label": "Pipeline", hidden: true });
  made.chart.append(planned.box, choose, measured.box);
  const table = underneath(made);
  let written = null;
  let answer = null;
  choose.addEventListener("change", () => showMeasured());
  const showMeasured = () => {
    const lanes = answer.measured[Number(choose.value) || 0];
    measured.show(lanes, `Measured in step ${answer.figures.step}, ranks ${lanes.ranks.join(", ")}: ${seconds(lanes.step_s)}, ${percent(lanes.idle_share)} idle`);
  };
  /** same: whether the run is on the device that is planned for; memory over time is drawn only then. */
  const show = (next, same) => {
    const key = JSON.stringify([next.figures ?? next.problems, same]);
    if (key === written) return;
    written = key;
    put(made.chart, "data-memory", String(same));
    answer = next;
    made.chart.hidden = Boolean(next.problems);
    made.body.hidden = Boolean(next.problems);
    if (next.problems) return say(made.say, next.problems.map((problem) => problem.reason).join("; "));
    say(made.say, next.words);
    planned.show(next.planned, `Planned: ${seconds(next.planned.step_s)}, ${percent(next.planned.idle_share)} idle`);
    choose.hidden = next.measured.length < 2;
    choose.replaceChildren(...next.measured.map((lanes, i) => make("option", { value: String(i) }, `Pipeline ${i}: ranks ${lanes.ranks.join(", ")}`)));
    showMeasured();
    const { planned: plan, replayed, measured: real } = next.figures;
    const lines = real.ranks.map((rank, i) => [String(i), ...[plan, replayed, real].map((kind) => seconds(kind.ranks[i].busy_s)), ...[plan, replayed, real].map((kind) => percent(kind.ranks[i].idle_share))]);
    fillTable(table, "Pipeline ranks, planned and measured", ["Rank", "busy planned", "replayed", "measured", "idle planned", "replayed", "measured"], lines);
  };
  return { section: made.section, show };
}

/** One timeline on a canvas of its own, in its whole length. */
function strip(name) {
  const title = make("h3", {});
  const canvas = make("canvas", { role: "img", class: `run-lanes run-${name}` });
  const frame = make("div", { class: "run-frame" }, canvas);
  const box = make("div", {}, title, frame);
  let shown = null;
  const repaint = () => shown && canvas.clientWidth && paint(canvas, shown, { from: 0, to: 1, rank: 0, cursor: null, hover: null });
  new ResizeObserver(repaint).observe(box);
  addEventListener("themechange", repaint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  const show = (lanes, words) => {
    shown = lanes;
    say(title, words);
    put(canvas, "aria-label", words);
    canvas.style.height = `${lanes.rows.length * LANE + BELOW}px`;
    frame.style.setProperty("--lanes", `${lanes.rows.length * LANE + SCALE}px`);
    repaint();
  };
  return { box, show };
}
