/** The idea in three steps, drawn for a sentence of four words with the page's own arithmetic. */
import { byId, draw } from "./dom.js";
import { priorOf, refine } from "./refinement.js";

const TOKENS = ["the", "cat", "sat", "down"];
/** What each row looks at by softmax: three of four at "cat". */
const FIRST_CHOICES = [
  [0.1, 0.75, 0.1, 0.05],
  [0.25, 0.3, 0.25, 0.2],
  [0.05, 0.6, 0.2, 0.15],
  [0.05, 0.7, 0.15, 0.1],
];
const LAMBDA = 1;
/** The row whose numbers are shown. */
const SHOWN = 2;
const [ROWS_AT, KEYS_AT] = [34, 162];

/** Draw the picture and listen to its buttons. */
export function startIdea() {
  const picture = byId("idea-picture");
  if (!picture) return;
  const buttons = [.../** @type {any} */ (document.querySelectorAll(".idea ol button"))];
  const next = byId("idea-next");
  let step = 0;
  const show = (/** @type {number} */ wanted) => {
    step = wanted;
    buttons.forEach((button, index) => {
      button.setAttribute("aria-pressed", String(index === step));
      button.closest("li").classList.toggle("now", index === step);
    });
    next.textContent = step === 2 ? "From the start" : "Next step";
    picture.replaceChildren(...drawing(step));
  };
  buttons.forEach((button, index) => button.addEventListener("click", () => show(index)));
  next.addEventListener("click", () => show((step + 1) % 3));
  show(0);
}

/** Product of the messages 1 - gamma A that the shown row receives about each key. */
export function receivedMessages() {
  const gamma = -Math.expm1(-LAMBDA);
  return TOKENS.map((_, key) =>
    FIRST_CHOICES.reduce((all, row, place) => (place === SHOWN ? all : all * (1 - gamma * row[key])), 1),
  );
}

/** @returns {number[]}  the shown row, refined */
export function chosenAgain() {
  const logs = Float64Array.from(FIRST_CHOICES.flat().map(Math.log));
  const rows = refine(priorOf(logs, 4, false), { factor: "potts", strength: LAMBDA, steps: 1, damping: 0 });
  return Array.from(rows.subarray(4 * SHOWN, 4 * SHOWN + 4));
}

/** @param {number} step */
function drawing(step) {
  const before = FIRST_CHOICES[SHOWN];
  const received = receivedMessages();
  const after = chosenAgain();
  const x = (/** @type {number} */ place) => 118 + 88 * place;
  const parts = [
    textAt(52, ROWS_AT + 5, "rows", "quiet-word"),
    textAt(52, KEYS_AT + 5, "keys", "quiet-word"),
    textAt(52, KEYS_AT + 38, "first choice", "quiet-word"),
    ...(step >= 1 ? [textAt(52, KEYS_AT + 62, "messages", "quiet-word")] : []),
    ...(step >= 2 ? [textAt(52, KEYS_AT + 86, "new choice", "quiet-word")] : []),
  ];
  FIRST_CHOICES.forEach((row, from) =>
    row.forEach((weight, key) => {
      const isShown = from === SHOWN;
      const isSending = step === 1 && !isShown;
      const now = isShown && step === 2 ? after[key] : weight;
      const kind = isShown ? (step === 2 ? "line again" : "line own") : isSending ? "line sending" : "line";
      parts.push(
        draw("line", {
          class: kind,
          x1: x(from),
          y1: ROWS_AT + 14,
          x2: x(key),
          y2: KEYS_AT - 14,
          "stroke-width": (0.5 + 11 * now).toFixed(2),
        }),
      );
    }),
  );
  TOKENS.forEach((word, place) => {
    parts.push(textAt(x(place), ROWS_AT + 5, word, place === SHOWN ? "word own-word" : "word"));
    parts.push(textAt(x(place), KEYS_AT + 5, word, "word"));
    parts.push(textAt(x(place), KEYS_AT + 38, before[place].toFixed(2), "number"));
    if (step >= 1)
      parts.push(textAt(x(place), KEYS_AT + 62, `× ${received[place].toFixed(2)}`, "number received"));
    if (step >= 2) parts.push(textAt(x(place), KEYS_AT + 86, after[place].toFixed(2), "number again"));
  });
  return parts;
}

/**
 * @param {number} x
 * @param {number} y
 * @param {string} words
 * @param {string} kind
 */
function textAt(x, y, words, kind) {
  const element = draw("text", { x, y, class: kind, "text-anchor": "middle" });
  element.textContent = words;
  return element;
}
