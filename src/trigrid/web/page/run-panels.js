// Panels of a run: memory and time of its stages beside the plan, ranks that hold up others, where the time went.

import { each, make, put, say } from "./dom.js";
import { count, gib, percent, seconds, sentence, short } from "./format.js";
import { fillTable } from "./table.js";

/** A section with a title, a line of words and a body. */
export function panel(id, title) {
  const words = make("p", { class: "say" });
  const chart = make("div", { class: "chart" });
  const body = make("div");
  const heading = make("h2", { id: `${id}-title` }, title);
  return { section: make("section", { class: "panel", id, "aria-labelledby": `${id}-title` }, heading, words, chart, body), say: words, chart, body };
}

/** A table that opens under a chart, filled by `fill(box)`. */
export function underneath(panel, title = "As a table") {
  const box = make("div");
  const details = make("details", { class: "as-table" }, make("summary", {}, title), box);
  panel.body.append(details);
  return box;
}

const scroll = (label) => make("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" });

/** Bars one under the other, of {name, look?, value, text, beside?}: the longest fills the width. */
function bars(list, rows) {
  const most = rows.reduce((a, row) => Math.max(a, row.value), 0) || 1;
  each(list, rows, () => make("li", {}, make("span"), make("span", { class: "run-track" }, make("i")), make("b")), (item, row) => {
    const [name, track, text] = item.children;
    say(name, row.name);
    put(track.firstElementChild, "class", row.look ?? "look-a");
    track.firstElementChild.style.width = `${(100 * row.value) / most}%`;
    say(text, row.text);
    put(item, "title", row.title ?? null);
  });
}

const known = (value, format) => (value === null || value === undefined ? "–" : format(value));

/** Planned, measured and the difference, as a row of a table. */
const beside = (names, format) => ({ name, planned, measured, gap }) => [names[name] ?? name, known(planned, format), known(measured, format), gap || "–"];

/** Figures whose names alone do not say what they are. */
const HELD = { kept: "kept between actions", allocated: "allocated in all", reserved: "reserved in all", device: "on the device" };

/** Bytes and seconds of each stage, planned and measured. */
export function makeStages() {
  const made = panel("run-stages", "Planned against measured, by pipeline stage");
  const choose = make("select", { "aria-label": "Pipeline stage" });
  const memory = scroll("Memory");
  const time = scroll("Time of a step");
  made.body.append(choose, make("div", { class: "pair even" }, make("div", {}, make("h3", {}, "Memory"), memory), make("div", {}, make("h3", {}, "A step"), time)));
  made.body.hidden = true;
  let found = null;
  const showStage = () => {
    const stage = Number(choose.value);
    fillTable(memory, `Memory of a rank of stage ${stage}`, ["Category", "planned", "measured", "difference"], found.memory[stage].figures.map(beside(HELD, exactly)));
    fillTable(time, `Parts of a step on stage ${stage}`, ["Part", "planned", "measured", "difference"], found.parts[stage].map(beside({}, seconds)));
  };
  choose.addEventListener("change", showStage);
  const show = (next) => {
    found = next;
    made.body.hidden = !found.samples;
    if (!found.samples) return say(made.say, "No step has been sampled yet: the second step is the first that is.");
    const where = found.same_machine ? "" : ` The plan is for another device than the run's ${found.device}: its times do not compare.`;
    say(made.say, `Of ${count(found.samples)} sampled steps.${where}`);
    if (choose.length !== found.memory.length) {
      choose.replaceChildren(...found.memory.map(({ stage }) => make("option", { value: String(stage) }, `Stage ${stage}`)));
      choose.value = String(found.busiest);
    }
    choose.hidden = found.memory.length < 2;
    showStage();
  };
  return { section: made.section, show };
}

/** Bytes, small ones too. */
const exactly = (bytes) => (Math.abs(bytes) < 0.05 * 2 ** 30 ? `${short(bytes / 2 ** 20)} MiB` : gib(bytes));

/** Who computes longest, in the recorded step and in the records of the run. */
export function makeRanks() {
  const made = panel("run-ranks", "Ranks that hold up others");
  const list = make("ul", { class: "run-bars" });
  made.chart.append(list);
  const table = underneath(made);
  const show = (timeline, found, slow) => {
    const ranks = timeline.ranks ?? [];
    const worst = [...slow].sort((a, b) => b.records - a.records)[0];
    const said = found.slowest ? `Rank ${found.slowest.rank} holds up its stage in most sampled steps: busy for ${seconds(found.slowest.busy_s)}, the others for ${seconds(found.slowest.peers_s)}. ` : "No rank holds up its stage in most sampled steps. ";
    const recorded = ranks.length ? " The bars are of the step that was recorded." : "";
    const often = worst ? `Rank ${worst.rank} was the slowest in ${count(worst.records)} records, at worst ${short(worst.worst)} × the median of its stage.` : "";
    say(made.say, said + often + recorded);
    bars(list, ranks.map((rank) => ({ name: `rank ${rank.rank}`, value: rank.busy_s, text: `${seconds(rank.busy_s)}  ${short(rank.factor)} ×`, look: rank.slow ? "look-over" : "look-a", title: `stage ${rank.stages.join(" and ")}: the others compute ${seconds(rank.usual_s)}` })));
    const lines = ranks.map((rank) => [String(rank.rank), rank.stages.join(", "), seconds(rank.busy_s), seconds(rank.usual_s), `${short(rank.factor)} ×`]);
    fillTable(table, "Ranks in the recorded step", ["Rank", "stage", "computes", "the others of its stage", "factor"], lines);
  };
  return { section: made.section, show };
}

/** Seconds of the run by cause. */
export function makeGoodput() {
  const made = panel("run-goodput", "Where the time went");
  const list = make("ul", { class: "run-bars" });
  const advice = make("p", { class: "note" });
  made.chart.append(list);
  made.body.append(advice);
  const table = underneath(made, "Failures as a table");
  const show = ({ causes, account }) => {
    if (!account) return say(made.say, "The run has not told anything yet.");
    say(made.say, `${percent(account.productive_share)} of ${seconds(account.wall_s)} went into steps that count; ${count(account.launches)} launched, ${count(account.failures.length)} failed, ${count(account.checkpoints)} complete checkpoints.`);
    const rows = Object.entries(account.seconds).filter(([cause, value]) => value > 0 || cause === "productive");
    bars(list, rows.map(([cause, value]) => ({ name: cause, value, text: seconds(value), look: cause === "productive" ? "look-good" : "look-c", title: causes[cause] })));
    say(advice, sentence(account.advice));
    const lines = account.failures.map((failure, i) => [String(i + 1), seconds(failure.time_s - account.begin_s), known(failure.rank, count), known(failure.detected_s, seconds), known(failure.lost_steps, count), failure.reason]);
    fillTable(table, "Failures", ["Failure", "after", "rank", "known after", "steps lost", "what"], lines);
  };
  return { section: made.section, show };
}
