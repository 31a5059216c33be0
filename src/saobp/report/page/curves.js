/** The section of curves: axis, smoothing and selected runs apply to all charts. */
import { Chart } from "./charts.js";
import { onInput } from "./dom.js";

/** @param {import("./types.js").Figure[]} figures */
export function startCurves(figures) {
  const charts = figures.map((figure) => ({ figure, chart: new Chart(figure.id ?? "") }));
  const state = { axis: "step", scale: "auto", smooth: "0", hidden: new Set() };
  const refresh = () => {
    for (const { figure, chart } of charts) chart.show(arranged(figure, state));
  };
  for (const name of /** @type {const} */ (["axis", "scale", "smooth"]))
    onInput(`curve-${name}`, (value) => {
      state[name] = value;
      refresh();
    });
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const place = Number(/** @type {HTMLElement} */ (button).dataset.place);
      const isHidden = !state.hidden.delete(place) && Boolean(state.hidden.add(place));
      button.setAttribute("aria-pressed", String(!isHidden));
      refresh();
    });
  }
  refresh();
}

/**
 * The figure on the selected axis, smoothed, without hidden runs.
 * @param {import("./types.js").Figure} figure
 * @param {{ axis: string, scale: string, smooth: string, hidden: Set<number> }} state
 */
function arranged(figure, { axis, scale, smooth, hidden }) {
  const others = figure.x?.[axis];
  const data = figure.data
    .map((trace, i) => ({ ...trace, x: others ? others[i] : trace.x, y: smoothed(trace.y, Number(smooth)) }))
    .filter((trace) => !hidden.has(trace.meta.place));
  const values = data.flatMap((trace) => trace.y.filter((/** @type {unknown} */ y) => y !== null));
  const low = values.reduce((least, y) => Math.min(least, y), Infinity);
  const high = values.reduce((most, y) => Math.max(most, y), -Infinity);
  const isLog = low > 0 && !figure.layout.shapes && (scale === "auto" ? figure.isLog : scale === "log");
  const { xaxis, yaxis } = figure.layout;
  const title = { ...xaxis.title, text: others ? axis : xaxis.title.text };
  const up = isLog ? { type: "log", tickformat: ",~r", ...logTicks(high / low) } : {};
  return {
    ...figure,
    data,
    layout: { ...figure.layout, xaxis: { ...xaxis, title }, yaxis: { ...yaxis, ...up } },
  };
}

/**
 * Ticks at every digit, at 1, 2 and 5, or at powers of ten, by the range.
 * @param {number} ratio
 */
function logTicks(ratio) {
  if (ratio < 1.6) return {};
  return { dtick: ratio < 8 ? "D1" : ratio < 2000 ? "D2" : 1 };
}

/**
 * Bias-corrected exponential moving average; gaps stay gaps.
 * @param {(number | null)[]} values
 * @param {number} keep
 */
function smoothed(values, keep) {
  let sum = 0,
    weight = 0;
  if (keep === 0) return values;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}
