/** A line chart in SVG: redrawn to the width it has, read with pointer, keyboard or as a table. */
import { draw, folded, make, table } from "./dom.js";
import { compact, counted, extent, shown } from "./numbers.js";
import { axis } from "./scale.js";

const HEIGHT = 230;
const MARGIN = { left: 52, right: 18, top: 10, bottom: 36 };
const TABLE_ROWS = 40;

/**
 * @typedef {object} Line
 * @property {string} name
 * @property {string} colour
 * @property {string} dash
 * @property {boolean} isFaint
 * @property {[number, number][]} points  finite, in order
 *
 * @typedef {object} ChartOptions
 * @property {string} title
 * @property {string} across  what the horizontal axis is
 * @property {boolean} isLog
 * @property {[number, number] | null} band  a range to mark
 * @property {string} bandName
 * @property {[number, number] | null} range  of the vertical axis, if it is fixed
 */

/**
 * @param {Line[]} lines
 * @param {ChartOptions} options
 * @returns {HTMLElement}
 */
export function chart(lines, options) {
  const readout = make("p", { class: "readout", role: "status" });
  const canvas = draw("svg", {
    class: "chart",
    tabindex: 0,
    role: "img",
    height: HEIGHT,
    "aria-label":
      `${options.title} against ${options.across}, ${counted(lines.length, "curve")}. ` +
      "Arrow keys read values; the table below holds them.",
  });
  const view = { lines, options, canvas, readout, width: 0, cursor: /** @type {number | null} */ (null) };
  const places = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const move = (/** @type {number} */ place) => {
    view.cursor = Math.max(0, Math.min(places.length - 1, place));
    mark(view, places[view.cursor]);
  };
  canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      PageDown: 10,
      PageUp: -10,
      Home: -places.length,
      End: places.length,
    };
    const step = steps[/** @type {keyof typeof steps} */ (event.key)];
    if (step === undefined) return;
    event.preventDefault();
    move((view.cursor ?? (step > 0 ? -1 : places.length)) + step);
  });
  canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    move(nearest(places, places[0] + share * (places[places.length - 1] - places[0])));
  });
  canvas.addEventListener("pointerleave", () => {
    view.cursor = null;
    mark(view, null);
  });
  const figure = make(
    "figure",
    { class: "panel chart-panel" },
    make("figcaption", {}, make("h3", {}, options.title)),
    canvas,
    readout,
    folded("Table", () => asTable(lines, options, places)),
  );
  new ResizeObserver(([entry]) => paint(view, entry.contentRect.width)).observe(figure);
  mark(view, null);
  return figure;
}

/**
 * @param {any} view
 * @param {number} room
 */
