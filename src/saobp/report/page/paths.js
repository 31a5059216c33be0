/** Paths of two hops between two tokens: from query to key via a third. */
import { byId, fillList, make, table } from "./dom.js";
import { shown } from "./numbers.js";

const LISTED = 6;

/**
 * @param {Float64Array} rows
 * @param {number} length
 * @param {number} from  the query
 * @param {number} to  the key
 * @returns {{ direct: number, total: number, via: Float64Array }}
 */
export function twoHops(rows, length, from, to) {
  const via = new Float64Array(length);
  let total = 0;
  for (let k = 0; k < length; k += 1) total += via[k] = rows[from * length + k] * rows[k * length + to];
  return { direct: rows[from * length + to], total, via };
}

/** @param {(from: number, to: number) => void} choose */
export function pathView(choose) {
  const [from, to] = [byId("from"), byId("to")];
  const told = () => choose(Number(from.value), Number(to.value));
  for (const list of [from, to]) list.addEventListener("change", told);
  /** @type {string[]} */
  let known = [];
  return {
    /** @param {string[]} tokens */
    setTokens(tokens) {
      known = tokens;
      const named = tokens.map((token, index) => `${index}: ${token}`);
      for (const id of ["from", "to"]) fillList(id, [...named.entries()], 0);
    },
    /**
     * @param {Float64Array} before
     * @param {Float64Array} after
     * @param {number} row
     * @param {number} key
     */
    show(before, after, row, key) {
      [from.value, to.value] = [String(row), String(key)];
      const [old, now] = [twoHops(before, known.length, row, key), twoHops(after, known.length, row, key)];
      const best = Array.from(now.via.keys())
        .sort((a, b) => Math.max(now.via[b], old.via[b]) - Math.max(now.via[a], old.via[a]))
        .slice(0, LISTED);
      byId("path-table").replaceChildren(
        table(
          `Paths from ${known[row]} to ${known[key]}`,
          ["path", "softmax", "refined"],
          [
            ["direct", shown(old.direct, 4), shown(now.direct, 4)],
            [
              make("b", {}, "two hops, all"),
              make("b", {}, shown(old.total, 4)),
              make("b", {}, shown(now.total, 4)),
            ],
            ...best.map((via) => [
              make("span", {}, `via ${via}: `, make("bdi", {}, known[via])),
              bar(old.via[via], old.total),
              bar(now.via[via], now.total),
            ]),
          ],
        ),
      );
    },
  };
}

/**
 * A number over a bar of its share.
 * @param {number} value
 * @param {number} total
 */
function bar(value, total) {
  const element = make("span", { class: "bar" }, shown(value, 4));
  element.style.setProperty("--share", `${(100 * value) / (total || 1)}%`);
  return element;
}
