/**
 * Refined attention rows, one head at a time: the same arithmetic as `saobp.propagation`, in double precision.
 * A map is a Float64Array of length * length entries, row after row.
 */

/** No refinement. */
export const PLAIN = { factor: "none", strength: 0, steps: 1, damping: 0 };

/** Keeps the logarithm of a similarity finite, as `floored` does in float32. */
const FLOOR = 1.1754943508222875e-38 / 1.1920928955078125e-7;

/**
 * @typedef {object} Prior  a head before refinement
 * @property {number} length
 * @property {Float64Array} logs  log probabilities, minus infinity at masked keys
 * @property {Float64Array} rows  their exponentials
 * @property {boolean} inOrder  causal: messages from earlier rows only
 */

/**
 * @param {Float64Array} scores  or log probabilities, minus infinity at masked keys
 * @param {number} length
 * @param {boolean} inOrder
 * @returns {Prior}
 */
export function priorOf(scores, length, inOrder) {
  const logs = normalisedLogs(scores, length);
  return { length, logs, rows: logs.map(Math.exp), inOrder };
}

/**
 * @param {Prior} prior
 * @param {import("./types.js").Setting} setting
 * @returns {Float64Array}
 */
export function refine(prior, setting) {
  const { length, logs, inOrder } = prior;
  let beliefs = prior.rows;
  if (setting.factor === "none") return beliefs;
  for (let step = 0; step < setting.steps; step += 1) {
    const updated = normalisedLogs(logBeliefs(logs, beliefs, length, setting, inOrder), length).map(Math.exp);
    if (setting.damping !== 0 && setting.steps > 1) {
      for (let i = 0; i < updated.length; i += 1) updated[i] += setting.damping * (beliefs[i] - updated[i]);
    }
    beliefs = updated;
  }
  return beliefs;
}

/**
 * @param {Float64Array} logPrior
 * @param {Float64Array} beliefs
 * @param {number} length
 * @param {import("./types.js").Setting} setting
 * @param {boolean} inOrder
 * @returns {Float64Array}
 */
function logBeliefs(logPrior, beliefs, length, setting, inOrder) {
  const { factor, strength } = setting;
  if (factor.startsWith("elemmul")) return alike(logPrior, beliefs, length, factor === "elemmul-prior");
  const messages = logMessages(beliefs, strength);
  if (factor !== "listing") return withMessages(logPrior, messages, length, inOrder, factor === "key-bias");
  return logPrior.map((value, i) => value - messages[i]);
}

/**
 * Potts messages, log(1 - gamma b); a masked key has b = 0 and so message 0.
 * @param {Float64Array} beliefs
 * @param {number} strength
 */
function logMessages(beliefs, strength) {
  const factor = Math.expm1(-strength);
  const messages = new Float64Array(beliefs.length);
  for (let i = 0; i < beliefs.length; i += 1) {
    if (beliefs[i] !== 0) messages[i] = Math.log1p(beliefs[i] * factor);
  }
  return messages;
}

/**
 * Prior and the messages of all other rows, or of all earlier rows; with a key bias the own message too.
 * @param {Float64Array} logPrior
 * @param {Float64Array} messages
 * @param {number} length
 * @param {boolean} inOrder
 * @param {boolean} withOwn
 */
function withMessages(logPrior, messages, length, inOrder, withOwn) {
  const total = new Float64Array(length);
  const result = new Float64Array(logPrior.length);
  if (!inOrder) {
    for (let i = 0; i < messages.length; i += 1) total[i % length] += messages[i];
  }
  for (let row = 0, i = 0; row < length; row += 1) {
    for (let key = 0; key < length; key += 1, i += 1) {
      if (inOrder && withOwn) total[key] += messages[i];
      result[i] = logPrior[i] + total[key] - (inOrder || withOwn ? 0 : messages[i]);
      if (inOrder && !withOwn) total[key] += messages[i];
    }
  }
  return result;
}

/**
 * ElemMul: similarity of rows, masked like the prior; with the prior, times it.
 * @param {Float64Array} logPrior
 * @param {Float64Array} beliefs
 * @param {number} length
 * @param {boolean} withPrior
 */
function alike(logPrior, beliefs, length, withPrior) {
  const result = new Float64Array(logPrior.length).fill(-Infinity);
  for (let i = 0; i < length; i += 1) {
    for (let j = 0; j <= i; j += 1) {
      let sum = 0;
      for (let k = 0; k < length; k += 1) sum += beliefs[i * length + k] * beliefs[j * length + k];
      const value = Math.log(Math.max(sum, FLOOR));
      for (const place of [i * length + j, j * length + i]) {
        if (logPrior[place] !== -Infinity) result[place] = withPrior ? value + logPrior[place] : value;
      }
    }
  }
  return result;
}

/**
 * Normalise each row: quantisation leaves the logarithm of its sum near 0, not at it.
 * @param {Float64Array} logs
 * @param {number} length
 */
function normalisedLogs(logs, length) {
  const result = new Float64Array(logs);
  for (let start = 0; start < logs.length; start += length) {
    let top = -Infinity,
      sum = 0;
    for (let i = start; i < start + length; i += 1) if (logs[i] > top) top = logs[i];
    if (top === -Infinity) continue;
    for (let i = start; i < start + length; i += 1) sum += Math.exp(logs[i] - top);
    const whole = top + Math.log(sum);
    for (let i = start; i < start + length; i += 1) result[i] -= whole;
  }
  return result;
}
