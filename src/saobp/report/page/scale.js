/** From values to places on an axis, with round numbers to write beside it. */

/**
 * @typedef {object} Scale
 * @property {(value: number) => number} at  0 to 1 inside the range
 * @property {number[]} ticks
 */

/**
 * @param {number} low
 * @param {number} high
 * @param {boolean} isLog
 * @param {number} [wanted]  about so many ticks
 * @returns {Scale}
 */
export function axis(low, high, isLog, wanted = 5) {
  if (isLog && low > 0) return logAxis(low, high, wanted);
  if (high - low < 1e-12 * Math.max(1, Math.abs(high)))
    [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  return { at: (value) => (value - low) / (high - low), ticks: roundSteps(low, high, wanted) };
}

/**
 * @param {number} low
 * @param {number} high
 * @param {number} wanted
 * @returns {Scale}
 */
function logAxis(low, high, wanted) {
  if (high / low < 1.0001) [low, high] = [low / 1.2, high * 1.2];
  const [from, to] = [Math.log(low), Math.log(high)];
  const ticks = [];
  for (const marks of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
    ticks.length = 0;
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const mark of marks) {
        const tick = mark * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(Number(tick.toPrecision(3)));
      }
    }
    if (ticks.length >= Math.min(wanted, 3)) break;
  }
  const few = ticks.length < 2 ? roundSteps(low, high, wanted) : ticks;
  return { at: (value) => (Math.log(value) - from) / (to - from), ticks: few };
}

/**
 * Steps of 1, 2 or 5 times a power of ten.
 * @param {number} low
 * @param {number} high
 * @param {number} wanted
 * @returns {number[]}
 */
function roundSteps(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((mark) => mark * power).find((size) => size >= rough * 0.999) ?? 10 * power;
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) {
    ticks.push(Number((place * step).toPrecision(12)));
  }
  return ticks;
}
