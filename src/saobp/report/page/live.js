/** A sentence typed in, run through the model that `saobp explore` serves. */
import { make } from "./dom.js";

/**
 * @param {{ characters: number, tokens: number, subject: string }} live
 * @param {(explorer: import("./types.js").Explorer) => void} found
 * @returns {HTMLElement}
 */
export function liveForm(live, found) {
  const text = make("textarea", {
    rows: 2,
    maxlength: live.characters,
    required: true,
    placeholder: "Type a sentence",
    "aria-label": "Sentence",
  });
  const button = make("button", { type: "submit" }, "Look at its attention");
  const said = make(
    "p",
    { class: "note", role: "status" },
    `Up to ${live.tokens} tokens; longer sentences are cut.`,
  );
  const ask = async () => {
    button.disabled = true;
    said.textContent = "running the model …";
    try {
      const response = await fetch("attention", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ text: text.value }),
      });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.problem);
      found(answer);
      said.textContent = answer.left_out.join(" ");
    } catch (problem) {
      said.textContent = `That did not work: ${problem instanceof Error ? problem.message : problem}`;
    }
    button.disabled = false;
  };
  text.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    if (text.value.trim()) ask();
  });
  return make(
    "form",
    {
      class: "live",
      onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        ask();
      },
    },
    text,
    button,
    said,
  );
}
