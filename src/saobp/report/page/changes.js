/** How far a refinement moves attention: half the sum of absolute differences, 0 to 1. */
import { priorOf, refine } from "./refinement.js";
import { decodeHead } from "./scores.js";

const MOST_ENTRIES = 2_000_000;

/**
 * @param {Float64Array} before
 * @param {Float64Array} after
 * @param {number} length
 * @returns {Float64Array}  the change of each row
 */
export function rowChanges(before, after, length) {
  const changes = new Float64Array(length);
  for (let i = 0; i < before.length; i += 1)
    changes[Math.floor(i / length)] += Math.abs(after[i] - before[i]) / 2;
  return changes;
}

/**
 * The mean over rows.
 * @param {Float64Array} before
 * @param {Float64Array} after
 * @param {number} length
 */
export function headChange(before, after, length) {
  return rowChanges(before, after, length).reduce((sum, value) => sum + value, 0) / Math.max(1, length);
}

/** @param {Float64Array} values */
export function placeOfLargest(values) {
  return values.reduce((best, value, index) => (value > values[best] ? index : best), 0);
}

/**
 * Layer and head that change most; null where that would take long.
 * @param {import("./types.js").Explorer} explorer
 * @param {import("./types.js").Sentence} sentence
 * @param {(layer: number, head: number) => import("./types.js").Setting} settingOf
 * @returns {[number, number] | null}
 */
export function mostChanged(explorer, { scores, tokens: { length } }, settingOf) {
  const heads = scores.flat().filter((head) => head !== null).length;
  if (heads * length * length > MOST_ENTRIES) return null;
  let [best, most] = [/** @type {[number, number] | null} */ (null), -1];
  scores.forEach((row, layer) =>
    row.forEach((stored, head) => {
      if (stored === null) return;
      const prior = priorOf(decodeHead(stored, length), length, explorer.in_order[layer]);
      const change = headChange(prior.rows, refine(prior, settingOf(layer, head)), length);
      if (change > most) [best, most] = [[layer, head], change];
    }),
  );
  return best;
}
