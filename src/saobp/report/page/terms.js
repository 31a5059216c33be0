/** Terms with an explanation that shows when they are pointed at or focused. */
import { byId, make } from "./dom.js";

/** @type {Record<string, string>} */
let meanings = {};

/**
 * A term of the page, with its explanation.
 * @param {string} name
 * @param {string} [words]  instead of the name itself
 * @returns {any}
 */
export function term(name, words = name) {
  const meaning = meanings[name];
  return meaning ? make("span", { class: "term", tabindex: 0, "data-tip": meaning }, words) : words;
}

/**
 * One bubble for all terms, kept inside the window; it replaces the browser's own, which keyboards cannot reach.
 * @param {Record<string, string>} terms
 */
export function startTerms(terms) {
  meanings = terms;
  const bubble = byId("tip");
  for (const element of document.querySelectorAll(".term[title]")) {
    element.setAttribute("data-tip", element.getAttribute("title") ?? "");
    element.removeAttribute("title");
  }
  const show = (/** @type {Event} */ event) => explain(/** @type {Element} */ (event.target).closest?.("[data-tip]"));
  const explain = (/** @type {Element | null | undefined} */ element) => {
    if (!element) return;
    bubble.textContent = element.getAttribute("data-tip");
    bubble.hidden = false;
    element.setAttribute("aria-describedby", "tip");
    const box = element.getBoundingClientRect();
    const [width, height] = [bubble.offsetWidth, bubble.offsetHeight];
    const left = Math.max(8, Math.min(innerWidth - width - 8, box.left + box.width / 2 - width / 2));
    const isAbove = box.bottom + height + 12 > innerHeight;
    bubble.style.left = `${left}px`;
    bubble.style.top = `${isAbove ? box.top - height - 6 : box.bottom + 6}px`;
  };
  const hide = () => {
    bubble.hidden = true;
    document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  };
  for (const name of ["pointerover", "focusin"]) document.addEventListener(name, show);
  for (const name of ["pointerout", "focusout"]) document.addEventListener(name, hide);
  /** The bubble of a focused term moves with it, unless Escape has closed it. */
  const scrolled = () => {
    const isOpen = !bubble.hidden;
    hide();
    if (isOpen) explain(document.activeElement?.closest(".term"));
  };
  addEventListener("scroll", scrolled, { passive: true });
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
}
