/** Decode the scores of a head: see explorer.py for the format. */

const HIDDEN = 65535;

/**
 * Log probabilities of some rows and keys of a head, for a small picture: minus infinity at masked keys.
 * @param {import("./types.js").StoredHead} head
 * @param {number} length
 * @param {number} size  rows and keys to take, at most all
 * @returns {Float64Array}  size * size
 */
export function sampleHead(head, length, size) {
  const bytes = atob(head.codes);
  const rows = new Float64Array(size * size).fill(-Infinity);
  const places = Array.from({ length: size }, (_, index) => Math.floor((index * length) / size));
  for (const [i, row] of places.entries()) {
    const start = head.triangle ? (row * (row + 1)) / 2 : row * length;
    for (const [j, key] of places.entries()) {
      if (head.triangle && key > row) break;
      const place = 2 * (start + key);
      const code = bytes.charCodeAt(place) | (bytes.charCodeAt(place + 1) << 8);
      if (code !== HIDDEN) rows[i * size + j] = -((code * head.step) ** 2);
    }
  }
  return rows;
}

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
