/** The explorer: a sentence, a layer, a head; its attention, and the same attention refined. */
import { arcView } from "./arcs.js";
import { ownSetting, refinementControls, settingWords } from "./controls.js";
import { folded, labelled, make, picker, table } from "./dom.js";
import { headNumbers } from "./figures.js";
import { mapView } from "./map.js";
import { counted, shown } from "./numbers.js";
import { overview } from "./overview.js";
import { pathView } from "./paths.js";
import { priorOf, refine } from "./refinement.js";
import { decodeHead } from "./scores.js";
import { largestEntropy } from "./statistics.js";
import { onThemeChange } from "./theme.js";

const ROW_ENTRIES = 40;

/** Holds what is chosen and brings every view up to date, at most once a frame. */
export class ExplorerView {
  /** @param {import("./types.js").PageData} data */
  constructor(data) {
    this.data = data;
    this.model = 0;
    this.sentence = 0;
    this.layer = 0;
    this.head = 0;
    /** @type {number | null} */
    this.token = null;
    this.from = 0;
    this.to = 0;
    this.second = "refined";
    this.length = 0;
    this.isDue = false;
    this.isNewHead = true;
    this.isNewSetting = true;
    this.prior = priorOf(new Float64Array(0), 0, false);
    this.refined = this.prior.rows;
    /** @type {Float64Array | null} made when it is looked at */
    this.difference = null;
    this.controls = refinementControls(() => {
      this.isNewSetting = true;
      this.schedule();
    });
    const look = (/** @type {number} */ row, /** @type {number} */ key, /** @type {boolean} */ isClick) =>
      this.look(row, key, isClick);
    this.maps = [mapView(look), mapView(look)];
    this.arcs = arcView((token) => {
      this.token = token;
      this.schedule();
    });
    this.paths = pathView((from, to) => {
      [this.from, this.to] = [from, to];
      this.schedule();
    });
    this.numbers = headNumbers(data);
    this.overview = overview(data.limits, (layer, head) => {
      [this.layer, this.head] = [layer, head];
      this.chooseHead();
    });
    this.choice = make("div", { class: "controls" });
    this.notes = make("div", {});
    this.readout = make(
      "p",
      { class: "readout", role: "status" },
      "Point at a map, or use the arrow keys in it, to read single weights.",
    );
    this.rowTable = make("div", {});
    onThemeChange(() => this.length && this.paint(this.shownSentence.tokens));
  }

  /** @returns {HTMLElement} */
  element() {
    const own = make(
      "button",
      { type: "button", id: "own", onclick: () => this.useOwn() },
      "As the model has it",
    );
    const second = labelled(
      "Second map",
      picker(
        [
          ["refined", "refined"],
          ["difference", "refined − softmax"],
        ],
        "refined",
        (value) => {
          this.second = value;
          this.schedule();
        },
      ),
    );
    const body = make(
      "div",
      { class: "explorer" },
      this.choice,
      make("div", { class: "controls panel sticky" }, this.controls.elements, own, second),
      make(
        "div",
        { class: "side-by-side" },
        this.maps.map((view) => view.element),
        make("div", { class: "stack" }, this.numbers.element, this.readout),
      ),
      make(
        "figure",
        { class: "panel" },
        make("figcaption", {}, make("h3", {}, "Arcs: softmax above, refined below")),
        this.arcs.element,
        make(
          "p",
          { class: "note" },
          "An arc joins a token to one that it looks at; the wider, the more. " +
            "Press a token to see its arcs alone. Weights below 0.02 are not drawn.",
        ),
      ),
      make("div", { class: "bottom" }, this.overview.element, this.paths.element),
      folded("Weights of the chosen token as a table", () => this.rowTable),
      this.notes,
    );
    this.chooseModel();
    return body;
  }

  get explorer() {
    return this.data.explorers[this.model];
  }

  get shownSentence() {
    return this.explorer.sentences[this.sentence];
  }

  /** Show another model; the first head that the page holds is chosen. */
  chooseModel() {
    this.sentence = Math.min(this.sentence, this.explorer.sentences.length - 1);
    this.chooseSentence();
    if (this.explorer.refinement !== null) this.useOwn();
    const left = this.explorer.left_out;
    this.notes.replaceChildren(left.length ? make("p", { class: "note" }, left.join(" ")) : "");
  }

  chooseSentence() {
    const { scores, tokens } = this.shownSentence;
    if (!scores[this.layer]?.[this.head]) {
      this.layer = Math.max(
        0,
        scores.findIndex((row) => row.some((head) => head !== null)),
      );
      this.head = Math.max(
        0,
        scores[this.layer].findIndex((head) => head !== null),
      );
    }
    this.token = null;
    [this.from, this.to] = [tokens.length - 1, 0];
    this.arcs.setTokens(tokens);
    this.paths.setTokens(tokens);
    this.isNewSetting = true;
    this.chooseHead();
  }

