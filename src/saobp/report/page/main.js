/** Entry point: sets up charts, controls and the explorer; text is in the HTML. */
import { startCharts } from "./charts.js";
import { startCurves } from "./curves.js";
import { byId } from "./dom.js";
import { ExplorerView } from "./explorer.js";
import { startHeads } from "./heads.js";
import { startIdea } from "./idea.js";
import { startLive } from "./live.js";
import { startTerms } from "./terms.js";
import { startTheme } from "./theme.js";

/**
 * @param {import("./types.js").PageData} data
 * @returns {(run: string, layer: number, head: number) => void}  opens a head of a run
 */
function startExplorer(data) {
  if (!byId("explorer")) return () => {};
  /** @type {ExplorerView | null} */
  let view = null;
  const open = () => {
    byId("explored").hidden = false;
    view = new ExplorerView(data);
  };
  if (data.explorers.length) open();
  startLive((explorer) => {
    if (view) {
      view.add(explorer.sentences);
    } else {
      byId("nothing-typed").hidden = true;
      data.explorers = [explorer];
      open();
    }
  });
  return (run, layer, head) => view?.openHead(run, layer, head);
}

const page = /** @type {import("./types.js").PageData} */ (JSON.parse(byId("data").textContent));
startTheme();
startTerms(page.terms);
startIdea();
startCurves(page.curves);
startHeads(page, startExplorer(page));
document.documentElement.dataset.ready = "true";
startCharts();
