/** Small maps of all heads by layer, to choose from. */
import { Background } from "./background.js";
import { mapColours } from "./colours.js";
import { byId, make } from "./dom.js";
import { shown } from "./numbers.js";
import { sampleHead } from "./scores.js";
import { isDark } from "./theme.js";

const MOST_PIXELS = 48;
const ARROWS = /** @type {Record<string, [number, number]>} */ ({
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
});

/** One button with a canvas for each head; heads that are not embedded have none. */
export class Thumbnails {
  /** @param {(layer: number, head: number) => void} choose */
  constructor(choose) {
    this.choose = choose;
    this.element = byId("thumbnails");
    this.worker = new Background();
    /** @type {import("./types.js").Sentence | null} */
    this.sentence = null;
    /** @type {any[][]} */
    this.buttons = [];
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.move(event));
  }

  /**
   * @param {import("./types.js").Sentence} sentence
   * @param {[number, number]} chosen  layer and head
   */
  update(sentence, chosen) {
    if (this.sentence !== sentence) {
      this.sentence = sentence;
      this.fill(sentence);
      this.paint();
    }
    for (const [layer, row] of this.buttons.entries())
      for (const [head, button] of row.entries()) {
        const isChosen = layer === chosen[0] && head === chosen[1];
        button?.setAttribute("aria-pressed", String(isChosen));
        if (button) button.tabIndex = isChosen ? 0 : -1;
        if (isChosen && button) this.reveal(button);
      }
  }

  /**
   * Scroll the list, not the page, so that a button is in it.
   * @param {any} button
   */
  reveal(button) {
    const top = button.offsetTop - this.element.offsetTop;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop || top + button.offsetHeight > scrollTop + clientHeight)
      this.element.scrollTop = top - clientHeight / 2;
  }

  /** @param {import("./types.js").Sentence} sentence */
  fill(sentence) {
    const size = Math.min(MOST_PIXELS, sentence.tokens.length);
    this.buttons = sentence.scores.map((row, layer) =>
      row.map((stored, head) =>
        stored === null
          ? null
          : make(
              "button",
              {
                type: "button",
                "aria-label": `layer ${layer}, head ${head}`,
                "data-tip": `layer ${layer}, head ${head}`,
                onclick: () => this.choose(layer, head),
              },
              make("canvas", { "aria-hidden": "true", width: size, height: size }),
            ),
      ),
    );
    const columns = Math.max(...sentence.scores.map((row) => row.length));
    this.element.style.setProperty("--columns", String(columns));
    this.element.replaceChildren(
      ...this.buttons.flatMap((row, layer) => [
        make("span", { class: "layer-name", "aria-hidden": "true" }, layer),
        ...Array.from({ length: columns }, (_, head) => row[head] ?? make("span")),
      ]),
    );
  }

  /** Paint all maps, in slices. */
  paint() {
    if (this.sentence) this.worker.run(this.painting(this.sentence));
  }

  /** @param {import("./types.js").Sentence} sentence */
  *painting({ scores, tokens: { length } }) {
    const colours = mapColours(isDark(), false);
    const size = Math.min(MOST_PIXELS, length);
    for (const [layer, row] of scores.entries()) {
      for (const [head, stored] of row.entries()) {
        if (stored === null) continue;
        const image = new ImageData(size, size);
        const pixels = new Uint32Array(image.data.buffer);
        const logs = sampleHead(stored, length, size);
        for (let i = 0; i < logs.length; i += 1) pixels[i] = colours[Math.round(255 * Math.exp(logs[i] / 2))];
        this.buttons[layer][head].firstChild.getContext("2d").putImageData(image, 0, 0);
        yield;
      }
    }
  }

  /**
   * Show how far each head is moved, relative to the one that is moved most.
   * @param {(number | null)[][]} changes
   */
  mark(changes) {
    const most = Math.max(1e-9, ...changes.flat().map((value) => value ?? 0));
    for (const [layer, row] of this.buttons.entries())
      for (const [head, button] of row.entries()) {
        const change = changes[layer]?.[head] ?? null;
        button?.style.setProperty("--change", `${(100 * (change ?? 0)) / most}%`);
        button?.setAttribute(
          "data-tip",
          `layer ${layer}, head ${head}${change === null ? "" : `: ${shown(100 * change, 1)} % of its weight moves`}`,
        );
      }
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    for (const [layer, row] of this.buttons.entries()) {
      const head = row.indexOf(document.activeElement);
      if (head < 0) continue;
      const next = this.buttons[layer + step[0]]?.[head + step[1]];
      next?.focus();
      return;
    }
  }
}
