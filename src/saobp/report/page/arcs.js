/** Tokens in a line with arcs between them: softmax on one side, refined on the other; upright on a phone. */
import { byId, draw, make } from "./dom.js";
import { shown } from "./numbers.js";

const DEPTH = 96;
const WIDEST = 110;
const NARROWEST = 26;
const ROOM_BESIDE_TEXT = 12;
/** Pixels of a token in an upright line. */
const LINE = 26;
/** Arcs of a chosen token, and of all together. */
const STRONGEST = 5;
const MOST_ARCS = 160;
const LEAST_WEIGHT = 0.02;
/** Pixels that a printed page has for the arcs. */
const PAPER = 640;

/**
 * @typedef {object} ArcView
 * @property {(tokens: string[]) => void} setTokens
 * @property {(before: Float64Array, after: Float64Array, chosen: number | null) => void} show
 */

/**
 * @param {(token: number | null) => void} choose  told which token's arcs to show; null for all
 * @returns {ArcView}
 */
export function arcView(choose) {
  const [first, second] = /** @type {any} */ (document.querySelectorAll(".arcs"));
  const line = /** @type {any} */ (document.querySelector(".tokens"));
  const sheet = /** @type {HTMLElement} */ (document.querySelector(".arc-sheet"));
  const room = /** @type {HTMLElement} */ (document.querySelector(".arc-scroll"));
  const view = {
    tokens: /** @type {string[]} */ ([]),
    widths: /** @type {number[]} */ ([]),
    middles: /** @type {number[]} */ ([]),
    isUpright: false,
    chosen: /** @type {number | null} */ (null),
    rows: /** @type {[Float64Array, Float64Array] | null} */ (null),
  };
  /** Lay tokens out across, or down where they do not fit. */
  const arrange = () => {
    const width = view.widths.reduce((sum, own) => sum + own, 0);
    view.isUpright = width > room.clientWidth;
    let end = 0;
    view.middles = view.widths.map((own) => {
      const size = view.isUpright ? LINE : own;
      end += size;
      return end - size / 2;
    });
    sheet.classList.toggle("upright", view.isUpright);
    [...line.children].forEach((button, index) => {
      button.style.width = view.isUpright ? "" : `${view.widths[index]}px`;
    });
    for (const half of [first, second]) {
      half.setAttribute("width", String(view.isUpright ? DEPTH : end));
      half.setAttribute("height", String(view.isUpright ? end : DEPTH));
    }
    sheet.style.setProperty("--print-zoom", String(view.isUpright ? 1 : Math.min(1, PAPER / width)));
  };
  const paint = () => {
    if (view.rows === null) return;
    const [before, after] = view.rows;
    first.replaceChildren(...arcs(before, view, true));
    second.replaceChildren(...arcs(after, view, false));
    byId("arcs-said").textContent = arcWords(view);
  };
  let width = 0;
  new ResizeObserver(() => {
    if (room.clientWidth === width || !view.tokens.length) return;
    width = room.clientWidth;
    arrange();
    paint();
  }).observe(room);
  line.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const forward = ["ArrowRight", "ArrowDown"].includes(event.key);
    const step = forward ? 1 : ["ArrowLeft", "ArrowUp"].includes(event.key) ? -1 : 0;
    const buttons = [...line.children];
    const here = buttons.indexOf(document.activeElement);
    if (!step || here < 0) return;
    event.preventDefault();
    const next = buttons[Math.max(0, Math.min(buttons.length - 1, here + step))];
    buttons[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return {
    setTokens(tokens) {
      view.tokens = tokens;
      view.widths = tokenWidths(tokens);
      view.rows = null;
      line.replaceChildren(
        ...tokens.map((token, index) =>
          make(
            "button",
            {
              type: "button",
              tabindex: index ? -1 : 0,
              title: `${index}: ${token}`,
              "aria-pressed": "false",
              onclick: () => choose(view.chosen === index ? null : index),
            },
            make("bdi", {}, token),
          ),
        ),
      );
      arrange();
    },
    show(before, after, chosen) {
      view.chosen = chosen;
      view.rows = [before, after];
      line.querySelector("[aria-pressed=true]")?.setAttribute("aria-pressed", "false");
      if (chosen !== null) line.children[chosen].setAttribute("aria-pressed", "true");
      paint();
    },
  };
}

/**
 * @param {{ tokens: string[], chosen: number | null, rows: [Float64Array, Float64Array] | null }} view
 * @returns {string}
 */
function arcWords({ tokens, chosen, rows }) {
  if (chosen === null || rows === null)
    return `The strongest arcs of all tokens, of weight ${LEAST_WEIGHT} or more. Press a token to see its own.`;
  const count = tokens.length;
  const [before, after] = rows.map((all) => all.subarray(chosen * count, (chosen + 1) * count));
  const best = before.reduce((top, weight, key) => (weight > before[top] ? key : top), 0);
  return (
    `The ${STRONGEST} strongest arcs of “${tokens[chosen]}”, which looks most at “${tokens[best]}”: ` +
    `${shown(before[best], 2)} by softmax, ${shown(after[best], 2)} refined. Press another token, or it again for all.`
  );
}

/**
 * The strongest arcs of a map, or of one row.
 * @param {Float64Array} rows
 * @param {{ middles: number[], isUpright: boolean, chosen: number | null }} view
 * @param {boolean} isFirst  above, or left of the tokens
 */
function arcs(rows, view, isFirst) {
  const count = view.middles.length;
  const { chosen } = view;
  const [start, stop] = chosen === null ? [0, rows.length] : [chosen * count, (chosen + 1) * count];
  const found = [];
  for (let i = start; i < stop; i += 1) if (rows[i] >= LEAST_WEIGHT) found.push(i);
  found.sort((a, b) => rows[b] - rows[a]);
  const strongest = rows[found[0]];
  return found.slice(0, chosen === null ? MOST_ARCS : STRONGEST).map((i) => {
    const [row, key] = [Math.floor(i / count), i % count];
    const weight = rows[i];
    return draw("path", {
      d: arcPath(row, key, view, isFirst),
      "stroke-width": ((chosen === null ? 0.6 : 1) + 6 * weight).toFixed(2),
      "stroke-opacity": (0.15 + (0.75 * weight) / strongest).toFixed(2),
    });
  });
}

/**
 * From a query to a key; attention of a token to itself is a small loop.
 * @param {number} row
 * @param {number} key
 * @param {{ middles: number[], isUpright: boolean }} view
 * @param {boolean} isFirst
 */
function arcPath(row, key, { middles, isUpright }, isFirst) {
  const [from, to] = [middles[row], middles[key]];
  const ground = isFirst ? DEPTH : 0;
  const rise = isFirst ? -1 : 1;
  const at = (/** @type {number} */ along, /** @type {number} */ away) =>
    isUpright ? `${away.toFixed(1)},${along.toFixed(1)}` : `${along.toFixed(1)},${away.toFixed(1)}`;
  if (row === key)
    return `M${at(from - 5, ground)} C${at(from - 9, ground + rise * 20)} ${at(from + 9, ground + rise * 20)} ${at(from + 5, ground)}`;
  const share = Math.abs(row - key) / Math.max(1, Math.min(middles.length - 1, 16));
  const height = rise * (16 + (DEPTH - 24) * Math.min(1, Math.sqrt(share))) * 1.3;
  const reach = (to - from) * 0.15;
  return `M${at(from, ground)} C${at(from + reach, ground + height)} ${at(to - reach, ground + height)} ${at(to, ground)}`;
}

/**
 * Each token's width follows its text, within bounds.
 * @param {string[]} tokens
 * @returns {number[]}
 */
function tokenWidths(tokens) {
  const pen = document.createElement("canvas").getContext("2d");
  if (pen) pen.font = `13px ${getComputedStyle(document.body).fontFamily}`;
  return tokens.map((token) => {
    const text = pen ? pen.measureText(token).width : 8 * token.length;
    return Math.round(Math.max(NARROWEST, Math.min(WIDEST, text + ROOM_BESIDE_TEXT)));
  });
}
