/** Table of one head's statistics: softmax, refined, change. */
import { Background } from "./background.js";
import { make, table } from "./dom.js";
import { shown, signed } from "./numbers.js";
import { finished, measuring, verdictOf } from "./statistics.js";
import { term } from "./terms.js";

const AT_ONCE_UP_TO = 96;
const STATISTIC_NAMES = /** @type {[import("./types.js").Statistic, string][]} */ ([
  ["gtd", "GTD"],
  ["indirect_entropy", "indirect entropy"],
  ["attention_entropy", "attention entropy"],
  ["sink_mass", "sink mass"],
]);

/** @param {import("./types.js").PageData} data */
export function headNumbers(data) {
  const element = /** @type {HTMLElement} */ (document.querySelector(".numbers"));
  const [title, body] = element.children;
  const worker = new Background();
  /** @type {import("./types.js").Numbers | null} */
  let before = null;
  /**
   * @param {import("./types.js").Numbers} old
   * @param {import("./types.js").Numbers} now
   * @param {import("./types.js").UniformMap} uniform
   */
  const show = (old, now, uniform) => {
    const rows = STATISTIC_NAMES.map(([name, words]) => [
      term(words),
      number(name, "before", old[name]),
      number(name, "after", now[name]),
      signed(now[name] - old[name]),
    ]);
    const verdicts = [old, now].map((numbers) => {
      const word = verdictOf(numbers, uniform, data.limits);
      return make("span", { class: `tag ${word}`, tabindex: 0, "data-tip": data.terms[word] }, word);
    });
    const columns = ["", "softmax", "refined", "change"];
    body.replaceChildren(table("Statistics of this head", columns, [...rows, ["verdict", ...verdicts, ""]]));
    element.removeAttribute("aria-busy");
  };
  return {
    /**
     * @param {string} name
     * @param {Float64Array} plain
     * @param {Float64Array} refined
     * @param {number} length
     * @param {import("./types.js").UniformMap} uniform
     * @param {boolean} isNewHead
     */
    update(name, plain, refined, length, uniform, isNewHead) {
      title.textContent = name;
      if (isNewHead) before = null;
      const { beta } = data.limits;
      const work = function* () {
        before ??= yield* measuring(plain, length, beta);
        show(before, yield* measuring(refined, length, beta), uniform);
      };
      worker.stop();
      if (length <= AT_ONCE_UP_TO) {
        finished(work());
        return;
      }
      element.setAttribute("aria-busy", "true");
      worker.run(work());
    },
  };
}

/**
 * @param {string} name
 * @param {string} when
 * @param {number} value
 */
function number(name, when, value) {
  return make("span", { "data-statistic": name, "data-when": when, "data-value": value }, shown(value));
}
