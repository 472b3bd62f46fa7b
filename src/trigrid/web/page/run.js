// The run whose folder is served: how it goes, beside its plan. Follows a run that is under way while someone looks.

import { byId, each, make, put, say } from "./dom.js";
import { big, count, gib, percent, seconds, short } from "./format.js";
import { chart } from "./run-chart.js";
import { makeGoodput, makeRanks, makeStages, panel, underneath } from "./run-panels.js";
import { makeTimeline } from "./run-timeline.js";
import { fillTable, tableOf } from "./table.js";

const OPEN_MS = 2000, OVER_MS = 15000, SLOW_MS = 10000;
const LATEST = 20;
/** Records that are kept; with more the whole run is asked for again, of which the server tells every n-th. */
const MOST_ROWS = 5000;
const KINDS = { ended: "safe", stopped: "tight", failed: "over", killed: "over" };

/** Opens the view of the run `name`. */
export async function openRun(name) {
  const run = { name, facts: await get(""), cursor: "", rows: [], every: 1, validation: [], columns: {}, progress: null, same: false };
  document.head.append(make("link", { rel: "stylesheet", href: "run.css" }));
  const view = layout(run);
  byId("planner").before(view.main);
  switcher(view.main);
  follow(run, view);
}

async function get(question) {
  const response = await fetch(`api/run${question}`);
  if (!response.ok) throw new Error(`${response.status}: ${(await response.text()).slice(0, 200)}`);
  return response.json();
}

/** Buttons that show the run or the planner. A link to a layout opens the planner; what was shown last is shown again. */
function switcher(main) {
  const desk = byId("planner");
  const nav = document.querySelector(".top nav");
  const choose = (run) => {
    main.hidden = !run;
    desk.hidden = run;
    put(toRun, "aria-pressed", String(run));
    put(toPlan, "aria-pressed", String(!run));
    put(document.querySelector(".skip"), "href", run ? "#run" : "#answer");
    put(document.body, "data-view", run ? "run" : "planner");
    sessionStorage.setItem("trigrid.view", run ? "run" : "planner");
  };
  const toRun = make("button", { type: "button", class: "quiet", id: "show-run", on: { click: () => choose(true) } }, "Run");
  const toPlan = make("button", { type: "button", class: "quiet", id: "show-planner", on: { click: () => choose(false) } }, "Planner");
  nav.prepend(toRun, toPlan);
  const address = performance.getEntriesByType("navigation")[0]?.name ?? location.href;
  choose((sessionStorage.getItem("trigrid.view") ?? (address.includes("#") ? "planner" : "run")) === "run");
}

function layout(run) {
  const verdict = make("h2", { class: "verdict", id: "run-state" });
  const headline = make("p", { class: "headline", id: "run-headline" });
  const note = make("p", { class: "note" }, run.facts.words.join(" · "));
  const tiles = make("ul", { class: "tiles", id: "run-tiles" });
  const aloud = make("p", { class: "off-screen", role: "status", "aria-live": "polite" });
  const answer = make("section", { class: "answer", "aria-labelledby": "run-state" }, make("div", { class: "ruling" }, verdict, headline, note), tiles, aloud);
  const loss = panel("run-loss", "Loss");
  const speed = panel("run-speed", "Throughput");
  const mfu = panel("run-mfu", "MFU");
  const events = panel("run-events", "What happened");
  const list = make("ul", { class: "run-events" });
  say(events.say, "The newest first.");
  events.body.append(make("div", { class: "run-log", role: "region", "aria-label": "What happened", tabindex: "0" }, list));
  const stages = makeStages();
  const timeline = makeTimeline();
  const ranks = makeRanks();
  const goodput = makeGoodput();
  const main = make("main", { id: "run", tabindex: "-1", "aria-label": `Run ${run.name}` }, answer, loss.section,
    make("div", { class: "pair even" }, speed.section, mfu.section), stages.section, timeline.section, ranks.section,
    make("div", { class: "pair even" }, goodput.section, events.section));
  const records = underneath(loss);
  const drawLoss = chart(loss.chart, "Training loss", (value) => value.toFixed(3));
  const drawSpeed = chart(speed.chart, "Tokens per second", big);
  const drawMfu = chart(mfu.chart, "MFU", percent);
  const refreshTable = tableOf(records, () => showRecords(records, run));
  return { main, verdict, headline, tiles, aloud, list, loss, speed, mfu, stages, timeline, ranks, goodput, drawLoss, drawSpeed, drawMfu, refreshTable };
}

