/** A sentence typed in, run through the model that `saobp explore` serves. */

/** @param {(explorer: import("./types.js").Explorer) => void} found */
export function startLive(found) {
  const form = document.querySelector("form.live");
  if (!form) return;
  const text = /** @type {HTMLTextAreaElement} */ (form.querySelector("textarea"));
  const button = /** @type {HTMLButtonElement} */ (form.querySelector("button"));
  const said = /** @type {HTMLElement} */ (form.querySelector(".note"));
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
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    if (text.value.trim()) ask();
  });
}
