/** Charts: figures from Python, drawn by plotly when near the viewport, in the colours of the page. */
import { make, table } from "./dom.js";
import { loadPlotly } from "./library.js";
import { shown } from "./numbers.js";
import { isDark, isPrinting, onThemeChange } from "./theme.js";

const NEAR = "600px 0px";
const TABLE_ROWS = 40;
/** Pixels beside the cells of a heat map, and of a cell that is too narrow for a number. */
const BESIDE_MAP = 116;
const NARROW_CELL = 30;
/** Pixels that one of two columns of printed charts has. */
const PRINTED_COLUMN = 310;
const CONFIG = {
  displaylogo: false,
  responsive: true,
  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]],
};
const STEPS = /** @type {Record<string, number>} */ ({
  ArrowLeft: -1,
  ArrowRight: 1,
  PageDown: 10,
  PageUp: -10,
  Home: -Infinity,
  End: Infinity,
});

/** @type {any} */
let plotly = null;
/** @type {Set<Chart>} */
const all = new Set();

/** One panel of the page with its title, its plot and its table. */
export class Chart {
  /**
   * @param {string} id
   * @param {((layer: number, head: number) => void) | null} [press]  told which cell of a heat map is pressed
   */
  constructor(id, press = null) {
    this.press = press;
    const element = /** @type {HTMLElement} */ (document.querySelector(`[data-chart="${CSS.escape(id)}"]`));
    this.element = element;
    this.title = this.part(".chart-title");
    this.plot = this.part(".plot");
    this.empty = this.part(".empty");
    this.details = /** @type {HTMLDetailsElement} */ (this.part("details"));
    /** @type {import("./types.js").Figure | null} */
    this.figure = null;
    this.isNear = false;
    this.isDue = false;
    this.point = -1;
    this.details.addEventListener("toggle", () => this.fillTable());
    this.plot.addEventListener("keydown", (event) => this.read(event));
    all.add(this);
    const seen = (/** @type {IntersectionObserverEntry[]} */ entries) => {
      this.isNear = entries[entries.length - 1].isIntersecting;
      this.draw();
    };
    new IntersectionObserver(seen, { rootMargin: NEAR }).observe(this.plot);
  }

  /**
   * @param {string} selector
   * @returns {HTMLElement}
   */
  part(selector) {
    return /** @type {HTMLElement} */ (this.element.querySelector(selector));
  }

  /**
   * Show a figure, or the reason for none.
   * @param {import("./types.js").Figure | null} figure
   * @param {string} [why]
   */
  show(figure, why = "") {
    this.figure = figure;
    this.plot.hidden = this.details.hidden = figure === null;
    this.empty.hidden = figure !== null;
    this.empty.textContent = why;
    if (figure === null) return;
    this.title.textContent = figure.title;
    if (figure.label) this.plot.setAttribute("aria-label", figure.label);
    this.plot.style.height = `${figure.layout.height}px`;
    this.point = -1;
    this.isDue = true;
    this.draw();
    this.fillTable();
  }

  draw() {
    if (!plotly || !this.figure || !this.isDue || !(this.isNear || isPrinting())) return;
    this.isDue = false;
    const { data, layout } = this.figure;
    const size = isPrinting() ? { width: PRINTED_COLUMN } : { autosize: true };
    const drag = matchMedia("(pointer: coarse)").matches ? { dragmode: false } : {};
    const own = { ...layout, ...size, ...drag, template: template() };
    const bar = data[0]?.type === "heatmap" ? { displayModeBar: false } : {};
    const drawn = data.map(coloured).map((trace) => withRoom(trace, this.plot.clientWidth));
    plotly.react(this.plot, drawn, own, { ...CONFIG, ...bar });
    if (!this.press) return;
    const { press } = this;
    this.press = null;
    /** @type {any} */ (this.plot).on("plotly_click", (/** @type {any} */ { points: [{ x, y }] }) =>
      press(y, x),
    );
  }

  /**
   * Arrow keys step through the points of a chart.
   * @param {KeyboardEvent} event
   */
  read(event) {
    const step = STEPS[event.key];
    const lines = this.figure?.data.filter((trace) => trace.y?.length) ?? [];
    const readout = this.element.querySelector(".readout");
    if (step === undefined || !lines.length || !readout) return;
    event.preventDefault();
    const values = xValuesOf(lines);
    const start = this.point < 0 && step < 0 ? values.length : this.point;
    this.point = Math.max(0, Math.min(values.length - 1, start + step));
    const x = values[this.point];
    const here = lines.map((line) => ({ name: line.meta.name, y: line.y[line.x.indexOf(x)] ?? null }));
    const there = here.filter(({ y }) => y !== null);
    readout.textContent =
      `${this.figure?.layout.xaxis.title.text} ${x.toLocaleString("en")}: ` +
      there.map(({ name, y }) => `${name} ${shown(y)}`).join(", ");
    if (there.length) plotly?.Fx.hover(this.plot, { xval: x, yval: there[0].y }, "xy");
  }