function paint(view, room) {
  const width = Math.max(200, room);
  if (Math.abs(width - view.width) < 1) return;
  view.width = width;
  const { lines, options, canvas } = view;
  canvas.setAttribute("width", width);
  canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const xs = lines.flatMap((/** @type {Line} */ line) => line.points.map(([x]) => x));
  const ys = lines.flatMap((/** @type {Line} */ line) => line.points.map(([, y]) => y));
  const isLog = options.isLog && extent(ys)[0] > 0;
  const [low, high] = options.range ?? padded(...extent(ys), isLog);
  const across = axis(...extent(xs), false, width < 420 ? 4 : 6);
  const up = axis(low, high, isLog, 5);
  const bottom = HEIGHT - MARGIN.bottom;
  view.x = (/** @type {number} */ x) => MARGIN.left + across.at(x) * (width - MARGIN.left - MARGIN.right);
  view.y = (/** @type {number} */ y) => bottom - up.at(y) * (bottom - MARGIN.top);
  const right = width - MARGIN.right;
  const parts = [];
  if (options.band) {
    const [from, to] = options.band.map((/** @type {number} */ y) =>
      Math.min(bottom, Math.max(MARGIN.top, view.y(y))),
    );
    parts.push(
      draw("rect", {
        class: "band",
        x: MARGIN.left,
        width: right - MARGIN.left,
        y: to,
        height: Math.max(0, from - to),
      }),
    );
    if (from - to > 14)
      parts.push(draw("text", { class: "band-name", x: MARGIN.left + 6, y: to + 12 }, options.bandName));
  }
  for (const tick of up.ticks) {
    parts.push(
      draw("line", { class: "grid", x1: MARGIN.left, x2: right, y1: view.y(tick), y2: view.y(tick) }),
    );
    parts.push(
      draw("text", { x: MARGIN.left - 6, y: view.y(tick) + 4, "text-anchor": "end" }, compact(tick)),
    );
  }
  const isWhole = xs.every(Number.isInteger);
  for (const tick of across.ticks.filter((value) => !isWhole || Number.isInteger(value))) {
    parts.push(draw("text", { x: view.x(tick), y: bottom + 15, "text-anchor": "middle" }, compact(tick)));
  }
  parts.push(draw("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }));
  parts.push(
    draw(
      "text",
      { class: "axis-name", x: (MARGIN.left + right) / 2, y: HEIGHT - 4, "text-anchor": "middle" },
      options.across,
    ),
  );
  for (const line of lines) parts.push(...strokes(line, view));
  view.cursorLine = draw("line", { class: "cursor", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
  canvas.replaceChildren(...parts, view.cursorLine);
}

/**
 * The line itself, with dots where there are few points to see.
 * @param {Line} line
 * @param {any} view
 */
function strokes(line, view) {
  const places = line.points.map(([x, y]) => `${view.x(x).toFixed(1)},${view.y(y).toFixed(1)}`);
  const path = draw("polyline", {
    class: line.isFaint ? "line faint" : "line",
    points: places.join(" "),
    "stroke-dasharray": line.dash || null,
  });
  path.style.stroke = line.colour;
  if (line.points.length > 16) return [path];
  const dots = line.points.map(([x, y]) => draw("circle", { cx: view.x(x), cy: view.y(y), r: 2.6 }));
  for (const dot of dots) dot.style.fill = line.colour;
  return [path, ...dots];
}

/**
 * Show the values at one place, or none.
 * @param {any} view
 * @param {number | null} place
 */
function mark(view, place) {
  if (place === null || place === undefined) {
    view.cursorLine?.setAttribute("visibility", "hidden");
    const ends = view.lines.map((/** @type {Line} */ line) => [line, line.points[line.points.length - 1]]);
    view.readout.replaceChildren("last: ", ...named(ends));
    return;
  }
  view.cursorLine?.setAttribute("visibility", "visible");
  view.cursorLine?.setAttribute("x1", view.x(place));
  view.cursorLine?.setAttribute("x2", view.x(place));
  const here = view.lines.map((/** @type {Line} */ line) => [
    line,
    line.points[
      nearest(
        line.points.map(([x]) => x),
        place,
      )
    ],
  ]);
  view.readout.replaceChildren(`${view.options.across} ${compact(place)}: `, ...named(here));
}

/** @param {[Line, [number, number]][]} entries */
function named(entries) {
  return entries.slice(0, 12).map(([line, point]) => {
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = line.colour;
    return make(
      "span",
      { class: "reading" },
      swatch,
      entries.length > 1 ? `${line.name} ` : "",
      make("b", {}, shown(point[1])),
    );
  });
}

/**
 * @param {Line[]} lines
 * @param {ChartOptions} options
 * @param {number[]} places
 */
function asTable(lines, options, places) {
  const rows = Math.min(TABLE_ROWS, places.length);
  const chosen = [
    ...new Set(
      Array.from(
        { length: rows },
        (_, row) => places[Math.round((row * (places.length - 1)) / Math.max(1, rows - 1))],
      ),
    ),
  ];
  const cells = chosen.map((place) => [
    compact(place),
    ...lines.map((line) => {
      const at =
        line.points[
          nearest(
            line.points.map(([x]) => x),
            place,
          )
        ];
      return at[0] === place ? shown(at[1], 4) : "";
    }),
  ]);
  return table(
    `${options.title} by ${options.across}`,
    [options.across, ...lines.map((line) => line.name)],
    cells,
  );
}

/**
 * @param {number[]} sorted
 * @param {number} value
 * @returns {number}
 */
function nearest(sorted, value) {
  let low = 0,
    high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}

/**
 * A little room above and below.
 * @param {number} low
 * @param {number} high
 * @param {boolean} isLog
 * @returns {[number, number]}
 */
function padded(low, high, isLog) {
  if (isLog) return [low / 1.05, high * 1.05];
  const room = (high - low) * 0.05;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}
