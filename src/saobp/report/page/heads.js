/** The section of heads: one heat map per run and layer means, for a statistic at a training step. */
import { Chart } from "./charts.js";
import { byId, make, onInput } from "./dom.js";
import { mean } from "./numbers.js";

const NUMBERS_UP_TO = 16;

/**
 * @param {import("./types.js").PageData} data
 * @param {(run: string, layer: number, head: number) => void} open  told which head is pressed
 */
export function startHeads(data, open) {
  const { heads } = data;
  if (!heads) return;
  const maps = heads.runs.map((run, index) => new Chart(`map-${index}`, (layer, head) => open(run.name, layer, head)));
  const layers = heads.layers && new Chart("layers");
  const across = heads.across && new Chart("across");
  const said = byId("head-step-said");
  let statistic = Object.keys(heads.titles)[0];
  let step = heads.steps[heads.steps.length - 1];
  const refresh = () => {
    const moments = heads.runs.map((run) => momentAt(run, step));
    heads.runs.forEach((run, index) => {
      const moment = moments[index];
      const when = moment.step === null ? "" : `, step ${moment.step.toLocaleString("en")}`;
      const grid = moment.values[statistic];
      const words = moment.verdicts.map((row) => row.map((verdict) => data.verdicts[verdict]));
      const title = `${run.name}${when}`;
      const label = `Heat map: ${heads.titles[statistic]} of ${title}, layers down, heads across. The table below holds it.`;
      maps[index].show(
        grid
          ? {
              title,
              label,
              layout: run.layout,
              data: [heatMap(heads.scales[statistic], grid, words, data.marks, moment.kinds)],
            }
          : null,
        `This run has no ${heads.titles[statistic]}.`,
      );
      maps[index].part(".counts").replaceChildren(...counts(words.flat(), data));
    });
    const means = (/** @type {import("./types.js").Moment} */ moment) =>
      (moment.values[statistic] ?? []).map((row, layer) => [layer, mean(row)]);
    layers?.show(filled(heads.layers?.[statistic], moments, means));
    across?.show(filled(heads.across, moments, (moment) => moment.across));
    across?.element.toggleAttribute("hidden", statistic !== "gtd");
    const title = heads.titles[statistic].replace(/ \(.*/, "");
    byId("head-meaning").textContent = data.terms[title] ?? data.terms[title.replace(/.* /, "")] ?? "";
    if (said) said.textContent = step.toLocaleString("en");
  };
  onInput("head-statistic", (value) => {
    statistic = value;
    refresh();
  });
  onInput("head-step", (value) => {
    step = heads.steps[Number(value)];
    byId("head-step")?.setAttribute("aria-valuetext", `step ${step}`);
    refresh();
  });
  refresh();
}

/**
 * A heat map's trace: values in cells that are large enough, and marks of collapsed heads.
 * @param {any} scale
 * @param {import("./types.js").Grid} z
 * @param {string[][]} words  the verdicts
 * @param {Record<string, string>} marks
 * @param {string[][] | null} kinds  what heads look at, where it is known
 */
export function heatMap(scale, z, words, marks, kinds = null) {
  const own = words.map((row) => row.map((word) => marks[word] ?? ""));
  const hasRoom = z.every((row) => row.length <= NUMBERS_UP_TO);
  return {
    ...scale,
    z,
    customdata: words.map((row, layer) =>
      row.map((word, head) => (kinds?.[layer][head] ? `${word}, ${kinds[layer][head]}` : word)),
    ),
    meta: { ...scale.meta, marks: own },
    text: own.map((row, layer) =>
      row.map((mark, head) => `${hasRoom ? cellText(z[layer][head], scale.meta.limits) : ""}${mark}`),
    ),
    texttemplate: "%{text}",
    ...(hasRoom ? {} : { xgap: 1, ygap: 1 }),
  };
}

/**
 * Two digits, or three where rounding would put the number on the other side of a limit; else only the side.
 * @param {number | null} value
 * @param {{ from: number[], upTo: number[] }} limits  of verdicts that begin at a number, or end with it
 * @returns {string}  for plotly, which reads tags
 */
export function cellText(value, { from, upTo }) {
  if (value === null) return "";
  const crossed = (/** @type {number} */ digits) => {
    const rounded = Number(value.toFixed(digits));
    return (
      from.find((limit) => value < limit !== rounded < limit) ??
      upTo.find((limit) => value > limit !== rounded > limit)
    );
  };
  if (crossed(2) === undefined) return value.toFixed(2);
  const limit = crossed(3);
  return limit === undefined ? value.toFixed(3) : `${value < limit ? "&lt;" : "&gt;"}${limit}`;
}

/**
 * @param {import("./types.js").HeadRun} run
 * @param {number} step
 */
function momentAt(run, step) {
  return run.moments.filter((moment) => (moment.step ?? 0) <= step).pop() ?? run.moments[0];
}

/**
 * A figure of lines over layers, with the values of each run's step.
 * @param {any} figure
 * @param {import("./types.js").Moment[]} moments
 * @param {(moment: import("./types.js").Moment) => (number | null)[][]} path
 */
function filled(figure, moments, path) {
  const data = figure.data.map((/** @type {any} */ trace, /** @type {number} */ index) => {
    const points = path(moments[index]);
    return { ...trace, x: points.map(([layer]) => layer), y: points.map(([, value]) => value) };
  });
  return { ...figure, label: `${figure.title}. The table below holds it.`, data };
}

/**
 * @param {string[]} words
 * @param {import("./types.js").PageData} data
 */
function counts(words, { verdicts, terms, marks }) {
  return verdicts.flatMap((word) => {
    const number = words.filter((own) => own === word).length;
    const text = `${number} ${word} ${marks[word] ?? ""}`.trim();
    return number ? [make("span", { class: `tag ${word}`, tabindex: 0, "data-tip": terms[word] }, text), " "] : [];
  });
}
