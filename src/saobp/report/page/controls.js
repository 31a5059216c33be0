/** What the reader can set in the explorer, and how a head is refined by it. */
import { labelled, make, picker } from "./dom.js";
import { PLAIN } from "./refinement.js";

const FACTORS = /** @type {[string, string][]} */ ([
  ["potts", "high / low, by sign of λ"],
  ["listing", "high- / low-listing, by sign of λ"],
  ["elemmul", "elemmul"],
  ["elemmul-prior", "elemmul-prior"],
  ["none", "none (softmax)"],
]);
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
const SLIDER_REACH = 4;
const STRONGEST = 16;
const FIRST_STRENGTH = 1;

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
  const words = [];
  if (WITH_STRENGTH.includes(factor)) {
    const name = strength < 0 ? "low" : "high";
    words.push(
      factor === "listing" ? `${name}-listing` : name,
      `λ = ${Number(Math.abs(strength).toFixed(3))}`,
    );
  } else {
    words.push(factor === "none" ? "not at all" : factor);
  }
  if (steps > 1 && factor !== "none") words.push(`${steps} steps`);
  if (steps > 1 && damping > 0 && factor !== "none") words.push(`damping ${damping}`);
  return words.join(", ");
}

/**
 * @typedef {object} Controls
 * @property {HTMLElement[]} elements
 * @property {() => import("./types.js").Setting} setting
 * @property {(setting: import("./types.js").Setting) => void} set
 */

/**
 * @param {(setting: import("./types.js").Setting) => void} change
 * @returns {Controls}
 */
export function refinementControls(change) {
  /** @type {import("./types.js").Setting} */
  const setting = { factor: "potts", strength: FIRST_STRENGTH, steps: 1, damping: 0 };
  const told = () => {
    arrange();
    change({ ...setting });
  };
  const factor = picker(FACTORS, setting.factor, (value) => {
    setting.factor = value;
    told();
  });
  const strength = make("input", {
    type: "range",
    id: "strength",
    min: -SLIDER_REACH,
    max: SLIDER_REACH,
    step: 0.05,
    value: FIRST_STRENGTH,
    "aria-label": "λ (strength)",
    oninput: () => {
      setting.strength = Number(strength.value);
      exact.value = strength.value;
      told();
    },
  });
  const exact = make("input", {
    type: "number",
    id: "strength-exact",
    min: -STRONGEST,
    max: STRONGEST,
    step: 0.05,
    value: FIRST_STRENGTH,
    "aria-label": "λ as a number",
    onchange: () => {
      setting.strength = Math.max(-STRONGEST, Math.min(STRONGEST, Number(exact.value) || 0));
      exact.value = strength.value = String(setting.strength);
      told();
    },
  });
  const steps = slider("steps", 1, 8, 1, (value) => {
    setting.steps = value;
    told();
  });
  const damping = slider("damping", 0, 0.95, 0.05, (value) => {
    setting.damping = value;
    told();
  });
  const sign = make("span", { class: "sign", role: "status" });
  const arrange = () => {
    const hasStrength = WITH_STRENGTH.includes(setting.factor);
    strength.disabled = exact.disabled = !hasStrength;
    steps.input.disabled = setting.factor === "none";
    damping.input.disabled = setting.factor === "none" || setting.steps === 1;
    sign.textContent = !hasStrength
      ? "has no λ"
      : setting.strength > 0
        ? "high: rows repel"
        : setting.strength < 0
          ? "low: rows attract"
          : "softmax";
  };
  arrange();
  return {
    elements: [
      labelled("Factor", factor),
      make(
        "div",
        { class: "control wide" },
        make("span", { class: "control-name" }, "λ"),
        strength,
        exact,
        sign,
      ),
      steps.element,
      damping.element,
    ],
    setting: () => ({ ...setting }),
    set(wanted) {
      Object.assign(setting, wanted);
      factor.value = setting.factor;
      strength.value = exact.value = String(setting.strength);
      steps.set(setting.steps);
      damping.set(setting.damping);
      told();
    },
  };
}

/**
 * @param {string} name
 * @param {number} low
 * @param {number} high
 * @param {number} step
 * @param {(value: number) => void} change
 */
function slider(name, low, high, step, change) {
  const said = make("output", {}, String(low));
  const input = make("input", {
    type: "range",
    id: name,
    min: low,
    max: high,
    step,
    value: low,
    oninput: () => {
      said.textContent = input.value;
      change(Number(input.value));
    },
  });
  const set = (/** @type {number} */ value) => {
    input.value = String(value);
    said.textContent = String(value);
  };
  return { element: labelled(name[0].toUpperCase() + name.slice(1), input, said), input, set };
}
