/** Number formatting. */

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
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(digits).replace("-", "−");
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
 * Mean of the non-null numbers; null if there are none.
 * @param {(number | null)[]} values
 * @returns {number | null}
 */
export function mean(values) {
  const there = values.filter((value) => value !== null);
  return there.length ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
}
