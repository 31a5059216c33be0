/** The view in the page's address, as in #layer=2&head=1&lambda=0.2, so that it can be sent. */

/**
 * @typedef {object} View  what the address holds; what is missing or unreadable is undefined
 * @property {string} [model]  the name of its run
 * @property {number} [sentence]
 * @property {number} [layer]
 * @property {number} [head]
 * @property {number | "all"} [token]
 * @property {string} [factor]
 * @property {number} [lambda]
 * @property {number} [steps]
 * @property {number} [damping]
 * @property {string} [map]  of the second map
 */

const WHOLE_NUMBERS = ["sentence", "layer", "head", "token", "steps"];
const NUMERIC = [...WHOLE_NUMBERS, "lambda", "damping"];
const TEXTUAL = ["model", "factor", "map"];

/**
 * @param {string} hash
 * @returns {View | null}  null for an address without settings, such as #heads
 */
export function readView(hash) {
  if (!hash.includes("=")) return null;
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  /** @type {Record<string, string | number>} */
  const view = {};
  for (const name of TEXTUAL) {
    const word = given.get(name);
    if (word !== null) view[name] = word;
  }
  for (const name of NUMERIC) {
    const text = given.get(name);
    const value = text === null || text.trim() === "" ? NaN : Number(text);
    if (Number.isFinite(value) && (!WHOLE_NUMBERS.includes(name) || (Number.isInteger(value) && value >= 0)))
      view[name] = value;
  }
  if (given.get("token") === "all") view.token = "all";
  return view;
}

/**
 * The address of a view; settings at their usual values are left out.
 * @param {View} view
 * @returns {string}
 */
export function viewAddress(view) {
  const usual = /** @type {Record<string, unknown>} */ ({
    sentence: 0,
    factor: "potts",
    steps: 1,
    damping: 0,
    map: "refined",
  });
  const entries = Object.entries(view).filter(
    ([name, value]) => value !== undefined && value !== usual[name],
  );
  return `#${new URLSearchParams(entries.map(([name, value]) => [name, String(value)]))}`;
}
