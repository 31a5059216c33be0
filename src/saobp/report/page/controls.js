/** How the reader wants a head to be refined. */
import { byId } from "./dom.js";
import { PLAIN } from "./refinement.js";

const OF_LIBRARY = /** @type {Record<string, string>} */ ({
  high: "potts",
  low: "potts",
  "high-listing": "listing",
  "low-listing": "listing",
  elemmul: "elemmul",
  "elemmul-prior": "elemmul-prior",
  none: "none",
});
const WITH_STRENGTH = ["potts", "listing"];

/**
 * How a model's own attention is refined at one head; null if its factor is not one that the page knows.
 * @param {import("./types.js").Explorer} explorer
 * @param {number} layer
 * @param {number} head
 * @returns {import("./types.js").Setting | null}
 */
export function ownSetting(explorer, layer, head) {
  const own = explorer.refinement;
  if (own === null) return PLAIN;
  const factor = OF_LIBRARY[own.factor];
  return factor
    ? { factor, strength: explorer.strengths[layer]?.[head] ?? 0, steps: own.steps, damping: own.damping }
    : null;
}

/**
 * "high, λ = 0.2, 2 steps", as the library would call it.
 * @param {import("./types.js").Setting} setting
 * @returns {string}
 */
export function settingWords({ factor, strength, steps, damping }) {
  if (factor === "none") return "not at all";
  const words = [factor];
  if (WITH_STRENGTH.includes(factor)) {
    words[0] = `${strength < 0 ? "low" : "high"}${factor === "listing" ? "-listing" : ""}`;
    words.push(`λ = ${Number(Math.abs(strength).toFixed(3))}`);
  }
  if (steps > 1) words.push(`${steps} steps`);
  if (steps > 1 && damping > 0) words.push(`damping ${damping}`);
  return words.join(", ");
}

/** The controls of the explorer; `setting` is what they say. */
export class Controls {
  /** @param {() => void} change */
  constructor(change) {
    this.change = change;
    this.setting = { factor: "potts", strength: 1, steps: 1, damping: 0 };
    const { setting } = this;
    this.listen("factor", "change", (value) => (setting.factor = value));
    this.listen("strength", "input", (value) => (setting.strength = Number(value)));
    this.listen("strength-exact", "change", (value, control) => {
      setting.strength = Math.max(control.min, Math.min(control.max, Number(value) || 0));
    });
    this.listen("steps", "input", (value) => (setting.steps = Number(value)));
    this.listen("damping", "input", (value) => (setting.damping = Number(value)));
    this.arrange();
  }

  /**
   * @param {string} id
   * @param {string} event
   * @param {(value: string, control: any) => void} take
   */
  listen(id, event, take) {
    const control = byId(id);
    control.addEventListener(event, () => {
      take(control.value, control);
      this.arrange();
      this.change();
    });
  }

  /** @param {import("./types.js").Setting} wanted */
  set(wanted) {
    Object.assign(this.setting, wanted);
    this.arrange();
    this.change();
  }

  /** Every control shows the setting, and those that have no say are off. */
  arrange() {
    const { factor, strength, steps } = this.setting;
    const hasStrength = WITH_STRENGTH.includes(factor);
    for (const [name, value] of Object.entries(this.setting)) byId(name).value = String(value);
    byId("strength-exact").value = String(strength);
    for (const output of document.querySelectorAll("#explorer output"))
      output.textContent = byId(output.getAttribute("for") ?? "").value;
    byId("strength").disabled = byId("strength-exact").disabled = !hasStrength;
    byId("steps").disabled = factor === "none";
    byId("damping").disabled = factor === "none" || steps === 1;
    const sign = strength > 0 ? "high: rows repel" : strength < 0 ? "low: rows attract" : "softmax";
    const said = /** @type {HTMLElement} */ (document.querySelector(".sign"));
    said.textContent = hasStrength ? sign : "has no λ";
  }
}
