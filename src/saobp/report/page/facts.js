/** What is known about the runs: words first, tables after. */
import { runColour } from "./colours.js";
import { folded, make, table } from "./dom.js";

/**
 * @param {import("./types.js").PageData} data
 * @returns {HTMLElement | null}
 */
export function summarySection(data) {
  if (!data.runs.length && !data.tables.length) return null;
  return make(
    "section",
    { id: "summary", "aria-labelledby": "summary-title" },
    make("h2", { id: "summary-title" }, "In words"),
    data.tables.map((own) =>
      make(
        "div",
        { class: "panel told" },
        make("h3", {}, own.title),
        table(own.title, own.columns, own.rows),
        own.note ? make("p", { class: "note" }, own.note) : null,
      ),
    ),
    make(
      "div",
      { class: "cards" },
      data.runs.map((run, place) => card(data, run, place)),
    ),
    data.notes.map((note) => make("p", { class: "note" }, note)),
  );
}

/**
 * @param {import("./types.js").PageData} data
 * @param {import("./types.js").Run} run
 * @param {number} place
 */
function card(data, run, place) {
  const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.background = runColour(place).colour;
  const refinement = run.facts.find(([name]) => name === "refinement");
  const model = run.facts.find(([name]) => name === "model");
  const about = [model?.[1], refinement ? `refinement ${refinement[1]}` : null].filter(Boolean).join(", ");
  return make(
    "article",
    { class: "panel card" },
    make("h3", {}, data.runs.length > 1 ? swatch : null, make("bdi", {}, run.name)),
    about ? make("p", { class: "about" }, about) : null,
    run.words.length
      ? run.words.map((words) => make("p", {}, words))
      : make("p", { class: "empty" }, "There are no numbers of this run to put into words."),
    run.problems.length
      ? make(
          "div",
          { class: "problems", role: "note", "aria-label": `Missing in ${run.name}` },
          make("b", {}, "Not complete"),
          make(
            "ul",
            {},
            run.problems.map((problem) => make("li", {}, problem)),
          ),
        )
      : null,
  );
}

/**
 * @param {import("./types.js").PageData} data
 * @returns {HTMLElement | null}
 */
export function factsSection(data) {
  if (!data.runs.length) return null;
  const parts = [
    beside(data.runs, "Runs", (run) => run.facts),
    beside(data.runs, "Results", (run) => run.result),
    foldedTable(data.runs, "The full recipe", (run) => run.recipe),
  ].filter((part) => part !== null);
  if (!parts.length && data.sample === null) return null;
  return make(
    "section",
    { id: "facts", "aria-labelledby": "facts-title" },
    make("h2", { id: "facts-title" }, "Facts"),
    parts,
    data.sample === null
      ? null
      : make(
          "div",
          { class: "panel" },
          make("h3", {}, "First text"),
          make("blockquote", { dir: "auto" }, data.sample),
        ),
  );
}

/**
 * Runs as columns, in the order in which the names first appear.
 * @param {import("./types.js").Run[]} runs
 * @param {string} caption
 * @param {(run: import("./types.js").Run) => [string, string][]} facts
 */
function beside(runs, caption, facts) {
  const having = runs.filter((run) => facts(run).length);
  const names = [...new Set(having.flatMap((run) => facts(run).map(([name]) => name)))];
  if (!names.length) return null;
  const rows = names.map((name) => [
    readable(name),
    ...having.map((run) => facts(run).find(([own]) => own === name)?.[1] ?? "–"),
  ]);
  return make(
    "div",
    { class: "panel facts" },
    make("h3", {}, caption),
    table(caption, ["", ...having.map((run) => run.name)], rows),
  );
}

/**
 * Names of nested fields in words; names of data, which may hold anything, stay as they are.
 * @param {string} name
 */
function readable(name) {
  return name.startsWith("data: ") ? name : name.replaceAll(".", " › ").replaceAll("_", " ");
}

/**
 * @param {import("./types.js").Run[]} runs
 * @param {string} caption
 * @param {(run: import("./types.js").Run) => [string, string][]} facts
 */
function foldedTable(runs, caption, facts) {
  return runs.some((run) => facts(run).length)
    ? folded(caption, () => beside(runs, caption, facts) ?? make("div"))
    : null;
}