  fillTable() {
    if (!this.details.open || !this.figure) return;
    const { data } = this.figure;
    const filled = data[0]?.type === "heatmap" ? gridTable(this.figure) : lineTable(this.figure);
    this.details.querySelector(".folded")?.replaceChildren(filled);
  }
}

/** Unpack the library, draw charts near the viewport, and redraw all when colours change. */
export async function startCharts() {
  onThemeChange(() => {
    for (const chart of all) {
      chart.isDue = true;
      chart.draw();
    }
  });
  plotly = await loadPlotly();
  for (const chart of all) chart.draw();
  document.documentElement.dataset.charts = plotly ? "ready" : "none";
}

/**
 * @param {string} name
 * @returns {string}
 */
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * A heat map shows marks alone where its cells are too narrow for numbers.
 * @param {any} trace
 * @param {number} width
 */
function withRoom(trace, width) {
  if (trace.type !== "heatmap" || !trace.meta.marks) return trace;
  const columns = Math.max(...trace.z.map((/** @type {unknown[]} */ row) => row.length));
  return (width - BESIDE_MAP) / columns < NARROW_CELL ? { ...trace, text: trace.meta.marks } : trace;
}

/** @param {any} trace */
function coloured(trace) {
  if (trace.type === "heatmap") return isDark() ? { ...trace, colorscale: trace.meta.dark } : trace;
  return trace.meta ? { ...trace, line: { ...trace.line, color: css(`--run-${trace.meta.run}`) } } : trace;
}

/** Colours of a layout. */
function template() {
  const [ink, soft, line, panel, accent] = ["--ink", "--soft", "--line", "--panel", "--accent"].map(css);
  const axis = { gridcolor: line, linecolor: soft, tickcolor: line, zeroline: false };
  const clear = "rgba(0,0,0,0)";
  return {
    layout: {
      paper_bgcolor: clear,
      plot_bgcolor: clear,
      font: { color: soft, size: 11, family: getComputedStyle(document.body).fontFamily },
      xaxis: { ...axis, showline: true },
      yaxis: axis,
      hoverlabel: { bgcolor: panel, bordercolor: line, font: { color: ink }, namelength: -1 },
      modebar: { bgcolor: clear, color: soft, activecolor: accent },
      shapedefaults: { fillcolor: css("--band"), line: { width: 0, color: accent }, layer: "below" },
      annotationdefaults: { font: { color: css("--good") } },
    },
  };
}

/**
 * All x values of the lines, sorted.
 * @param {any[]} lines
 * @returns {number[]}
 */
function xValuesOf(lines) {
  const values = new Set(lines.flatMap((line) => line.x.filter((/** @type {unknown} */ x) => x !== null)));
  return [...values].sort((a, b) => a - b);
}

/** @param {import("./types.js").Figure} figure */
function lineTable({ title, data, layout }) {
  const values = xValuesOf(data);
  const rows = Math.min(TABLE_ROWS, values.length);
  const chosen = Array.from(
    { length: rows },
    (_, row) => values[Math.round((row * (values.length - 1)) / Math.max(1, rows - 1))],
  );
  const across = layout.xaxis.title.text;
  const all = table(
    `${title} by ${across}`,
    [across, ...data.map((line) => line.meta.name)],
    chosen.map((x) => [
      x.toLocaleString("en"),
      ...data.map((line) => (line.x.includes(x) ? shown(line.y[line.x.indexOf(x)], 4) : "")),
    ]),
  );
  const words = values.length > rows ? `${rows} of ${values.length} points.` : "";
  return make("div", {}, words ? make("p", { class: "note" }, words) : null, all);
}

/** @param {import("./types.js").Figure} figure */
function gridTable({ title, data: [{ z, customdata }] }) {
  const heads = Math.max(...z.map((/** @type {unknown[]} */ row) => row.length));
  return table(
    `${title}, layers down, heads across`,
    ["layer", ...Array.from({ length: heads }, (_, head) => `head ${head}`)],
    z.map((/** @type {(number | null)[]} */ row, /** @type {number} */ layer) => [
      layer,
      ...row.map((value, head) => `${shown(value)} ${customdata[layer][head]}`.trim()),
    ]),
  );
}
