/** Statistics of all heads for the selected sentence and refinement, computed in the background. */
import { Background } from "./background.js";
import { headChange } from "./changes.js";
import { Chart } from "./charts.js";
import { byId } from "./dom.js";
import { heatMap } from "./heads.js";
import { shown, signed } from "./numbers.js";
import { PLAIN, priorOf, refine } from "./refinement.js";
import { decodeHead } from "./scores.js";
import { measuring, uniformMap, verdictOf } from "./statistics.js";

const LIVE_UP_TO = 128;
const ABOUT_INPUTS =
  "Each head is refined on the scores the model had; in a model, layers above a refined one would see other inputs.";

/**
 * @typedef {object} Selection  the current selection
 * @property {import("./types.js").Explorer} explorer
 * @property {import("./types.js").Sentence} sentence
 * @property {import("./types.js").Setting} setting
 * @property {[number, number]} chosen  layer and head
 *
 * @typedef {{ gtd: number, verdict: string, change: number }} Measured
 * @typedef {(Measured | null)[][]} MeasuredGrid  null where a head's scores are not in the page
 */

/** The heat map of all heads; a click selects one. */
export class Overview {
  /**
   * @param {import("./types.js").PageData} data
   * @param {(layer: number, head: number) => void} choose
   * @param {(changes: (number | null)[][]) => void} mark  told how far each head is moved
   */
  constructor(data, choose, mark) {
    this.data = data;
    this.mark = mark;
    this.chart = new Chart("overview", choose);
    this.words = this.chart.part(".note");
    this.start = byId("measure");
    this.start.addEventListener("click", () => this.measure());
    this.worker = new Background();
    /** @type {WeakMap<import("./types.js").Sentence, MeasuredGrid>} softmax is measured once */
    this.plain = new WeakMap();
    /** @type {MeasuredGrid} */
    this.refined = [];
    /** @type {Selection | null} */
    this.now = null;
  }

  /**
   * @param {Selection} now
   * @param {boolean} isNew  whether numbers must be measured again, not only another head marked
   */
  update(now, isNew) {
    const isOther = this.now?.sentence !== now.sentence;
    const isShort = now.sentence.tokens.length <= LIVE_UP_TO;
    this.now = now;
    const isStale = isNew && (isOther || (!isShort && this.refined.length > 0));
    if (isNew) this.worker.stop();
    if (isStale) this.refined = [];
    if (isStale || !isNew) this.paint();
    if (!isNew) return;
    this.start.hidden = isShort;
    if (isShort) this.measure();
    else
      this.words.textContent = `With ${now.sentence.tokens.length} tokens this takes a while, so it waits to be asked.`;
  }

  measure() {
    if (this.now === null) return;
    this.start.hidden = true;
    this.words.textContent = "measuring …";
    this.worker.run(this.measuring(this.now));
  }

  /** @param {Selection} now */
  *measuring({ explorer, sentence, setting }) {
    const plain = this.plain.get(sentence) ?? (yield* this.measured(explorer, sentence, PLAIN));
    this.plain.set(sentence, plain);
    this.refined = setting.factor === "none" ? plain : yield* this.measured(explorer, sentence, setting);
    this.mark(this.refined.map((row) => row.map((one) => one?.change ?? null)));
    this.paint();
  }

  /**
   * @param {import("./types.js").Explorer} explorer
   * @param {import("./types.js").Sentence} sentence
   * @param {import("./types.js").Setting} setting
   * @returns {Generator<void, MeasuredGrid, void>}
   */
  *measured(explorer, { scores, tokens: { length } }, setting) {
    const { limits } = this.data;
    /** @type {MeasuredGrid} */
    const grid = scores.map((row) => row.map(() => null));
    for (const [layer, heads] of scores.entries()) {
      for (const [place, head] of heads.entries()) {
        if (head === null) continue;
        const prior = priorOf(decodeHead(head, length), length, explorer.in_order[layer]);
        const rows = refine(prior, setting);
        const numbers = yield* measuring(rows, length, limits.beta);
        const verdict = verdictOf(numbers, uniformMap(prior.logs, length, limits.beta), limits);
        grid[layer][place] = { gtd: numbers.gtd, verdict, change: headChange(prior.rows, rows, length) };
        yield;
      }
    }
    return grid;
  }

  paint() {
    if (this.now === null) return;
    const { explorer, sentence, chosen } = this.now;
    const [before, after] = [this.plain.get(sentence) ?? [], this.refined];
    const every = (/** @type {(layer: number, head: number) => any} */ cell) =>
      sentence.scores.map((row, layer) => row.map((_, head) => cell(layer, head)));
    const verdicts = every((layer, head) => after[layer]?.[head]?.verdict ?? "");
    const trace = heatMap(
      this.data.gtd,
      every((layer, head) => after[layer]?.[head]?.gtd ?? null),
      verdicts,
      this.data.marks,
    );
    const customdata = every((layer, head) =>
      sentence.scores[layer][head] === null
        ? "its scores are not in this page"
        : change(before[layer]?.[head], after[layer]?.[head]),
    );
    const [layer, head] = chosen;
    const frame = { type: "rect", fillcolor: "rgba(0,0,0,0)", line: { width: 3 }, layer: "above" };
    const mark = { ...frame, x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5 };
    this.chart.show({
      title: "GTD of every head on this sentence, refined by these settings",
      label: `GTD of every head, layers down, heads across; layer ${layer}, head ${head} is chosen. The table below holds it.`,
      data: [{ ...trace, customdata }],
      layout: { ...explorer.layout, shapes: [mark] },
    });
    if (before.length && after.length)
      this.words.textContent = `Healthy heads: ${healthy(before)} by softmax, ${healthy(after)} refined. ${ABOUT_INPUTS}`;
  }
}

/**
 * @param {Measured | null | undefined} before
 * @param {Measured | null | undefined} after
 */
function change(before, after) {
  if (!before || !after) return "";
  return `${after.verdict}; by softmax ${shown(before.gtd)}, ${before.verdict}; change ${signed(after.gtd - before.gtd)}`;
}

/** @param {MeasuredGrid} grid */
function healthy(grid) {
  return grid.flat().filter((one) => one?.verdict === "healthy").length;
}
