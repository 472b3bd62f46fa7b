// A chart of the chart library (Chart.js), in the page's letters and colours.

let loading = null;

/** The library, once a chart is wanted. Its file is no module: it sets a global. */
const library = () => (loading ??= import("./lib/Chart.bundle.js").then(() => {
  const { Chart } = globalThis;
  Object.assign(Chart.defaults, { animation: false, events: [], maintainAspectRatio: false });
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  Chart.defaults.font.size = 11;
  Object.assign(Chart.defaults.plugins.legend, { display: false });
  Object.assign(Chart.defaults.plugins.tooltip, { enabled: false });
  return Chart;
}));

/**
 * What draws in `canvas`, which lies in a box of the chart's size. It takes what tells datasets and scales, as the
 * library has them, asks that when the next frame is made, and again when the theme changes.
 * @param {HTMLCanvasElement} canvas @param {(chart: any) => void} placed called with the library's chart whenever points have moved
 * @returns {(paint: () => {datasets: any[], scales: any}) => void}
 */
export function plotIn(canvas, placed) {
  let chart = null;
  let paint = null;
  let frame = 0;
  const show = async () => {
    const Chart = await library();
    const { datasets, scales } = paint();
    if (chart) {
      chart.data.datasets = datasets;
      chart.options.scales = scales;
      chart.update();
    } else chart = new Chart(canvas, { type: "scatter", data: { datasets }, options: { scales }, plugins: [{ id: "placed", afterUpdate: placed }] });
  };
  const soon = () => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(show);
  };
  addEventListener("themechange", () => chart && soon());
  return (next) => {
    paint = next;
    soon();
  };
}

/** A scale: what its marks say, about how many there are, and what else the library is told of it. */
export function scale(written, most, { title, ...more } = {}) {
  const [line, muted] = ["--line", "--muted"].map((name) => getComputedStyle(document.body).getPropertyValue(name));
  return {
    type: "linear",
    border: { display: false },
    grid: { color: line, tickLength: 4 },
    ticks: { callback: (value) => written(value), color: muted, includeBounds: false, maxRotation: 0, maxTicksLimit: most },
    title: { display: Boolean(title), text: title, color: muted },
    ...more,
  };
}

/** The colour that the style sheet gives to an element's text, and to its ground. */
export const inkOf = (element) => getComputedStyle(element).color;
export const groundOf = (element) => getComputedStyle(element).backgroundColor;
