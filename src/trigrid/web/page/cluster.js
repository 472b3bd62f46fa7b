// A picture of the cluster: which axis runs on which network, and what a broken golden rule costs.

import { byId, draw, each, make, put, replace, say } from "./dom.js";
import { bandwidth, count, gb, percent, seconds } from "./format.js";
import { leap } from "./state.js";
import { fillTable, tableOf } from "./table.js";

const WIDTH = 900, LEFT = 128;
const ROWS = { SPINE: 30, LEAF: 112, NVLINK: 186 };
const NODE_WIDTH = 176, NODE_GAP = 18, NODE_TOP = 196, GPU = 34;
let answer = null;

const svg = draw("svg", { viewBox: `0 0 ${WIDTH} 318`, role: "img", "aria-label": "No plan is drawn yet." });
byId("cluster-picture").append(svg);
const refreshTable = tableOf(byId("cluster-table"), () => answer && showTable());

/** @param {any} next an answer of the question `cluster` */
export function showCluster(next) {
  answer = next;
  const broken = answer.rules.filter((rule) => !rule.holds).length;
  say(byId("cluster-say"), broken ? `${broken} golden ${broken === 1 ? "rule is" : "rules are"} broken.` : "The golden rules hold; what breaking them would cost is beside each.");
  put(svg, "aria-label", answer.axes.map((axis) => axis.words).join(" "));
  svg.replaceChildren(...picture());
  each(byId("axes"), answer.axes.filter((axis) => axis.busy_s > 0), makeAxis, showAxis);
  each(byId("rules"), answer.rules, () => make("li"), showRule);
  refreshTable();
}

function picture() {
  const nodes = answer.sample ?? [];
  const width = (WIDTH - LEFT - NODE_GAP * Math.max(0, nodes.length - 1)) / Math.max(1, nodes.length);
  const wide = Math.min(NODE_WIDTH, width);
  const middles = nodes.map((_, i) => LEFT + i * (wide + NODE_GAP) + wide / 2);
  const leaves = [...new Set(nodes.map((node) => node.leaf))];
  const spans = leaves.map((leaf) => {
    const mine = middles.filter((_, i) => nodes[i].leaf === leaf);
    return { leaf, from: Math.min(...mine) - wide / 2, to: Math.max(...mine) + wide / 2, mine };
  });
  const end = spans.length ? spans.at(-1).to : WIDTH;
  const shapes = [];
  for (const tier of answer.tiers) {
    const y = ROWS[tier.name];
    if (y === undefined) continue;
    const where = tier.name === "NVLINK" ? NODE_TOP + 44 : y;
    shapes.push(draw("text", { x: 0, y: where - 4, class: "tier" }, tier.label), draw("text", { x: 0, y: where + 12, class: "speed" }, `${bandwidth(tier)} a GPU`));
  }
  const on = (name) => answer.axes.filter((axis) => axis.tier === name && axis.axis !== "zero");
  for (const { from, to, mine } of spans) {
    const middle = (from + to) / 2;
    shapes.push(...cables(middle, ROWS.SPINE + 14, middle, ROWS.LEAF - 14, on("SPINE")));
    for (const x of mine) shapes.push(...cables(x, ROWS.LEAF + 14, x, NODE_TOP, [...on("LEAF"), ...on("SPINE")]));
  }
  shapes.push(switchBox(LEFT, ROWS.SPINE, end - LEFT, "SPINE", on("SPINE")));
  for (const { leaf, from, to } of spans) shapes.push(switchBox(from, ROWS.LEAF, to - from, "LEAF", on("LEAF"), `leaf ${leaf}`));
  nodes.forEach((node, i) => shapes.push(...nodeBox(node, middles[i] - wide / 2, wide, on("NVLINK"))));
  const more = answer.nodes - nodes.length;
  if (more > 0) shapes.push(draw("text", { x: end, y: 312, "text-anchor": "end", class: "speed" }, `and ${count(more)} more ${more === 1 ? "node" : "nodes"}`));
  return shapes;
}

/** One stroke for each axis that uses the way. */
function cables(x1, y1, x2, y2, axes) {
  const used = axes.length ? axes : [{ axis: "none" }];
  return used.map((axis, i) => {
    const shift = (i - (used.length - 1) / 2) * 6;
    return draw("line", { class: `cable axis-${axis.axis}`, x1: x1 + shift, y1, x2: x2 + shift, y2 });
  });
}

