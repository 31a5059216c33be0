/**
 * GTD, entropies and sink mass of a map, as in `saobp.metrics`. Two matrix products take a third of a second at
 * 512 tokens, so the work is a generator that pauses now and then: run it in slices, or at once with `finished`.
 */

const ROWS_BETWEEN_PAUSES = 8;

/**
 * NaN for a map with an empty row, as from non-finite scores.
 * @param {Float64Array} rows
 * @param {number} length
 * @param {number} beta
 * @returns {Generator<void, import("./types.js").Numbers, void>}
 */
export function* measuring(rows, length, beta) {
  if (hasEmptyRow(rows, length)) {
    return { gtd: NaN, indirect_entropy: NaN, attention_entropy: NaN, sink_mass: NaN };
  }
  const square = yield* product(rows, rows, length);
  const powers = new Float64Array(rows.length);
  for (let i = 0; i < rows.length; i += 1) powers[i] = beta * rows[i] + beta * beta * square[i];
  const paths = yield* product(square, powers, length);
  for (let i = 0; i < rows.length; i += 1) paths[i] = beta * (square[i] + paths[i]);
  const indirect = squaredNorm(paths);
  return {
    gtd: indirect / (squaredNorm(rows) + indirect),
    indirect_entropy: meanEntropy(paths, length),
    attention_entropy: meanEntropy(rows, length),
    sink_mass: sinkMass(rows, length),
  };
}

/**
 * Run a generator to its end.
 * @template T
 * @param {Generator<void, T, void>} work
 * @returns {T}
 */
export function finished(work) {
  for (;;) {
    const { done, value } = work.next();
    if (done) return value;
  }
}

/**
 * The entropy of uniform rows.
 * @param {Float64Array} rows
 * @param {number} length
 * @returns {number}
 */
export function largestEntropy(rows, length) {
  let sum = 0;
  for (let start = 0; start < rows.length; start += length) {
    let seen = 0;
    for (let i = start; i < start + length; i += 1) if (rows[i] !== -Infinity) seen += 1;
    sum += Math.log(Math.max(seen, 1));
  }
  return sum / length;
}

/**
 * Verdict on a head, by the rules of `saobp.metrics.verdict`.
 * @param {import("./types.js").Numbers} numbers
 * @param {number} largest  the largest possible entropy
 * @param {import("./types.js").Limits} limits
 * @returns {string}
 */
export function verdictOf(numbers, largest, limits) {
  const { gtd, attention_entropy: entropy, sink_mass: sink } = numbers;
  if (![gtd, entropy, sink].every(Number.isFinite)) return "undefined";
  if (sink >= limits.sink) return "sink";
  if (gtd < limits.localised || (largest > 0 && entropy / largest < limits.collapsed)) return "localised";
  if (gtd > limits.diffuse) return "diffuse";
  return gtd >= limits.healthyFrom && gtd <= limits.healthyTo ? "healthy" : "borderline";
}

/**
 * left * right, four rows of `right` at a time for fewer writes to the result.
 * @param {Float64Array} left
 * @param {Float64Array} right
 * @param {number} n
 * @returns {Generator<void, Float64Array, void>}
 */
function* product(left, right, n) {
  const result = new Float64Array(n * n);
  const whole = n - (n % 4);
  for (let i = 0; i < n; i += 1) {
    const row = result.subarray(i * n, (i + 1) * n);
    for (let k = 0; k < whole; k += 4) {
      const at = i * n + k,
        from = k * n;
      const a = left[at],
        b = left[at + 1],
        c = left[at + 2],
        d = left[at + 3];
      if (a === 0 && b === 0 && c === 0 && d === 0) continue;
      for (let j = 0, p = from; j < n; j += 1, p += 1) {
        row[j] += a * right[p] + b * right[p + n] + c * right[p + 2 * n] + d * right[p + 3 * n];
      }
    }
    for (let k = whole; k < n; k += 1) {
      const a = left[i * n + k];
      for (let j = 0; j < n; j += 1) row[j] += a * right[k * n + j];
    }
    if (i % ROWS_BETWEEN_PAUSES === ROWS_BETWEEN_PAUSES - 1) yield;
  }
  return result;
}

/**
 * @param {Float64Array} rows
 * @param {number} length
 */
function hasEmptyRow(rows, length) {
  for (let start = 0; start < rows.length; start += length) {
    if (!rows.subarray(start, start + length).some((weight) => weight > 0)) return true;
  }
  return false;
}

/** @param {Float64Array} values */
function squaredNorm(values) {
  let sum = 0;
  for (let i = 0; i < values.length; i += 1) sum += values[i] * values[i];
  return sum;
}

/**
 * Mean entropy of the rows in nats, each divided by its sum.
 * @param {Float64Array} rows
 * @param {number} length
 */
function meanEntropy(rows, length) {
  let total = 0;
  for (let start = 0; start < rows.length; start += length) {
    let sum = 0,
      weighted = 0;
    for (let i = start; i < start + length; i += 1) {
      if (rows[i] > 0) {
        sum += rows[i];
        weighted += rows[i] * Math.log(rows[i]);
      }
    }
    if (sum > 0) total += Math.log(sum) - weighted / sum;
  }
  return total / length;
}

/**
 * @param {Float64Array} rows
 * @param {number} length
 */
function sinkMass(rows, length) {
  const columns = new Float64Array(length);
  for (let i = 0; i < rows.length; i += 1) columns[i % length] += rows[i];
  return columns.reduce((most, value) => Math.max(most, value), 0) / length;
}
