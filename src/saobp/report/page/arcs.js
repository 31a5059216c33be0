/** Tokens in a line with arcs between them: softmax above, refined below. */
import { draw, make } from "./dom.js";

const HEIGHT_OF_ARCS = 96;
const WIDEST = 110;
const NARROWEST = 26;
const ROOM_BESIDE_TEXT = 12;
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
  const [above, below] = /** @type {any} */ (document.querySelectorAll(".arcs"));
  const line = /** @type {any} */ (document.querySelector(".tokens"));
  const sheet = /** @type {HTMLElement} */ (document.querySelector(".arc-sheet"));
  const view = {
    middles: /** @type {number[]} */ ([]),
    chosen: /** @type {number | null} */ (null),
  };
  line.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
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
      const widths = tokenWidths(tokens);
      let width = 0;
      view.middles = widths.map((own) => (width += own) - own / 2);
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
      [...line.children].forEach((button, index) => {
        button.style.width = `${widths[index]}px`;
      });
      for (const half of [above, below]) half.setAttribute("width", String(width));
      sheet.style.setProperty("--print-zoom", String(Math.min(1, PAPER / width)));
    },
    show(before, after, chosen) {
      view.chosen = chosen;
      line.querySelector("[aria-pressed=true]")?.setAttribute("aria-pressed", "false");
      if (chosen !== null) line.children[chosen].setAttribute("aria-pressed", "true");
      above.replaceChildren(...arcs(before, view, chosen, true));
      below.replaceChildren(...arcs(after, view, chosen, false));
    },
  };
}

/**
 * The strongest arcs of a map, or of one row.
 * @param {Float64Array} rows
 * @param {{ middles: number[] }} view
 * @param {number | null} chosen
 * @param {boolean} isAbove
 */
function arcs(rows, view, chosen, isAbove) {
  const count = view.middles.length;
  const [start, stop] = chosen === null ? [0, rows.length] : [chosen * count, (chosen + 1) * count];
  const found = [];
  for (let i = start; i < stop; i += 1) if (rows[i] >= LEAST_WEIGHT) found.push(i);
  found.sort((a, b) => rows[b] - rows[a]);
  const strongest = rows[found[0]];
  return found.slice(0, MOST_ARCS).map((i) => {
    const [row, key] = [Math.floor(i / count), i % count];
    const weight = rows[i];
    return draw("path", {
      d: arcPath(row, key, view.middles, isAbove),
      "stroke-width": (0.6 + 3.4 * weight).toFixed(2),
      "stroke-opacity": (0.12 + (0.78 * weight) / strongest).toFixed(2),
    });
  });
}

/**
 * From a query to a key; attention of a token to itself is a small loop.
 * @param {number} row
 * @param {number} key
 * @param {number[]} middles
 * @param {boolean} isAbove
 */
function arcPath(row, key, middles, isAbove) {
  const [from, to] = [middles[row], middles[key]];
  const ground = isAbove ? HEIGHT_OF_ARCS : 0;
  const rise = isAbove ? -1 : 1;
  if (row === key) return `M${from - 5},${ground} c-4,${rise * 20} 14,${rise * 20} 10,0`;
  const share = Math.abs(row - key) / Math.max(1, Math.min(middles.length - 1, 16));
  const height = rise * (16 + (HEIGHT_OF_ARCS - 24) * Math.min(1, Math.sqrt(share)));
  const reach = (to - from) * 0.15;
  return `M${from},${ground} C${from + reach},${ground + height * 1.3} ${to - reach},${ground + height * 1.3} ${to},${ground}`;
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
