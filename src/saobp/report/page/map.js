/** An attention map on a canvas: queries down, keys across, read with pointer or arrow keys. */
import { mapColours } from "./colours.js";
import { shown } from "./numbers.js";
import { isDark } from "./theme.js";

const LABEL_ROOM = 76;
const LABEL_LETTERS = 10;
const LEAST_CELL = 8;
const LARGEST = 460;
const MOVES = /** @type {Record<string, [number, number]>} */ ({
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  Enter: [0, 0],
});

/**
 * @typedef {{ rows: Float64Array, key: string, sheet: HTMLCanvasElement }} Drawn
 *
 * @typedef {object} MapView
 * @property {(name: string, rows: Float64Array, tokens: string[], most: number, isSigned: boolean) => void} show
 * @property {(row: number, key: number) => void} point
 */

/**
 * @param {Element} panel
 * @param {(row: number, key: number, isClick: boolean) => void} look  told where the reader points
 * @returns {MapView}
 */
export function mapView(panel, look) {
  const [title, canvas, legend] = /** @type {any[]} */ (
    ["h3", "canvas", "p"].map((tag) => panel.querySelector(tag))
  );
  const view = {
    canvas,
    rows: new Float64Array(0),
    tokens: /** @type {string[]} */ ([]),
    most: 1,
    isSigned: false,
    at: /** @type {[number, number] | null} */ (null),
    left: 0,
    room: 0,
    drawn: /** @type {Drawn | null} */ (null),
    cell: 1,
  };
  const cellAt = (/** @type {PointerEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - view.left, event.clientY - box.top - view.left];
    const [key, row] = [Math.floor(x / view.cell), Math.floor(y / view.cell)];
    return row >= 0 && key >= 0 && row < view.tokens.length && key < view.tokens.length ? [row, key] : null;
  };
  const tell = (/** @type {number[] | null} */ at, /** @type {boolean} */ isClick) => {
    if (at) look(at[0], at[1], isClick);
  };
  canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => tell(cellAt(event), false));
  canvas.addEventListener("click", (/** @type {PointerEvent} */ event) => tell(cellAt(event), true));
  canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const [row, key] = view.at ?? [0, 0];
    const last = view.tokens.length - 1;
    const next = [row + move[0], key + move[1]].map((index) => Math.max(0, Math.min(last, index)));
    tell(next, event.key === "Enter");
  });
  new ResizeObserver(([entry]) => {
    view.room = entry.contentRect.width;
    paintMap(view);
  }).observe(panel);
  return {
    show(name, rows, tokens, most, isSigned) {
      title.textContent = name;
      const colours = isSigned ? "orange is more, blue less, up to" : "full colour at";
      legend.textContent = `queries down, keys across; ${colours} ${shown(most)}`;
      canvas.setAttribute(
        "aria-label",
        `${name}: map of ${tokens.length} by ${tokens.length} tokens. Arrow keys read single weights.`,
      );
      Object.assign(view, { rows, tokens, most, isSigned });
      if (view.at && (view.at[0] >= tokens.length || view.at[1] >= tokens.length)) view.at = null;
      paintMap(view);
    },
    point(row, key) {
      view.at = [row, key];
      paintMap(view);
    },
  };
}

/** @param {any} view */
function paintMap(view) {
  const { canvas, tokens } = view;
  const count = tokens.length;
  if (!count || view.room <= 0) return;
  const size = Math.min(view.room, LARGEST);
  view.left = (size - LABEL_ROOM) / count >= LEAST_CELL ? LABEL_ROOM : 0;
  view.cell = (size - view.left) / count;
  const density = devicePixelRatio || 1;
  canvas.width = canvas.height = Math.round(size * density);
  canvas.style.width = `${size}px`;
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture(view), view.left, view.left, count * view.cell, count * view.cell);
  const ink = getComputedStyle(canvas).color;
  pen.strokeStyle = ink;
  pen.globalAlpha = 0.35;
  pen.strokeRect(view.left + 0.5, view.left + 0.5, count * view.cell - 1, count * view.cell - 1);
  pen.globalAlpha = 1;
  if (view.left) labels(pen, view, ink);
  if (view.at) {
    const [row, key] = view.at;
    pen.lineWidth = 2;
    pen.strokeRect(
      view.left + key * view.cell,
      view.left + row * view.cell,
      Math.max(3, view.cell),
      Math.max(3, view.cell),
    );
  }
}

/**
 * One pixel per entry, cached until the map changes. Shows square roots, so that small weights are visible.
 * @param {any} view
 * @returns {HTMLCanvasElement}
 */
function picture(view) {
  const { rows, tokens, most, isSigned, drawn } = view;
  const key = [most, isSigned, isDark()].join();
  if (drawn && drawn.rows === rows && drawn.key === key) return drawn.sheet;
  const colours = mapColours(isDark(), isSigned);
  const image = new ImageData(tokens.length, tokens.length);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < rows.length; i += 1) {
    const root = Math.sqrt(Math.min(1, Math.abs(rows[i]) / (most || 1)));
    pixels[i] = colours[Math.round(isSigned ? 127.5 + 127.5 * Math.sign(rows[i]) * root : 255 * root)];
  }
  const sheet = document.createElement("canvas");
  sheet.width = sheet.height = tokens.length;
  sheet.getContext("2d")?.putImageData(image, 0, 0);
  view.drawn = { rows, key, sheet };
  return sheet;
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {any} view
 * @param {string} ink
 */
function labels(pen, view, ink) {
  pen.fillStyle = ink;
  pen.font = `${Math.min(12, Math.max(8, view.cell - 1))}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  pen.direction = "ltr";
  view.tokens.forEach((/** @type {string} */ token, /** @type {number} */ index) => {
    const middle = view.left + (index + 0.5) * view.cell;
    const letters = [...token];
    const text = letters.length > LABEL_LETTERS ? `${letters.slice(0, LABEL_LETTERS - 1).join("")}…` : token;
    pen.textAlign = "right";
    pen.fillText(text, view.left - 6, middle, LABEL_ROOM - 10);
    pen.save();
    pen.translate(middle, view.left - 6);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "left";
    pen.fillText(text, 0, 0, LABEL_ROOM - 10);
    pen.restore();
  });
}