/** Asks again and again: often while the run is under way, rarely after it, never while the page is hidden. */
function follow(run, view) {
  let timer = 0;
  let slowDue = 0;
  const tick = async () => {
    timer = 0;
    try {
      const before = run.progress?.last?.step;
      take(run, await get(`/progress?since=${run.rows.length > MOST_ROWS ? "" : run.cursor}`));
      show(run, view);
      if (performance.now() >= slowDue && (slowDue === 0 || before !== run.progress.last?.step || over(run))) {
        slowDue = performance.now() + SLOW_MS;
        const [goodput, timeline, compared] = await Promise.all([get("/goodput"), get("/timeline"), get("/compare")]);
        run.same = compared.same_machine;
        view.goodput.show(goodput);
        view.timeline.show(timeline, run.same);
        view.stages.show(compared);
        view.ranks.show(timeline, compared, run.progress.slow);
      }
      put(view.main, "data-told", String(Number(view.main.dataset.told ?? 0) + 1));
    } catch (error) {
      say(view.headline, `No answer: ${error.message}. Asking again.`);
      put(view.verdict, "data-kind", "none");
    }
    wait();
  };
  const wait = () => {
    if (!document.hidden && !timer) timer = setTimeout(tick, over(run) ? OVER_MS : OPEN_MS);
  };
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    timer = 0;
    if (!document.hidden) tick();
  });
  tick();
}

const over = (run) => Boolean(run.progress && run.progress.state in KINDS);

/** Takes new rows in: they stand for all from the first of their steps on. */
function take(run, progress) {
  if (progress.fresh) Object.assign(run, { rows: [], validation: [], every: 1 });
  run.every = Math.max(run.every, progress.every);
  run.cursor = progress.cursor;
  run.progress = progress;
  run.columns = Object.fromEntries(progress.columns.map((name, i) => [name, i]));
  for (const [old, more] of [[run.rows, progress.rows], [run.validation, progress.validation]]) {
    while (more.length && old.length && old.at(-1)[0] >= more[0][0]) old.pop();
    old.push(...more);
  }
}

/** The points (step, value) of one column, without those that were not finite. */
function points(run, name) {
  const at = run.columns[name];
  return run.rows.filter((row) => typeof row[at] === "number").map((row) => [row[0], row[at]]);
}