function switchBox(x, y, width, tier, axes, name) {
  const box = draw("g", { class: "switch" }, draw("rect", { x, y: y - 14, width, height: 28, rx: 6 }));
  if (name) box.append(draw("text", { x: x + 10, y: y + 4, class: "speed" }, name));
  box.append(...pills(axes, x + width - 8, y));
  return box;
}

/** Names of axes, from right to left. */
function pills(axes, right, y) {
  let x = right;
  return axes.flatMap((axis) => {
    const words = `${axis.axis.toUpperCase()} ${axis.degree}`;
    const width = 14 + words.length * 7.2;
    x -= width + 4;
    return [draw("rect", { class: `pill axis-${axis.axis}`, x, y: y - 9, width, height: 18, rx: 9 }), draw("text", { class: "pill-name", x: x + width / 2, y: y + 4, "text-anchor": "middle" }, words)];
  });
}

function nodeBox(node, x, width, axes) {
  const across = Math.min(4, node.gpus.length);
  const down = Math.min(2, Math.ceil(node.gpus.length / across));
  const size = Math.min(GPU, (width - 16 - 5 * (across - 1)) / across);
  const shapes = [draw("rect", { class: "node", x, y: NODE_TOP, width, height: 104, rx: 6 }), draw("text", { x: x + 8, y: NODE_TOP + 16, class: "speed" }, `node ${node.node}`), ...pills(width > 150 ? axes : axes.slice(0, 1), x + width - 4, NODE_TOP + 12)];
  node.gpus.slice(0, across * down).forEach((gpu, i) => {
    const left = x + (width - across * (size + 5) + 5) / 2 + (i % across) * (size + 5);
    const top = NODE_TOP + 27 + Math.floor(i / across) * (size + 5);
    shapes.push(draw("g", {}, draw("title", {}, `rank ${gpu.rank}: dp ${gpu.dp}, pp ${gpu.pp}, cp ${gpu.cp}, tp ${gpu.tp}`), draw("rect", { class: `gpu stage-${gpu.pp % 6}`, x: left, y: top, width: size, height: size, rx: 3 }),
      draw("text", { class: "gpu-name", x: left + size / 2, y: top + size / 2 + 4, "text-anchor": "middle" }, size >= 26 ? `p${gpu.pp}t${gpu.tp}` : "")));
  });
  return shapes;
}

const makeAxis = () => make("li", {}, make("b"), make("span", { class: "track", "aria-hidden": "true" }, make("i")), make("span"));

/** What an axis sends, and how much of it the step waits for. */
function showAxis(item, axis) {
  const [name, track, words] = item.children;
  put(name, "class", `axis-${axis.axis}`);
  say(name, `${axis.axis === "zero" ? "ZeRO" : axis.axis.toUpperCase()} ${axis.degree}`);
  track.firstElementChild.style.width = `${100 * axis.exposed_share}%`;
  say(words, `${axis.words} (${percent(axis.exposed_share)} of the step)`);
}

function showRule(item, rule) {
  put(item, "data-holds", rule.holds ? "yes" : "no");
  const share = rule.cost_share ? ` (${percent(Math.abs(rule.cost_share))} of it)` : "";
  const cost = rule.holds || rule.cost_s === null ? "" : `costs ${seconds(rule.cost_s)} a step${share}`;
  replace(item, make("b", {}, `${rule.holds ? "✓" : "✕"} ${rule.title}`), make("span", {}, rule.words), make("em", {}, cost),
    ...(rule.state ? [make("button", { type: "button", class: "quiet", on: { click: () => leap(rule.state) } }, rule.holds ? "See it broken" : "Mend")] : []));
}

function showTable() {
  const lines = answer.axes.map((axis) => [
    `${axis.label} ${axis.degree}`, axis.tier, axis.words, gb(axis.traffic_bytes), seconds(axis.busy_s), seconds(axis.exposed_s), percent(axis.exposed_share)]);
  fillTable(byId("cluster-table"), "Axes and networks", ["Axis", "network", "in words", "sent by a GPU", "wires busy", "exposed", "of the step"], lines);
}
