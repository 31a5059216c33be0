/** Controls of the refinement. */
import { byId, onInput } from "./dom.js";
import { PLAIN } from "./refinement.js";

const OF_LIBRARY = /** @type {Record<string, string>} */ ({
  high: "potts",
  low: "potts",
  "high-key-bias": "key-bias",
  "low-key-bias": "key-bias",
  "high-listing": "listing",
  "low-listing": "listing",
  elemmul: "elemmul",
  "elemmul-prior": "elemmul-prior",
  none: "none",
});
const RANGES = [1, 4, 16];
const WITH_STRENGTH = ["potts", "key-bias", "listing"];

/**
 * The model's own refinement of one head; null if the page does not implement it.
 * @param {import("./types.js").Explorer} explorer
 * @param {number} layer
 * @param {number} head
 * @returns {import("./types.js").Setting | null}
 */
export function ownSetting(explorer, layer, head) {
  const own = explorer.refinement;
  if (own === null) return PLAIN;
  const factor = OF_LIBRARY[own.factor];
  return factor && (own.message_stride ?? 1) === 1
    ? { factor, strength: explorer.strengths[layer]?.[head] ?? 0, steps: own.steps, damping: own.damping }
    : null;
}

/**
 * "high, λ = 0.2, 2 steps".
 * @param {import("./types.js").Setting} setting
 * @returns {string}
 */
export function settingWords({ factor, strength, steps, damping }) {
  if (factor === "none") return "not at all";
  const words = [factor];
  if (WITH_STRENGTH.includes(factor)) {
    words[0] = `${strength < 0 ? "low" : "high"}${factor === "potts" ? "" : `-${factor}`}`;
    words.push(`λ = ${Number(Math.abs(strength).toFixed(3))}`);
  }
  if (steps > 1) words.push(`${steps} steps`);
  if (steps > 1 && damping > 0) words.push(`damping ${damping}`);
  return words.join(", ");
}

/** The controls of the explorer; `setting` is their value. */
export class Controls {
  /** @param {() => void} change */
  constructor(change) {
    this.change = change;
    /** @type {import("./types.js").Setting} */
    this.setting = { factor: "potts", strength: 0.5, steps: 1, damping: 0 };
    onInput("factor", (factor) => this.set({ ...this.setting, factor }));
    for (const name of ["strength", "steps", "damping"])
      onInput(name, (value) => this.set({ ...this.setting, [name]: Number(value) }));
    const exact = byId("strength-exact");
    exact.addEventListener("change", () => {
      const strength = Math.max(exact.min, Math.min(exact.max, Number(exact.value) || 0));
      this.set({ ...this.setting, strength });
    });
    /** The slider goes from minus this to this, and grows with what is asked for. */
    this.range = RANGES[0];
    onInput("strength-range", (value) => {
      const { strength } = this.setting;
      this.range = Number(value);
      this.set({ ...this.setting, strength: Math.max(-this.range, Math.min(this.range, strength)) });
    });
    this.arrange();
  }

  /** @param {import("./types.js").Setting} wanted */
  set(wanted) {
    this.setting = wanted;
    this.arrange();
    this.change();
  }

  /** Update every control from the setting, and disable those without effect. */
  arrange() {
    const { factor, strength, steps } = this.setting;
    const hasStrength = WITH_STRENGTH.includes(factor);
    const slider = byId("strength");
    this.range = Math.max(this.range, RANGES.find((most) => Math.abs(strength) <= most) ?? 16);
    [slider.min, slider.max] = [String(-this.range), String(this.range)];
    byId("strength-range").value = String(this.range);
    const [low, high] = document.querySelectorAll(".range-ends > span");
    [low.textContent, high.textContent] = [`−${this.range} low`, `high ${this.range}`];
    for (const [name, value] of Object.entries(this.setting)) byId(name).value = String(value);
    byId("strength-exact").value = String(Number(strength.toFixed(4)));
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
