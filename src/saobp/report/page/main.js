/** The page, put together from the data inside it. */
import { curvesSection } from "./curves.js";
import { make } from "./dom.js";
import { ExplorerView } from "./explorer.js";
import { factsSection, summarySection } from "./facts.js";
import { headsSection } from "./heads.js";
import { liveForm } from "./live.js";
import { themeButton } from "./theme.js";

const PARTS = /** @type {[string, string][]} */ ([
  ["summary", "In words"],
  ["curves", "Curves"],
  ["heads", "Heads"],
  ["explorer", "Explorer"],
  ["facts", "Facts"],
]);

/** @returns {import("./types.js").PageData} */
function readData() {
  return JSON.parse(document.getElementById("data")?.textContent ?? "{}");
}

/**
 * @param {import("./types.js").PageData} data
 * @returns {HTMLElement | null}
 */
function explorerSection(data) {
  if (!data.explorers.length && !data.live) return null;
  const place = make(
    "div",
    {},
    data.explorers.length
      ? null
      : make("p", { class: "empty" }, "Type a sentence above to see its attention."),
  );
  /** @type {ExplorerView | null} */
  let view = null;
  const open = () => {
    view = new ExplorerView(data);
    place.replaceChildren(view.element());
  };
  const found = (/** @type {import("./types.js").Explorer} */ explorer) => {
    if (view === null) {
      data.explorers = [explorer];
      open();
      return;
    }
    view.explorer.sentences.unshift(...explorer.sentences);
    view.sentence = 0;
    view.chooseSentence();
  };
  if (data.explorers.length) open();
  return make(
    "section",
    { id: "explorer", "aria-labelledby": "explorer-title" },
    make("h2", { id: "explorer-title" }, "Explorer"),
    make(
      "p",
      { class: "lead" },
      "Attention of one head, and the same refined here in the browser: move λ and see. " +
        "A negative λ is low: rows that chose the same key attract each other.",
    ),
    data.live ? liveForm(data.live, found) : null,
    place,
  );
}

function build() {
  const data = readData();
  const sections = [
    summarySection(data),
    curvesSection(data),
    headsSection(data),
    explorerSection(data),
    factsSection(data),
  ].filter((section) => section !== null);
  const links = PARTS.filter(([id]) => sections.some((section) => section.id === id)).map(([id, text]) =>
    make("a", { href: `#${id}` }, text),
  );
  const page = document.getElementById("page");
  page?.replaceChildren(
    make(
      "header",
      {},
      make("div", { class: "title" }, make("h1", {}, data.title), themeButton()),
      make(
        "p",
        { class: "lead" },
        `Made ${data.made} with saobp ${data.version}.`,
        data.live ? ` Model: ${data.live.subject}.` : "",
      ),
      links.length > 1 ? make("nav", { "aria-label": "Parts of the page" }, links) : null,
    ),
    ...sections,
    sections.length ? "" : make("p", { class: "empty" }, "There is nothing to show."),
  );
  document.documentElement.dataset.ready = "true";
}

build();
