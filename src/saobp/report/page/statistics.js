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
 * Statistics of the uniform map under the mask of a head.
 * @param {Float64Array} logs  -Infinity where a row cannot see
 * @param {number} length
 * @param {number} beta
 * @returns {import("./types.js").UniformMap}
 */
export function uniformMap(logs, length, beta) {
  const rows = new Float64Array(logs.length);
  let inOrder = true;
  for (let row = 0; row < length; row += 1) {
    let seen = 0;
    for (let key = 0; key < length; key += 1) {
      const isSeen = logs[row * length + key] !== -Infinity;
      if (isSeen) seen += 1;
      if (isSeen !== key <= row) inOrder = false;
    }
    for (let key = 0; key < length; key += 1)
      if (logs[row * length + key] !== -Infinity) rows[row * length + key] = 1 / seen;
  }
  const entropy = meanEntropy(rows, length);
  const sink = sinkMass(rows, length);
  if (rows.every((weight) => weight === rows[0])) {
    const odds = (beta + beta ** 2 + beta ** 3) ** 2;
    return { gtd: odds / (1 + odds), entropy, sink };
  }
  if (!inOrder) return { gtd: finished(measuring(rows, length, beta)).gtd, entropy, sink };
  return { gtd: uniformCausalGtd(rows, length, beta), entropy, sink };
}

/**
 * A row of the next power of the uniform causal map is the mean of the rows above and its own.
 * @param {Float64Array} rows
 * @param {number} length
 * @param {number} beta
 * @returns {number}
 */
function uniformCausalGtd(rows, length, beta) {
  const sums = [0, 1, 2].map(() => new Float64Array(length));
  let indirect = 0;
  for (let row = 0; row < length; row += 1)
    for (let key = 0; key <= row; key += 1) {
      let [power, total] = [1 / (row + 1), 0];
      for (let hop = 0; hop < 3; hop += 1) {
        sums[hop][key] += power;
        power = sums[hop][key] / (row + 1);
        total += beta ** (hop + 1) * power;
      }
      indirect += total * total;
    }
  return indirect / (squaredNorm(rows) + indirect);
}

/**
 * Verdict on a head, by the rules of `saobp.metrics.verdict`.
 * @param {import("./types.js").Numbers} numbers
 * @param {import("./types.js").UniformMap} uniform
 * @param {import("./types.js").Limits} limits
 * @returns {string}
 */
export function verdictOf(numbers, uniform, limits) {
  const { gtd, attention_entropy: entropy, sink_mass: sink } = numbers;
  if (![gtd, entropy, sink].every(Number.isFinite)) return "undefined";
  if (uniform.sink < 1 && (sink - uniform.sink) / (1 - uniform.sink) >= limits.sink) return "sink";
  const share = uniform.entropy > 0 ? entropy / uniform.entropy : null;
  if (gtd < limits.localised || (share !== null && share < limits.collapsed)) return "localised";
  const [healthyTo, diffuse] = [limits.healthyTo, limits.diffuse].map((limit) => {
    const moved = (odds(limit) * odds(uniform.gtd)) / limits.fullOdds;
    return moved / (1 + moved);
  });
  if ((share !== null && share > limits.even) || (gtd > diffuse && (share ?? 1) >= limits.spread)) return "diffuse";
  return gtd >= limits.healthyFrom && gtd <= healthyTo ? "healthy" : "borderline";
}

/** @param {number} share */
function odds(share) {
  return share / (1 - share);
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
