/** Light or dark: the reader's scheme, unless the button says otherwise. Print is always light. */
import { make } from "./dom.js";

const KEY = "saobp-theme";
const CHOICES = ["auto", "light", "dark"];
/** @type {Set<() => void>} */
const listeners = new Set();

/** @returns {boolean} */
export function isDark() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  return chosen === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : chosen === "dark";
}

/**
 * What is painted on a canvas must be painted again.
 * @param {() => void} listener
 */
export function onThemeChange(listener) {
  listeners.add(listener);
}

/** @returns {HTMLElement} */
export function themeButton() {
  const button = make("button", {
    type: "button",
    class: "theme",
    onclick: () => {
      const next = CHOICES[(CHOICES.indexOf(chosen()) + 1) % CHOICES.length];
      apply(next);
      remember(next);
      name();
    },
  });
  const name = () => {
    button.textContent = `Colours: ${chosen()}`;
  };
  apply(remembered());
  name();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  let before = "auto";
  addEventListener("beforeprint", () => {
    before = chosen();
    apply("light");
  });
  addEventListener("afterprint", () => apply(before));
  return button;
}

function chosen() {
  return document.documentElement.dataset.theme ?? "auto";
}

/** @param {string} choice */
function apply(choice) {
  document.documentElement.dataset.theme = choice;
  tell();
}

function tell() {
  for (const listener of listeners) listener();
}

/** A page from disk may be refused storage; then the choice lasts as long as the page. */
function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept !== null && CHOICES.includes(kept) ? kept : "auto";
  } catch {
    return "auto";
  }
}

/** @param {string} choice */
function remember(choice) {
  try {
    localStorage.setItem(KEY, choice);
  } catch {
    return;
  }
}
