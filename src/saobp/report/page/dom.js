/** DOM elements from plain values. Text becomes text nodes only, so data is never parsed as markup. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @typedef {Node | string | number | null | undefined} Child
 * @typedef {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} Attributes
 */

/**
 * An element of the page's template.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * An HTML element. A function under a name like `onclick` is a listener; true sets an empty attribute.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function make(tag, attributes = {}, ...children) {
  return completed(document.createElement(tag), attributes, children);
}

/**
 * An SVG element, as `make`.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @returns {any}
 */
export function draw(tag, attributes = {}) {
  return completed(document.createElementNS(SVG, tag), attributes, []);
}

/**
 * @param {Element} element
 * @param {Attributes} attributes
 * @param {(Child | Child[])[]} children
 */
function completed(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  const there = children.flat().filter((child) => child !== null && child !== undefined);
  element.append(...there.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/**
 * Fill a drop-down list.
 * @param {string} id
 * @param {[number, string][]} choices  value and text
 * @param {number} value
 */
export function fillList(id, choices, value) {
  const list = byId(id);
  list.replaceChildren(...choices.map(([own, text]) => make("option", { value: own }, text)));
  list.value = String(value);
}

/**
 * A table whose first column names the rows.
 * @param {string} caption
 * @param {string[]} columns
 * @param {(Child | Child[])[][]} rows
 * @returns {HTMLElement}
 */
export function table(caption, columns, rows) {
  const head = columns.map((name) => (name ? make("th", { scope: "col" }, name) : make("td")));
  const cell = (/** @type {Child | Child[]} */ content, /** @type {number} */ index) =>
    index ? make("td", {}, content) : make("th", { scope: "row" }, content);
  return make(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    make(
      "table",
      {},
      make("caption", { class: "quiet" }, caption),
      make("thead", {}, make("tr", {}, head)),
      make(
        "tbody",
        {},
        rows.map((row) => make("tr", {}, row.map(cell))),
      ),
    ),
  );
}

/**
 * Call back with the value of a control, if it exists, on every change.
 * @param {string} id
 * @param {(value: string) => void} change
 */
export function onInput(id, change) {
  const control = byId(id);
  control?.addEventListener("input", () => change(control.value));
}
