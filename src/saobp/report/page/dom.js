/** Elements from plain values. Text only ever becomes text nodes, so no data can turn into markup. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @typedef {Node | string | number | null | undefined} Child
 * @typedef {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} Attributes
 */

/**
 * An HTML element. A function under a name like `onclick` listens; true sets an empty attribute.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/**
 * An SVG element, as `make`.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * @param {Element} element
 * @param {Attributes} attributes
 * @param {(Child | Child[])[]} children
 */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

let controlsMade = 0;

/**
 * A control with a label, which is its name for screen readers too.
 * @param {string} text
 * @param {HTMLElement} control
 * @param {...Child} rest
 * @returns {HTMLElement}
 */
export function labelled(text, control, ...rest) {
  controlsMade += 1;
  control.id ||= `control-${controlsMade}`;
  const label = make("label", { class: "control-name", for: control.id }, text);
  return make("div", { class: "control" }, label, control, ...rest);
}

/**
 * A drop-down list of names.
 * @param {[string, string][]} choices  value and text
 * @param {string} value
 * @param {(value: string) => void} choose
 * @returns {HTMLSelectElement}
 */
export function picker(choices, value, choose) {
  const element = make("select", { onchange: () => choose(element.value) });
  for (const [own, text] of choices) element.append(make("option", { value: own }, text));
  element.value = value;
  return element;
}

/**
 * A table whose first column names the rows.
 * @param {string} caption
 * @param {string[]} columns
 * @param {(Child | Child[])[][]} rows
 * @returns {HTMLElement}
 */
export function table(caption, columns, rows) {
  return make(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    make(
      "table",
      {},
      make("caption", { class: "quiet" }, caption),
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          columns.map((name) => (name ? make("th", { scope: "col" }, name) : make("td"))),
        ),
      ),
      make(
        "tbody",
        {},
        rows.map((row) =>
          make(
            "tr",
            {},
            row.map((cell, place) => (place ? make("td", {}, cell) : make("th", { scope: "row" }, cell))),
          ),
        ),
      ),
    ),
  );
}

/**
 * A folded part that is filled when it is first opened, and for print.
 * @param {string} text
 * @param {() => Node} fill
 * @returns {HTMLDetailsElement}
 */
export function folded(text, fill) {
  const body = make("div", { class: "folded" });
  const element = make(
    "details",
    { ontoggle: () => element.open && !body.firstChild && body.append(fill()) },
    make("summary", {}, text),
    body,
  );
  return element;
}
