/** The explorer: a sentence, a layer, a head; its attention, and the same attention refined. */
import { readView, viewAddress } from "./address.js";
import { arcView } from "./arcs.js";
import { mostChanged, placeOfLargest, rowChanges } from "./changes.js";
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
import { Thumbnails } from "./thumbnails.js";

const ROW_ENTRIES = 40;
const FACTORS = ["potts", "key-bias", "listing", "elemmul", "elemmul-prior", "none"];

/** Holds the selection and updates every view, at most once a frame. */
export class ExplorerView {
  /** @param {import("./types.js").PageData} data */
  constructor(data) {
    this.data = data;
    this.model = Math.max(
      0,
      data.explorers.findIndex((explorer) => explorer.refinement !== null),
    );
    this.sentence = this.layer = this.head = 0;
    /** @type {number | null | "most"}  most: the token whose row changes most, chosen when it is known */
    this.token = "most";
    this.isOwn = false;
    this.hasShown = false;
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
      this.isOwn = false;
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
    const choose = (/** @type {number} */ layer, /** @type {number} */ head) => {
      [this.layer, this.head] = [layer, head];
      this.chooseHead();
    };
    this.thumbnails = new Thumbnails(choose);
    this.overview = new Overview(data, choose, (changes) => this.thumbnails.mark(changes));
    onThemeChange(() => {
      if (this.length) this.paint();
      this.thumbnails.paint();
    });
    this.listen();
    this.chooseModel();
    this.chooseMostChanged();
    addEventListener("hashchange", () => this.follow(readView(location.hash)));
    if (this.follow(readView(location.hash))) byId("explorer").scrollIntoView();
  }

  /** Open the head that changes most, by the model's own refinement if it has one. */
  chooseMostChanged() {
    const { explorer, controls } = this;
    const settingOf = (/** @type {number} */ layer, /** @type {number} */ head) =>
      (explorer.refinement && ownSetting(explorer, layer, head)) || controls.setting;
    const best = mostChanged(explorer, this.shownSentence, settingOf);
    if (best) [this.layer, this.head] = best;
    this.chooseHead();
  }

  /**
   * Show what an address asks for, as far as the page has it.
   * @param {import("./address.js").View | null} view
   * @returns {boolean}  whether it asked for anything
   */
  follow(view) {
    if (view === null) return false;
    const model = this.data.explorers.findIndex(({ run }) => run === view.model);
    if (model >= 0 && model !== this.model) {
      this.model = model;
      this.chooseModel();
    }
    if (view.sentence !== undefined && view.sentence < this.explorer.sentences.length) {
      this.sentence = view.sentence;
      this.chooseSentence();
    }
    [this.layer, this.head] = [view.layer ?? this.layer, view.head ?? this.head];
    this.chooseHead();
    const { setting } = this.controls;
    const asked = {
      factor: FACTORS.includes(view.factor ?? "") ? String(view.factor) : "potts",
      strength: Math.max(-16, Math.min(16, view.lambda ?? setting.strength)),
      steps: Math.max(1, Math.min(8, view.steps ?? 1)),
      damping: Math.max(0, Math.min(0.95, view.damping ?? 0)),
    };
    if (view.factor !== undefined || view.lambda !== undefined) this.controls.set(asked);
    if (view.token === "all") this.token = null;
    else if (view.token !== undefined && view.token < this.shownSentence.tokens.length) this.token = view.token;
    this.second = view.map === "difference" ? "difference" : "refined";
    byId("second").value = this.second;
    this.schedule();
    return true;
  }

  /** Write what is shown into the address. */
  tellAddress() {
    const { factor, strength, steps, damping } = this.controls.setting;
    const view = {
      model: this.data.explorers.length > 1 ? this.explorer.run : undefined,
      sentence: this.sentence,
      layer: this.layer,
      head: this.head,
      lambda: Number(strength.toFixed(4)),
      token: this.token === null || this.token === "most" ? /** @type {const} */ ("all") : this.token,
      factor,
      steps,
      damping,
      map: this.second,
    };
    history.replaceState(null, "", viewAddress(view));
  }

  /**
   * @param {string} run
   * @param {number} layer
   * @param {number} head
   */
  openHead(run, layer, head) {
    const model = this.data.explorers.findIndex((explorer) => explorer.run === run);
    if (model >= 0 && model !== this.model) {
      this.model = model;
      this.chooseModel();
    }
    [this.layer, this.head] = [layer, head];
    this.chooseHead();
    byId("explorer").scrollIntoView();
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
    this.isOwn = false;
    this.sentence = Math.min(this.sentence, sentences.length - 1);
    this.chooseSentence();
    if (refinement !== null) this.useOwn();
    byId("left-out").replaceChildren(left.length ? make("p", { class: "note" }, left.join(" ")) : "");
  }

  chooseSentence() {
    const { tokens } = this.shownSentence;
    this.token = "most";
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
    if (this.isOwn) this.useOwn();
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
    if (own) {
      this.controls.set(own);
      this.isOwn = true;
    } else
      this.readout.textContent =
        `This page cannot compute the model's factor ${this.explorer.refinement?.factor}: ` +
        `the second map is ${settingWords(this.controls.setting)}, not the model's own.`;
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
      const name = `Layer ${layer}, head ${head} on this sentence`;
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
    if (this.token === "most") this.token = placeOfLargest(rowChanges(this.prior.rows, this.refined, this.length));
    this.thumbnails.update(sentence, [layer, head]);
    this.paint();
    if (this.hasShown) this.tellAddress();
    this.hasShown = true;
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
    this.arcs.show(rows, this.refined, this.token === "most" ? null : this.token);
    this.paths.show(rows, this.refined, this.from, this.to);
    byId("weights").replaceChildren(this.weights(tokens));
  }

  /** @param {string[]} tokens */
  weights(tokens) {
    const row = typeof this.token === "number" ? this.token : this.from;
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
