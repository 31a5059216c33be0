/** The explorer: a sentence, a layer, a head; its attention, and the same attention refined. */
import { arcView } from "./arcs.js";
import { Controls, ownSetting, settingWords } from "./controls.js";
import { byId, fillList, make, onInput, table } from "./dom.js";
import { mapView } from "./map.js";
import { headNumbers } from "./measured.js";
import { shown } from "./numbers.js";
import { Overview } from "./overview.js";
import { pathView } from "./paths.js";
import { priorOf, refine } from "./refinement.js";
import { decodeHead } from "./scores.js";
import { uniformMap } from "./statistics.js";
import { onThemeChange } from "./theme.js";

const ROW_ENTRIES = 40;

/** Holds the selection and updates every view, at most once a frame. */
export class ExplorerView {
  /** @param {import("./types.js").PageData} data */
  constructor(data) {
    this.data = data;
    this.model = this.sentence = this.layer = this.head = 0;
    /** @type {number | null} */
    this.token = null;
    this.from = this.to = 0;
    this.second = "refined";
    this.length = 0;
    this.isDue = false;
    this.isNewHead = this.isNewSetting = true;
    this.prior = priorOf(new Float64Array(0), 0, false);
    this.refined = this.prior.rows;
    /** @type {Float64Array | null} made when it is looked at */
    this.difference = null;
    this.readout = /** @type {HTMLElement} */ (document.querySelector(".explorer .readout"));
    this.controls = new Controls(() => {
      this.isNewSetting = true;
      this.schedule();
    });
    this.maps = [...document.querySelectorAll(".map-panel")].map((panel) =>
      mapView(panel, (row, key, isClick) => this.look(row, key, isClick)),
    );
    this.arcs = arcView((token) => {
      this.token = token;
      this.schedule();
    });
    this.paths = pathView((from, to) => {
      [this.from, this.to] = [from, to];
      this.schedule();
    });
    this.numbers = headNumbers(data);
    this.overview = new Overview(data, (layer, head) => {
      [this.layer, this.head] = [layer, head];
      this.chooseHead();
    });
    onThemeChange(() => this.length && this.paint());
    this.listen();
    this.chooseModel();
  }

  listen() {
    const own = /** @type {any} */ (this);
    const lists = {
      model: "chooseModel",
      sentence: "chooseSentence",
      layer: "chooseHead",
      head: "chooseHead",
    };
    for (const [id, follow] of Object.entries(lists))
      onInput(id, (value) => {
        own[id] = Number(value);
        own[follow]();
      });
    onInput("second", (value) => {
      this.second = value;
      this.schedule();
    });
    byId("own").addEventListener("click", () => this.useOwn());
  }

  get explorer() {
    return this.data.explorers[this.model];
  }

  get shownSentence() {
    return this.explorer.sentences[this.sentence];
  }

  /** @param {import("./types.js").Sentence[]} sentences  just typed: shown first */
  add(sentences) {
    this.explorer.sentences.unshift(...sentences);
    this.sentence = 0;
    this.chooseSentence();
  }

  /** Show another model, initially with its own refinement. */
  chooseModel() {
    const { sentences, refinement, left_out: left } = this.explorer;
    this.sentence = Math.min(this.sentence, sentences.length - 1);
    this.chooseSentence();
    if (refinement !== null) this.useOwn();
    byId("left-out").replaceChildren(left.length ? make("p", { class: "note" }, left.join(" ")) : "");
  }

  chooseSentence() {
    const { tokens } = this.shownSentence;
    this.token = null;
    [this.from, this.to] = [tokens.length - 1, 0];
    this.arcs.setTokens(tokens);
    this.paths.setTokens(tokens);
    this.isNewSetting = true;
    this.chooseHead();
  }

  /** Falls back to the first embedded head if the selected one is not embedded. */
  chooseHead() {
    const { scores } = this.shownSentence;
    const isThere = (/** @type {unknown} */ head) => head !== null;
    if (!scores[this.layer]?.some(isThere)) this.layer = scores.findIndex((row) => row.some(isThere));
    if (!scores[this.layer][this.head]) this.head = scores[this.layer].findIndex(isThere);
    this.isNewHead = true;
    this.fillLists();
    this.schedule();
  }