function show(run, view) {
  const { state, last, age_s, events, facts } = run.progress;
  const steps = run.facts.steps;
  const going = !over(run);
  put(view.verdict, "data-kind", KINDS[state] ?? "none");
  say(view.verdict, state.toUpperCase());
  const place = last ? `Step ${count(last.step)} of ${count(steps)}` : `No step of ${count(steps)} is done`;
  const left = going && last?.eta_s ? `, ${seconds(last.eta_s)} left` : "";
  const age = going && age_s !== null ? `; the last line is ${seconds(age_s)} old` : "";
  say(view.headline, `${place}${left}${age}.`);
  say(view.aloud, going ? "" : `${place}, ${state}.`);
  showTiles(view.tiles, tiles(run));
  const loss = points(run, "loss");
  view.drawLoss([
    { name: "training", kind: "line", look: "look-a", points: loss },
    { name: "held-out", kind: "dots", look: "look-b", points: run.validation.filter((row) => typeof row[1] === "number") },
  ], steps);
  const every = run.every > 1 ? ` Of older records one of ${run.every} is drawn.` : "";
  say(view.loss.say, last ? `${short(loss[0]?.[1] ?? NaN)} at first, ${last.loss === null ? "not finite" : last.loss.toFixed(4)} now.${every}` : "No step is recorded yet.");
  const plan = run.facts.plan.throughput;
  const planned = (value) => (run.same ? [{ name: "planned", kind: "level", look: "look-c", points: [[0, value]] }] : []);
  const on = run.same ? "" : ` The plan is for ${run.facts.gpu}, the run is on ${facts?.device ?? "another device"}: no planned level is drawn.`;
  view.drawSpeed([{ name: "measured", kind: "line", look: "look-a", points: points(run, "tokens_per_s") }, ...planned(plan.tokens_per_s)], steps);
  say(view.speed.say, last ? `${big(last.tokens_per_s)} tokens/s now.${on}` : "");
  view.drawMfu([
    { name: "full attention", kind: "line", look: "look-a", points: points(run, "mfu_full") },
    { name: "causal half", kind: "line", look: "look-b", points: points(run, "mfu_causal") },
    ...planned(plan.mfu_full_attention),
  ], steps);
  say(view.mfu.say, facts ? `Of ${short(facts.matmul_flops_per_s / 1e12)} TFLOP/s that matrix products reached at the start on ${count(facts.world)} × ${facts.device}.` : "");
  each(view.list, [...events].reverse(), () => make("li", {}, make("time"), make("span")), (item, event) => {
    put(item, "data-weight", event.weight);
    const at = new Date(event.time_s * 1000);
    say(item.firstElementChild, at.toLocaleTimeString([], { hour12: false }));
    put(item.firstElementChild, "title", at.toLocaleString());
    say(item.lastElementChild, event.words);
  });
  view.refreshTable();
}

function tiles(run) {
  const { last, age_s } = run.progress;
  const plan = run.facts.plan;
  const held = run.validation.at(-1);
  const step = plan.time.step_s;
  const memory = plan.memory.stages.reduce((most, stage) => Math.max(most, stage.total_bytes), 0);
  const planned = (text) => (run.same ? `planned ${text}` : `planned for ${run.facts.gpu}`);
  if (!last) return [["Step", `0 of ${count(run.facts.steps)}`, age_s === null ? "nothing is written yet" : ""]];
  return [
    ["Step", count(last.step), `of ${count(run.facts.steps)}`],
    ["Loss", last.loss === null ? "not finite" : last.loss.toFixed(4), held ? `held-out ${held[1] === null ? "not finite" : held[1].toFixed(4)} at ${count(held[0])}` : `norm ${short(last.gradient_norm ?? NaN)}`],
    ["Tokens/s", big(last.tokens_per_s), planned(big(plan.throughput.tokens_per_s))],
    ["MFU", percent(last.mfu_full), planned(percent(plan.throughput.mfu_full_attention))],
    ["Step time", seconds(last.step_s), planned(seconds(step.best))],
    ["Waiting for data", percent(last.data_wait_share), "of a step"],
    ["Peak memory", gib(last.peak_memory_bytes), planned(gib(memory))],
    ["Tokens", big(last.tokens), "trained on"],
  ];
}

const makeTile = () => make("li", {}, make("div", { class: "tile" }, make("span", { class: "name" }), make("strong"), make("small")));

function showTiles(list, all) {
  each(list, all, makeTile, (tile, words) => [...tile.firstElementChild.children].forEach((element, i) => say(element, words[i])));
}

function showRecords(box, run) {
  const columns = [["loss", "loss", (x) => x.toFixed(4)], ["gradient_norm", "norm", short], ["learning_rate", "learning rate", (x) => x.toExponential(2)], ["tokens_per_s", "tokens/s", big], ["mfu_full", "MFU", percent], ["step_s", "step", seconds]];
  const value = (row, name, format) => (typeof row[run.columns[name]] === "number" ? format(row[run.columns[name]]) : "–");
  const lines = run.rows.slice(-LATEST).reverse().map((row) => [count(row[0]), ...columns.map(([name, , format]) => value(row, name, format))]);
  fillTable(box, "The latest records", ["Step", ...columns.map(([, title]) => title)], lines);
}
