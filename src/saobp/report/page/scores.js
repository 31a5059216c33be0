/** Decode the scores of a head: see quantized_scores.py for the format. */

const HIDDEN = 65535;

/**
 * Log probabilities of a head, row-major; minus infinity at masked keys.
 * @param {import("./types.js").StoredHead} head
 * @param {number} length
 * @returns {Float64Array}
 */
export function decodeHead(head, length) {
  const bytes = atob(head.codes);
  const rows = new Float64Array(length * length).fill(-Infinity);
  let place = 0;
  for (let row = 0; row < length; row += 1) {
    const end = head.triangle ? row + 1 : length;
    for (let key = 0; key < end; key += 1, place += 2) {
      const code = bytes.charCodeAt(place) | (bytes.charCodeAt(place + 1) << 8);
      if (code !== HIDDEN) rows[row * length + key] = -((code * head.step) ** 2);
    }
  }
  return rows;
}
