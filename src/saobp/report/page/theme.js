/** Light or dark: the browser's scheme, unless the button overrides it. Print is always light. */

const CHOICES = ["auto", "light", "dark"];
/** @type {Set<() => void>} */
const listeners = new Set();
let chosen = "auto";
let printing = false;

/** @returns {boolean} */
export function isDark() {
  if (printing || chosen === "light") return false;
  return chosen === "dark" || matchMedia("(prefers-color-scheme: dark)").matches;
}

/** @returns {boolean} */
export function isPrinting() {
  return printing;
}

/**
 * Canvas and plotly must be redrawn.
 * @param {() => void} listener
 */
export function onThemeChange(listener) {
  listeners.add(listener);
}

export function startTheme() {
  const button = /** @type {HTMLButtonElement} */ (document.querySelector(".theme"));
  const apply = () => {
    document.documentElement.dataset.theme = printing ? "light" : chosen;
    button.textContent = `Colours: ${chosen}`;
    for (const listener of listeners) listener();
  };
  const print = (/** @type {boolean} */ isOn) => {
    printing = isOn;
    apply();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  apply();
}