  /** The drop-down lists; heads that are not embedded are not listed. */
  fillLists() {
    const { scores } = this.shownSentence;
    const { explorers } = this.data;
    const indices = (/** @type {unknown[]} */ list) =>
      list.flatMap((entry, index) =>
        entry ? [/** @type {[number, string]} */ ([index, String(index)])] : [],
      );
    byId("model").parentElement.hidden = explorers.length < 2;
    const labels = this.explorer.sentences.map(
      ({ text, tokens }) => `${short(text)} (${tokens.length} tokens)`,
    );
    fillList(
      "model",
      [...explorers.entries()].map(([index, own]) => [index, own.run]),
      this.model,
    );
    fillList("sentence", [...labels.entries()], this.sentence);
    fillList("layer", indices(scores.map((row) => row.some((head) => head !== null))), this.layer);
    fillList("head", indices(scores[this.layer]), this.head);
  }

  useOwn() {
    const own = ownSetting(this.explorer, this.layer, this.head);
    if (own) this.controls.set(own);
    else
      this.readout.textContent = `The model's factor ${this.explorer.refinement?.factor} is not one that this page can compute.`;
  }

  /**
   * @param {number} row
   * @param {number} key
   * @param {boolean} isClick
   */
  look(row, key, isClick) {
    const { tokens } = this.shownSentence;
    const index = row * this.length + key;
    for (const map of this.maps) map.point(row, key);
    this.readout.replaceChildren(
      make("bdi", {}, tokens[row]),
      " looks at ",
      make("bdi", {}, tokens[key]),
      `: softmax ${shown(this.prior.rows[index], 4)}, refined ${shown(this.refined[index], 4)}`,
    );
    if (!isClick) return;
    [this.token, this.from, this.to] = [row, row, key];
    this.schedule();
  }

  schedule() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.update();
    });
  }

  update() {
    const { explorer, shownSentence: sentence, layer, head, isNewHead, isNewSetting } = this;
    const { setting } = this.controls;
    const stored = sentence.scores[layer][head];
    if (!stored) return;
    this.length = sentence.tokens.length;
    if (isNewHead)
      this.prior = priorOf(decodeHead(stored, this.length), this.length, explorer.in_order[layer]);
    if (isNewHead || isNewSetting) {
      this.refined = refine(this.prior, setting);
      this.difference = null;
      const { rows, logs } = this.prior;
      const name = `Layer ${layer}, head ${head} (entropies in nats)`;
      this.numbers.update(
        name,
        rows,
        this.refined,
        this.length,
        uniformMap(logs, this.length, this.data.limits.beta),
        isNewHead,
      );
      this.overview.update({ explorer, sentence, setting, chosen: [layer, head] }, isNewSetting);
    }
    this.isNewHead = this.isNewSetting = false;
    this.paint();
  }

  paint() {
    const { tokens } = this.shownSentence;
    const { rows } = this.prior;
    const most = Math.max(largest(rows), largest(this.refined));
    this.maps[0].show("Softmax", rows, tokens, most, false);
    if (this.second === "difference") {
      this.difference ??= this.refined.map((value, i) => value - rows[i]);
      this.maps[1].show("Refined − softmax", this.difference, tokens, largest(this.difference), true);
    } else {
      this.maps[1].show(`Refined: ${settingWords(this.controls.setting)}`, this.refined, tokens, most, false);
    }
    this.arcs.show(rows, this.refined, this.token);
    this.paths.show(rows, this.refined, this.from, this.to);
    byId("weights").replaceChildren(this.weights(tokens));
  }

  /** @param {string[]} tokens */
  weights(tokens) {
    const row = this.token ?? this.from;
    const at = (/** @type {Float64Array} */ rows, /** @type {number} */ key) => rows[row * this.length + key];
    const keys = tokens
      .map((_, key) => key)
      .sort((a, b) => at(this.refined, b) - at(this.refined, a))
      .slice(0, ROW_ENTRIES);
    return table(
      `Where ${tokens[row]} looks`,
      ["key", "softmax", "refined"],
      keys.map((key) => [
        make("span", {}, `${key}: `, make("bdi", {}, tokens[key])),
        shown(at(this.prior.rows, key), 4),
        shown(at(this.refined, key), 4),
      ]),
    );
  }
}

/** @param {Float64Array} values */
function largest(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}

/** @param {string} text */
function short(text) {
  const letters = [...text.replace(/\s+/g, " ")];
  return letters.length <= 60 ? letters.join("") : `${letters.slice(0, 59).join("")}…`;
}
