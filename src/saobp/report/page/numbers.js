/** Numbers as a reader wants them. */

/**
 * A fixed number of digits for values near one, few significant ones for others; a dash for none.
 * @param {number | null | undefined} value
 * @param {number} [digits]
 * @returns {string}
 */
export function shown(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (value !== 0 && size < 10 ** -digits) return value.toExponential(1);
  if (size >= 1e5) return compact(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : trimmed(value, size >= 100 ? 1 : digits);
}

/**
 * For axes: 1200 is 1.2k.
 * @param {number} value
 * @returns {string}
 */
export function compact(value) {
  const size = Math.abs(value);
  for (const [unit, mark] of /** @type {[number, string][]} */ ([
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])) {
    if (size >= unit) return `${Number((value / unit).toPrecision(3))}${mark}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(3)));
}

/**
 * A change with its sign.
 * @param {number} value
 * @returns {string}
 */
export function signed(value) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(3);
  if (Number(text) === 0) return "0.000";
  return `${value < 0 ? "−" : "+"}${text}`;
}

/**
 * @param {number} value
 * @param {number} digits
 */
function trimmed(value, digits) {
  return value.toFixed(digits).replace("-", "−");
}

/**
 * Mean of the numbers that are there; null if there are none.
 * @param {(number | null)[]} values
 * @returns {number | null}
 */
export function mean(values) {
  const there = values.filter((value) => value !== null);
  return there.length ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
}

/**
 * The lowest and the highest of the values, of which there may be too many for Math.min; zeros if there are none.
 * @param {number[]} values
 * @returns {[number, number]}
 */
export function extent(values) {
  if (!values.length) return [0, 0];
  let [low, high] = [values[0], values[0]];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/**
 * "1 head", "2 heads".
 * @param {number} number
 * @param {string} noun
 * @returns {string}
 */
export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}
