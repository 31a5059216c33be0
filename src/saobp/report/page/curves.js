/** The section of curves: every quantity of every run, on a common axis. */
import { chart } from "./chart.js";
import { runColour } from "./colours.js";
import { labelled, make, picker } from "./dom.js";
import { mean } from "./numbers.js";

const CURVE_NAMES = {
  loss: "Training loss",
  eval_loss: "Validation loss",
  eval_perplexity: "Validation perplexity",
  eval_accuracy: "Validation accuracy",
  learning_rate: "Learning rate",
  grad_norm: "Gradient norm",
};
const FIRST = ["loss", "eval_loss", "eval_perplexity", "eval_accuracy"];
const LAST = ["learning_rate"];
const WITH_LOG = ["loss", "eval_loss", "eval_perplexity", "perplexity", "grad_norm"];

/**
 * @param {import("./types.js").PageData} data
 * @returns {HTMLElement | null}
 */
export function curvesSection(data) {
  const runs = data.runs.filter((run) => Object.keys(run.curves).length || run.health.length > 1);
  if (!runs.length) return null;
  const state = { across: "step", up: "auto", smooth: 0, hidden: new Set() };
  const grid = make("div", { class: "charts" });
  const refresh = () => grid.replaceChildren(...charts(data, state));
  const axes = ["step", "tokens", "seconds"].filter((name) =>
    runs.some((run) => Object.values(run.curves).some((all) => all.some((series) => series.axes[name]))),
  );
  const smooth = make("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: 0,
    oninput: () => {
      state.smooth = Number(smooth.value);
      refresh();
    },
  });
  refresh();
  return make(
    "section",
    { id: "curves", "aria-labelledby": "curves-title" },
    make("h2", { id: "curves-title" }, "Curves"),
    make(
      "div",
      { class: "controls" },
      axes.length > 1
        ? labelled(
            "Across",
            picker(
              axes.map((name) => [name, name]),
              "step",
              (value) => {
                state.across = value;
                refresh();
              },
            ),
          )
        : null,
      labelled(
        "Up",
        picker(
          [
            ["auto", "as suits each"],
            ["linear", "linear"],
            ["log", "logarithmic"],
          ],
          "auto",
          (value) => {
            state.up = value;
            refresh();
          },
        ),
      ),
      labelled("Smooth", smooth),
    ),
    data.runs.length > 1 ? legend(data, state, refresh) : null,
    grid,
    thinnedNote(runs),
  );
}

/**
 * Names of the runs with their colours; a press hides or shows one.
 * @param {import("./types.js").PageData} data
 * @param {{ hidden: Set<number> }} state
 * @param {() => void} refresh
 */
function legend(data, state, refresh) {
  return make(
    "div",
    { class: "legend", role: "group", "aria-label": "Runs shown" },
    data.runs.map((run, place) => {
      const { colour } = runColour(place);
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = colour;
      const button = make(
        "button",
        {
          type: "button",
          "aria-pressed": "true",
          onclick: () => {
            const isHidden = !state.hidden.delete(place) && state.hidden.add(place);
            button.setAttribute("aria-pressed", isHidden ? "false" : "true");
            refresh();
          },
        },
        swatch,
        make("bdi", {}, run.name),
      );
      return button;
    }),
  );
}

/**
 * @param {import("./types.js").PageData} data
 * @param {{ across: string, up: string, smooth: number, hidden: Set<number> }} state
 * @returns {HTMLElement[]}
 */
function charts(data, state) {
  const found = [];
  for (const name of quantities(data.runs)) {
    const lines = data.runs
      .flatMap((run, place) =>
        state.hidden.has(place)
          ? []
          : (run.curves[name] ?? []).map((series) => ({
              name: series.of ? `${run.name}, ${series.of}` : run.name,
              ...runColour(place),
              isFaint: Boolean(series.of),
              points: smoothed(points(series, state.across), state.smooth),
            })),
      )
      .filter((line) => line.points.length);
    if (lines.length) {
      const title =
        /** @type {Record<string, string>} */ (CURVE_NAMES)[name] ??
        capital(name.replace(/^eval_/, "validation ").replaceAll("_", " "));
      found.push(
        chart(lines, {
          title,
          across: state.across,
          isLog:
            state.up === "auto" ? name.endsWith("perplexity") : state.up === "log" && WITH_LOG.includes(name),
          band: null,
          bandName: "",
          range: null,
        }),
      );
    }
  }
  return [...found, ...healthCharts(data, state)];
}

/**
 * Means over all heads as training goes on.
 * @param {import("./types.js").PageData} data
 * @param {{ hidden: Set<number> }} state
 */
function healthCharts(data, state) {
  const names = [
    ...new Set(
      data.runs.flatMap((run) => (run.health.length > 1 ? Object.keys(run.health[0].statistics) : [])),
    ),
  ];
  return names.flatMap((name) => {
    const lines = data.runs.flatMap((run, place) => {
      if (state.hidden.has(place) || run.health.length < 2) return [];
      const path = run.health.flatMap((moment) => {
        const value = moment.step === null ? null : mean((moment.statistics[name] ?? []).flat());
        return value === null ? [] : [/** @type {[number, number]} */ ([moment.step, value])];
      });
      return path.length ? [{ name: run.name, ...runColour(place), isFaint: false, points: path }] : [];
    });
    if (!lines.length) return [];
    const isGtd = name === "gtd";
    const { healthyFrom, healthyTo } = data.limits;
    return [
      chart(lines, {
        title: `${capital(data.titles[name] ?? name)}, mean of all heads`,
        across: "step",
        isLog: false,
        band: isGtd ? [healthyFrom, healthyTo] : null,
        bandName: "healthy",
        range: isGtd ? [0, 1] : null,
      }),
    ];
  });
}

/** @param {import("./types.js").Run[]} runs */
function quantities(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const rank = (/** @type {string} */ name) =>
    FIRST.includes(name)
      ? FIRST.indexOf(name)
      : name.startsWith("eval_")
        ? 10
        : LAST.includes(name)
          ? 30
          : 20;
  return names.sort((a, b) => rank(a) - rank(b));
}

/**
 * @param {import("./types.js").Series} series
 * @param {string} across
 * @returns {[number, number][]}
 */
function points(series, across) {
  const places = series.axes[across] ?? [];
  return series.values.flatMap((value, i) => {
    const place = places[i];
    return value === null || place === null || place === undefined
      ? []
      : [/** @type {[number, number]} */ ([place, value])];
  });
}

/**
 * Exponential mean that starts without bias.
 * @param {[number, number][]} path
 * @param {number} keep
 * @returns {[number, number][]}
 */
function smoothed(path, keep) {
  if (keep === 0) return path;
  let sum = 0,
    weight = 0;
  return path.map(([x, y]) => {
    sum = keep * sum + (1 - keep) * y;
    weight = keep * weight + (1 - keep);
    return [x, sum / weight];
  });
}

/** @param {import("./types.js").Run[]} runs */
function thinnedNote(runs) {
  const most = Math.max(
    0,
    ...runs.flatMap((run) =>
      Object.values(run.curves)
        .flat()
        .map((series) => series.thinned ?? 0),
    ),
  );
  return most
    ? make(
        "p",
        { class: "note" },
        "Long curves are thinned to the lowest and highest point of each stretch " +
          `(the longest had ${most.toLocaleString("en")} points).`,
      )
    : null;
}

/** @param {string} text */
function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}
