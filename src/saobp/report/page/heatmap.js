/** Layers and heads as a coloured table: a heat map that screen readers, keyboards and printers can read. */
import { inkOn, statisticColour, statisticGradient } from "./colours.js";
import { make } from "./dom.js";
import { compact, shown } from "./numbers.js";

const WIDE_FROM = 17;
export const MARKS = /** @type {Record<string, string>} */ ({
  localised: "▼",
  diffuse: "▲",
  sink: "●",
  undefined: "?",
});

/**
 * @typedef {object} Cell
 * @property {number | null} value
 * @property {string} verdict
 * @property {string} words  for a pointer that rests on it and for screen readers
 *
 * @typedef {object} HeatOptions
 * @property {string} caption
 * @property {string} statistic
 * @property {[number, number]} range
 * @property {string[]} layers
 * @property {((layer: number, head: number) => void) | null} choose
 * @property {[number, number] | null} chosen
 */

/**
 * @param {Cell[][]} cells
 * @param {HeatOptions} options
 * @returns {HTMLElement}
 */
export function heatMap(cells, options) {
  const heads = Math.max(...cells.map((row) => row.length));
  const colour = statisticColour(options.statistic, ...options.range);
  const numbers = Array.from({ length: heads }, (_, head) => head);
  const isNarrow = heads >= WIDE_FROM;
  return make(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": options.caption },
    make(
      "table",
      { class: isNarrow ? "heat narrow" : "heat" },
      make("caption", { class: "quiet" }, options.caption),
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          make("th", { scope: "col" }, make("span", { class: "corner" }, "layer \\ head")),
          numbers.map((head) =>
            make(
              "th",
              { scope: "col" },
              isNarrow && head % 4 ? make("span", { class: "quiet" }, head) : head,
            ),
          ),
        ),
      ),
      make(
        "tbody",
        {},
        cells.map((row, layer) =>
          make(
            "tr",
            {},
            make("th", { scope: "row", title: options.layers[layer] }, layer),
            row.map((cell, head) => heatCell(cell, layer, head, colour, isNarrow, options)),
          ),
        ),
      ),
    ),
  );
}

/**
 * @param {Cell} cell
 * @param {number} layer
 * @param {number} head
 * @param {(value: number) => string} colour
 * @param {boolean} isNarrow
 * @param {HeatOptions} options
 */
function heatCell(cell, layer, head, colour, isNarrow, options) {
  const mark = MARKS[cell.verdict] ?? "";
  const value = make("span", { class: isNarrow ? "quiet" : null }, shown(cell.value, 2));
  const content = [
    value,
    make("span", { class: "mark", "aria-hidden": "true" }, mark),
    make("span", { class: "quiet" }, ` ${cell.verdict}`),
  ];
  const { choose, chosen } = options;
  const isChosen = chosen !== null && chosen[0] === layer && chosen[1] === head;
  const element = make(
    "td",
    { title: cell.words, class: isChosen ? "chosen" : null },
    choose
      ? make(
          "button",
          {
            type: "button",
            "aria-current": isChosen ? "true" : null,
            "aria-label": cell.words,
            onclick: () => choose(layer, head),
          },
          content,
        )
      : content,
  );
  if (cell.value !== null) {
    const back = colour(cell.value);
    element.style.background = back;
    element.style.color = inkOn(back);
  }
  return element;
}

/**
 * The scale below the maps, with the ranges that have a name.
 * @param {string} statistic
 * @param {[number, number]} range
 * @param {import("./types.js").Limits} limits
 * @param {number | null} [largest]  possible entropy
 * @returns {HTMLElement}
 */
export function scaleBar(statistic, range, limits, largest = null) {
  const strip = make("div", { class: "strip" });
  strip.style.background = statisticGradient(statistic);
  const at = (/** @type {number} */ value) => `${(100 * (value - range[0])) / (range[1] - range[0])}%`;
  const ranges = namedRanges(statistic, range, limits, largest).map(([from, to, name]) => {
    const element = make("span", { class: `range ${name.split(" ")[0]}` }, make("span", {}, name));
    element.style.left = at(from);
    element.style.width = `calc(${at(to)} - ${at(from)})`;
    return element;
  });
  const ends = make(
    "div",
    { class: "ends" },
    make("span", {}, compact(range[0])),
    make("span", {}, compact(range[1])),
  );
  return make(
    "div",
    { class: "scale-bar", role: "img", "aria-label": barWords(statistic, range, limits, largest) },
    strip,
    ranges.length ? make("div", { class: "ranges" }, ranges) : null,
    ends,
  );
}

/**
 * @param {string} statistic
 * @param {[number, number]} range
 * @param {import("./types.js").Limits} limits
 * @param {number | null} [largest]  possible entropy
 * @returns {[number, number, string][]}
 */
function namedRanges(statistic, range, limits, largest) {
  if (statistic.endsWith("gtd")) {
    return [
      [0, limits.localised, "localised"],
      [limits.healthyFrom, limits.healthyTo, "healthy"],
      [limits.diffuse, 1, "diffuse"],
    ];
  }
  if (statistic === "attention_entropy" && largest) {
    return [[0, limits.collapsed * largest, "localised"]];
  }
  return statistic === "sink_mass" && range[1] > limits.sink ? [[limits.sink, range[1], "sink"]] : [];
}

/**
 * @param {string} statistic
 * @param {[number, number]} range
 * @param {import("./types.js").Limits} limits
 * @param {number | null} [largest]  possible entropy
 */
function barWords(statistic, range, limits, largest) {
  const named = namedRanges(statistic, range, limits, largest).map(
    ([from, to, name]) => `${name} from ${shown(from, 2)} to ${shown(to, 2)}`,
  );
  return [`Colour scale from ${shown(range[0], 2)} to ${shown(range[1], 2)}`, ...named].join("; ");
}