  chooseHead() {
    this.isNewHead = true;
    this.fillChoice();
    this.schedule();
  }

  /** The lists to choose from; heads that are not in the page are not listed. */
  fillChoice() {
    const { scores } = this.shownSentence;
    const places = (/** @type {unknown[]} */ list) =>
      list.flatMap((entry, place) =>
        entry ? [/** @type {[string, string]} */ ([String(place), String(place)])] : [],
      );
    const layers = places(scores.map((row) => row.some((head) => head !== null)));
    if (!scores[this.layer][this.head])
      this.head = Math.max(
        0,
        scores[this.layer].findIndex((head) => head !== null),
      );
    const focused = document.activeElement?.closest("[data-choice]")?.getAttribute("data-choice");
    const choices = [
      this.data.explorers.length > 1
        ? this.pick(
            "Model",
            "model",
            this.data.explorers.map((own, place) => [String(place), own.run]),
            this.model,
            (value) => {
              this.model = value;
              this.chooseModel();
            },
          )
        : null,
      this.pick(
        "Sentence",
        "sentence",
        this.explorer.sentences.map((own, place) => [
          String(place),
          `${short(own.text)} (${counted(own.tokens.length, "token")})`,
        ]),
        this.sentence,
        (value) => {
          this.sentence = value;
          this.chooseSentence();
        },
      ),
      this.pick("Layer", "layer", layers, this.layer, (value) => {
        this.layer = value;
        this.chooseHead();
      }),
      this.pick("Head", "head", places(scores[this.layer]), this.head, (value) => {
        this.head = value;
        this.chooseHead();
      }),
    ];
    this.choice.replaceChildren(...choices.filter((choice) => choice !== null));
    if (focused) this.choice.querySelector(`[data-choice="${focused}"] select`)?.focus();
  }

  /**
   * @param {string} name
   * @param {string} key
   * @param {[string, string][]} choices
   * @param {number} value
   * @param {(value: number) => void} choose
   */
  pick(name, key, choices, value, choose) {
    const element = labelled(
      name,
      picker(choices, String(value), (text) => choose(Number(text))),
    );
    element.dataset.choice = key;
    if (key === "sentence") element.classList.add("grow");
    return element;
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
    const place = row * this.length + key;
    for (const map of this.maps) map.point(row, key);
    this.readout.replaceChildren(
      make("bdi", {}, tokens[row]),
      " looks at ",
      make("bdi", {}, tokens[key]),
      `: softmax ${shown(this.prior.rows[place], 4)}, refined ${shown(this.refined[place], 4)}`,
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
    const { tokens, scores } = this.shownSentence;
    const stored = scores[this.layer][this.head];
    if (!stored) return;
    this.length = tokens.length;
    if (this.isNewHead) {
      this.prior = priorOf(decodeHead(stored, this.length), this.length, this.explorer.in_order[this.layer]);
    }
    if (this.isNewHead || this.isNewSetting) {
      this.refined = refine(this.prior, this.controls.setting());
      this.difference = null;
      this.numbers.name(`Layer ${this.layer}, head ${this.head} (entropies in nats)`);
      this.numbers.update(
        this.prior.rows,
        this.refined,
        this.length,
        largestEntropy(this.prior.logs, this.length),
        this.isNewHead,
      );
      this.overview.update(
        this.explorer,
        this.shownSentence,
        this.controls.setting(),
        [this.layer, this.head],
        this.isNewSetting,
      );
    }
    this.isNewHead = this.isNewSetting = false;
    this.paint(tokens);
  }

  /** @param {string[]} tokens */
  paint(tokens) {
    const most = Math.max(largest(this.prior.rows), largest(this.refined));
    this.maps[0].show("Softmax", this.prior.rows, tokens, most, false);
    if (this.second === "difference") {
      const softmax = this.prior.rows;
      this.difference ??= this.refined.map((value, i) => value - softmax[i]);
      this.maps[1].show("Refined − softmax", this.difference, tokens, largest(this.difference), true);
    } else {
      this.maps[1].show(
        `Refined: ${settingWords(this.controls.setting())}`,
        this.refined,
        tokens,
        most,
        false,
      );
    }
    this.arcs.show(this.prior.rows, this.refined, this.token);
    this.paths.show(this.prior.rows, this.refined, this.from, this.to);
    this.rowTable.replaceChildren(this.weights(tokens));
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
  let most = 0;
  for (let i = 0; i < values.length; i += 1) if (Math.abs(values[i]) > most) most = Math.abs(values[i]);
  return most;
}

/** @param {string} text */
function short(text) {
  const letters = [...text.replace(/\s+/g, " ")];
  return letters.length <= 60 ? letters.join("") : `${letters.slice(0, 59).join("")}…`;
}
