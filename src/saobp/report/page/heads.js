/** The section of heads: one heat map per run, for a statistic and a moment of training. */
import { chart } from "./chart.js";
import { runColour } from "./colours.js";
import { folded, labelled, make, picker, table } from "./dom.js";
import { heatMap, MARKS, scaleBar } from "./heatmap.js";
import { counted, extent, mean, shown } from "./numbers.js";

/**
 * @param {import("./types.js").PageData} data
 * @returns {HTMLElement | null}
 */
export function headsSection(data) {
  const { limits } = data;
  const runs = data.runs.flatMap((run, place) => (run.health.length ? [{ ...run, place }] : []));
  if (!runs.length) return null;
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.health[0].statistics)))];
  if (runs.some((run) => run.health.some((moment) => moment.strengths))) names.push("strengths");
  const steps = [...new Set(runs.flatMap((run) => run.health.map((moment) => moment.step ?? 0)))].sort(
    (a, b) => a - b,
  );
  const state = { statistic: names[0], step: steps[steps.length - 1] };
  const maps = make("div", { class: "maps" });
  const layers = make("div", { class: "charts" });
  const said = make("output", {}, "");
  const refresh = () => {
    const range = rangeOf(runs, state.statistic);
    maps.replaceChildren(
      ...runs.map((run) => runMap(data, run, momentAt(run, state.step), state.statistic, range)),
      scaleBar(state.statistic, range, data.limits, extent(runs.map((run) => run.health[0].largest ?? 0))[1]),
    );
    layers.replaceChildren(...layerCharts(data, runs, state));
    said.textContent = steps.length > 1 ? state.step.toLocaleString("en") : "";
  };
  const slider = make("input", {
    type: "range",
    min: 0,
    max: steps.length - 1,
    step: 1,
    value: steps.length - 1,
    oninput: () => {
      state.step = steps[Number(slider.value)];
      slider.setAttribute("aria-valuetext", `step ${state.step}`);
      refresh();
    },
  });
  refresh();
  return make(
    "section",
    { id: "heads", "aria-labelledby": "heads-title" },
    make("h2", { id: "heads-title" }, "Heads"),
    make(
      "div",
      { class: "controls" },
      labelled(
        "Statistic",
        picker(
          names.map((name) => [name, titleOf(data, name)]),
          names[0],
          (value) => {
            state.statistic = value;
            refresh();
          },
        ),
      ),
      steps.length > 1 ? labelled("Step", slider, said) : null,
    ),
    maps,
    layers,
    make(
      "p",
      { class: "note" },
      "GTD is the share of indirect paths, of two to four hops, in what a head passes on. ",
      `Below ${limits.localised} a head is localised ▼, above ${limits.diffuse} diffuse ▲, `,
      `from ${limits.healthyFrom} to ${limits.healthyTo} healthy. `,
      `A sink ● sends at least ${100 * limits.sink} % of all attention to one token. `,
      `Rows with less than ${100 * limits.collapsed} % of the possible entropy count as localised whatever their GTD.`,
    ),
    runs.map((run) => folded(`Every head of ${run.name}`, () => headTable(data, run))),
  );
}

/**
 * @param {import("./types.js").PageData} data
 * @param {string} name
 */
function titleOf(data, name) {
  return name === "strengths" ? "learned strength (λ)" : (data.titles[name] ?? name.replaceAll("_", " "));
}

/**
 * @param {import("./types.js").Run} run
 * @param {number} step
 */
function momentAt(run, step) {
  return run.health.filter((moment) => (moment.step ?? 0) <= step).pop() ?? run.health[0];
}

/**
 * @param {import("./types.js").Run[]} runs
 * @param {string} name
 * @returns {[number, number]}
 */
function rangeOf(runs, name) {
  if (name === "gtd") return [0, 1];
  const values = runs
    .flatMap((run) => run.health.flatMap((moment) => gridOf(moment, name).flat()))
    .filter((value) => value !== null);
  const most = Math.max(1e-9, ...extent(values).map(Math.abs));
  return name === "strengths" ? [-most, most] : [0, most];
}

/**
 * @param {import("./types.js").Snapshot} moment
 * @param {string} name
 * @returns {import("./types.js").Grid}
 */
function gridOf(moment, name) {
  return (name === "strengths" ? moment.strengths : moment.statistics[name]) ?? [];
}

/**
 * @param {import("./types.js").PageData} data
 * @param {import("./types.js").Run & { place: number }} run
 * @param {import("./types.js").Snapshot} moment
 * @param {string} name
 * @param {[number, number]} range
 */
