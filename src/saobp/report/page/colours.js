/** Colours of runs, heads and maps. Every scale reads the same in print and for colour-blind eyes. */

/** Runs in order; beyond these they repeat with another dash. */
const RUNS = 8;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

/** On a colour of this luminance black and white have the same contrast, 4.58. */
const EVEN_LUMINANCE = 0.179;

/** GTD: brown is localised, green healthy, blue diffuse. The same stops as in the figures. */
const GTD = /** @type {[number, string][]} */ ([
  [0, "#8c2d19"],
  [0.5, "#f0c9a8"],
  [0.6, "#d3e8cd"],
  [0.8, "#d3e8cd"],
  [0.85, "#b9cfe6"],
  [1, "#1d4477"],
]);
const AMOUNT = /** @type {[number, string][]} */ ([
  [0, "#f7f3e8"],
  [0.35, "#e9c46a"],
  [0.7, "#c05f3c"],
  [1, "#4a1530"],
]);
const SIGNED = /** @type {[number, string][]} */ ([
  [0, "#1d4477"],
  [0.5, "#f4f4f0"],
  [1, "#a3361b"],
]);

/**
 * @param {number} place
 * @returns {{ colour: string, dash: string }}
 */
export function runColour(place) {
  return { colour: `var(--run-${place % RUNS})`, dash: DASHES[Math.floor(place / RUNS) % DASHES.length] };
}

/**
 * The scale of a statistic over its range.
 * @param {string} name
 * @param {number} low
 * @param {number} high
 * @returns {(value: number) => string}
 */
export function statisticColour(name, low, high) {
  const stops = name.endsWith("gtd") ? GTD : name === "strengths" ? SIGNED : AMOUNT;
  const range = high > low ? high - low : 1;
  return (value) => between(stops, (value - low) / range);
}

/**
 * A CSS gradient of the same scale.
 * @param {string} name
 * @returns {string}
 */
export function statisticGradient(name) {
  const stops = name.endsWith("gtd") ? GTD : name === "strengths" ? SIGNED : AMOUNT;
  return `linear-gradient(to right, ${stops.map(([at, colour]) => `${colour} ${100 * at}%`).join(", ")})`;
}

/**
 * Black or white, whichever can be read on a colour.
 * @param {string} colour  as rgb(r, g, b)
 * @returns {string}
 */
export function inkOn(colour) {
  const [red, green, blue] = (colour.match(/\d+/g) ?? []).map((part) => (Number(part) / 255) ** 2.2);
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return luminance > EVEN_LUMINANCE ? "#000000" : "#ffffff";
}

/**
 * 256 colours for a map, from the background up; signed maps have the background in the middle.
 * @param {boolean} isDark
 * @param {boolean} isSigned
 * @returns {Uint8ClampedArray}  red, green, blue, alpha of each
 */
export function mapColours(isDark, isSigned) {
  const back = isDark ? "#161b22" : "#ffffff";
  const stops = /** @type {[number, string][]} */ (
    isSigned
      ? [
          [0, isDark ? "#6cb2ff" : "#1d4f9c"],
          [0.5, back],
          [1, isDark ? "#ff9a62" : "#b2401a"],
        ]
      : [
          [0, back],
          [0.5, isDark ? "#2f6aa8" : "#7fb1dd"],
          [1, isDark ? "#d9f0ff" : "#0b2f63"],
        ]
  );
  const table = new Uint8ClampedArray(4 * 256);
  for (let place = 0; place < 256; place += 1) table.set([...mixed(stops, place / 255), 255], 4 * place);
  return table;
}

/**
 * @param {[number, string][]} stops
 * @param {number} share
 */
function between(stops, share) {
  return `rgb(${mixed(stops, share).map(Math.round).join(", ")})`;
}

/**
 * @param {[number, string][]} stops
 * @param {number} share
 * @returns {number[]}
 */
function mixed(stops, share) {
  const place = Math.min(1, Math.max(0, share));
  const upper = Math.max(
    1,
    stops.findIndex(([at]) => at >= place),
  );
  const [[from, low], [to, high]] = [stops[upper - 1], stops[upper]];
  const part = (place - from) / (to - from);
  const [first, second] = [rgb(low), rgb(high)];
  return first.map((value, channel) => value + part * (second[channel] - value));
}

/** @param {string} hex */
function rgb(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}
