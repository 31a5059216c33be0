/** All heads of the model on the chosen sentence under the chosen refinement, measured as time allows. */
import { Background } from "./background.js";
import { make } from "./dom.js";
import { heatMap, scaleBar } from "./heatmap.js";
import { shown, signed } from "./numbers.js";
import { PLAIN, priorOf, refine } from "./refinement.js";
import { decodeHead } from "./scores.js";
import { largestEntropy, measuring, verdictOf } from "./statistics.js";

const LIVE_UP_TO = 128;

/**
 * @typedef {object} Looked  what is looked at now
 * @property {import("./types.js").Explorer} explorer
 * @property {import("./types.js").Sentence} sentence
 * @property {import("./types.js").Setting} setting
 * @property {[number, number]} chosen  layer and head
 *
 * @typedef {{ numbers: import("./types.js").Numbers, verdict: string }} Measured
 * @typedef {(Measured | null)[][]} MeasuredGrid
 */

/**
 * @param {import("./types.js").Limits} limits
 * @param {(layer: number, head: number) => void} choose
 */
export function overview(limits, choose) {
  const body = make("div", {});
  const words = make("p", { class: "note", role: "status" });
  const start = make("button", { type: "button", onclick: () => measure() }, "Measure all heads");
  const element = make(
    "div",
    { class: "panel overview" },
    make("h3", {}, "GTD of every head on this sentence, refined by these settings"),
    body,
    words,
    start,
  );
  const worker = new Background();
  /** @type {Looked | null} */
  let now = null;
  /** @type {WeakMap<import("./types.js").Sentence, MeasuredGrid>} softmax is measured once */
  const plain = new WeakMap();
  /** @type {MeasuredGrid} */
  let refined = [];

  const measure = () => {
    if (now === null) return;
    const { explorer, sentence, setting } = now;
    start.hidden = true;
    words.textContent = "measuring …";
    worker.run(measureAll(explorer, sentence, setting, plain, limits), (result) => {
      refined = result;
      paint();
    });
  };
  const paint = () => {
    if (now === null) return;
    const { explorer, sentence, chosen } = now;
    const before = plain.get(sentence);
    const cells = sentence.scores.map((row, layer) =>
      row.map((_, head) => cellOf(layer, head, before?.[layer]?.[head], refined[layer]?.[head])),
    );
    body.replaceChildren(
      heatMap(cells, {
        caption: "GTD of every head, layers down, heads across; press one to look at it",
        statistic: "gtd",
        range: [0, 1],
        layers: explorer.layers,
        choose,
        chosen,
      }),
      scaleBar("gtd", [0, 1], limits),
    );
    if (before && refined.length)
      words.textContent =
        `Healthy heads: ${healthy(before)} by softmax, ${healthy(refined)} refined. ` +
        "Each head is refined on the scores the model had; in a model, layers above a refined one would see other inputs.";
  };
  return {
    element,
    /**
     * @param {import("./types.js").Explorer} explorer
     * @param {import("./types.js").Sentence} sentence
     * @param {import("./types.js").Setting} setting
     * @param {[number, number]} chosen
     * @param {boolean} isNew  whether numbers must be measured again, not only another head marked
     */
    update(explorer, sentence, setting, chosen, isNew) {
      const isOther = now?.sentence !== sentence;
      now = { explorer, sentence, setting, chosen };
      if (!isNew) {
        paint();
        return;
      }
      worker.stop();
      if (isOther) refined = [];
      if (sentence.tokens.length <= LIVE_UP_TO) {
        if (isOther) paint();
        measure();
        return;
      }
      refined = [];
      start.hidden = false;
      words.textContent = `With ${sentence.tokens.length} tokens this takes a while, so it waits to be asked.`;
      paint();
    },
  };
}

/**
 * @param {import("./types.js").Explorer} explorer
 * @param {import("./types.js").Sentence} sentence
 * @param {import("./types.js").Setting} setting
 * @param {WeakMap<import("./types.js").Sentence, MeasuredGrid>} plain
 * @param {import("./types.js").Limits} limits
 * @returns {Generator<void, MeasuredGrid, void>}
 */
function* measureAll(explorer, sentence, setting, plain, limits) {
  let before = plain.get(sentence);
  if (!before) {
    before = yield* measureWith(explorer, sentence, PLAIN, limits);
    plain.set(sentence, before);
  }
  return setting.factor === "none" ? before : yield* measureWith(explorer, sentence, setting, limits);
}

/**
 * @param {import("./types.js").Explorer} explorer
 * @param {import("./types.js").Sentence} sentence
 * @param {import("./types.js").Setting} setting
 * @param {import("./types.js").Limits} limits
 * @returns {Generator<void, MeasuredGrid, void>}
 */
function* measureWith(explorer, sentence, setting, limits) {
  const length = sentence.tokens.length;
  /** @type {MeasuredGrid} */
  const grid = [];
  for (const [layer, heads] of sentence.scores.entries()) {
    grid.push([]);
    for (const head of heads) {
      if (head === null) {
        grid[layer].push(null);
        continue;
      }
      const prior = priorOf(decodeHead(head, length), length, explorer.in_order[layer]);
      const numbers = yield* measuring(refine(prior, setting), length, limits.beta);
      grid[layer].push({ numbers, verdict: verdictOf(numbers, largestEntropy(prior.logs, length), limits) });
      yield;
    }
  }
  return grid;
}

/**
 * @param {number} layer
 * @param {number} head
 * @param {Measured | null | undefined} before
 * @param {Measured | null | undefined} after
 */
function cellOf(layer, head, before, after) {
  const place = `layer ${layer}, head ${head}`;
  if (!before || !after) return { value: null, verdict: "", words: place };
  const [old, now] = [before.numbers.gtd, after.numbers.gtd];
  return {
    value: now,
    verdict: after.verdict,
    words:
      `${place}: GTD ${shown(old)} (${before.verdict}) by softmax, ` +
      `${shown(now)} (${after.verdict}) refined, ${signed(now - old)}`,
  };
}

/** @param {MeasuredGrid} grid */
function healthy(grid) {
  return grid.flat().filter((one) => one?.verdict === "healthy").length;
}