function runMap(data, run, moment, name, range) {
  const grid = gridOf(moment, name);
  const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.background = runColour(run.place).colour;
  const caption = make(
    "h3",
    {},
    data.runs.length > 1 ? swatch : null,
    make("bdi", {}, run.name),
    moment.step === null ? "" : `, step ${moment.step.toLocaleString("en")}`,
  );
  if (!grid.length)
    return make(
      "figure",
      { class: "panel" },
      caption,
      make("p", { class: "empty" }, `This run has no ${titleOf(data, name)}.`),
    );
  const cells = grid.map((row, layer) =>
    row.map((value, head) => {
      const verdict = data.verdicts[moment.verdicts[layer][head]];
      return {
        value,
        verdict,
        words: `layer ${layer}, head ${head}: ${titleOf(data, name)} ${shown(value)}, ${verdict}`,
      };
    }),
  );
  return make(
    "figure",
    { class: "panel" },
    caption,
    heatMap(cells, {
      caption: `${titleOf(data, name)} of ${run.name}, layers down, heads across`,
      statistic: name,
      range,
      layers: moment.layers,
      choose: null,
      chosen: null,
    }),
    make("p", { class: "counts" }, counts(data, moment)),
  );
}

/**
 * @param {import("./types.js").PageData} data
 * @param {import("./types.js").Snapshot} moment
 */
function counts(data, moment) {
  const all = moment.verdicts.flat();
  return data.verdicts.flatMap((word, place) => {
    const number = all.filter((own) => own === place).length;
    return number
      ? [
          make(
            "span",
            { class: `tag ${word}`, title: data.meanings[word] },
            `${number} ${word} ${MARKS[word] ?? ""}`.trim(),
          ),
          " ",
        ]
      : [];
  });
}

/**
 * @param {import("./types.js").PageData} data
 * @param {(import("./types.js").Run & { place: number })[]} runs
 * @param {{ statistic: string, step: number }} state
 */
function layerCharts(data, runs, state) {
  const isGtd = state.statistic === "gtd";
  const { healthyFrom, healthyTo } = data.limits;
  const build = (
    /** @type {string} */ title,
    /** @type {(moment: import("./types.js").Snapshot) => [number, number][]} */ path,
  ) => {
    const lines = runs
      .map((run) => ({
        name: run.name,
        ...runColour(run.place),
        isFaint: false,
        points: path(momentAt(run, state.step)),
      }))
      .filter((line) => line.points.length > 1);
    return lines.length
      ? [
          chart(lines, {
            title,
            across: "layer",
            isLog: false,
            band: isGtd ? [healthyFrom, healthyTo] : null,
            bandName: "healthy",
            range: isGtd ? [0, 1] : null,
          }),
        ]
      : [];
  };
  const layerwise = build(`${titleOf(data, state.statistic)} by layer, mean of its heads`, (moment) =>
    gridOf(moment, state.statistic).flatMap((row, layer) => {
      const value = mean(row);
      return value === null ? [] : [/** @type {[number, number]} */ ([layer, value])];
    }),
  );
  const across = isGtd
    ? build(data.titles.cross_layer_gtd ?? "GTD across layers", (moment) =>
        Object.entries(moment.across).map(
          ([layer, value]) => /** @type {[number, number]} */ ([Number(layer), value]),
        ),
      )
    : [];
  return [...layerwise, ...across];
}

/**
 * @param {import("./types.js").PageData} data
 * @param {import("./types.js").Run} run
 */
function headTable(data, run) {
  const moment = run.health[run.health.length - 1];
  const names = Object.keys(moment.statistics);
  const rows = moment.verdicts.flatMap((row, layer) =>
    row.map((verdict, head) => [
      `${layer}.${head}`,
      moment.layers[layer],
      make("span", { class: `tag ${data.verdicts[verdict]}` }, data.verdicts[verdict]),
      ...names.map((name) =>
        withError(moment.statistics[name][layer][head], moment.errors[name]?.[layer]?.[head]),
      ),
      ...(moment.strengths ? [shown(moment.strengths[layer][head])] : []),
    ]),
  );
  const columns = [
    "layer.head",
    "module",
    "verdict",
    ...names.map((name) => titleOf(data, name)),
    ...(moment.strengths ? ["λ"] : []),
  ];
  return make(
    "div",
    {},
    make(
      "p",
      { class: "note" },
      `${counted(rows.length, "head")}${moment.step === null ? "" : `, at step ${moment.step.toLocaleString("en")}`}.`,
    ),
    table(`Every head of ${run.name}`, columns, rows),
  );
}

/**
 * @param {number | null} value
 * @param {number | null | undefined} error
 */
function withError(value, error) {
  return error && error >= 0.0005 ? `${shown(value)} ± ${shown(error)}` : shown(value);
}
