/**
 * Types of the data that Python embeds, and of values between modules.
 *
 * @typedef {(number | null)[][]} Grid  one entry per layer and head
 * @typedef {"gtd" | "indirect_entropy" | "attention_entropy" | "sink_mass"} Statistic
 * @typedef {Record<Statistic, number>} Numbers
 *
 * @typedef {object} Figure  for plotly: see charts.py
 * @property {string} [id]
 * @property {string} title
 * @property {string} [label]  for screen readers
 * @property {any[]} data  lines carry { run, place, name } in their meta
 * @property {any} layout
 * @property {Record<string, (number | null)[][]>} [x]  coordinates of each line on other axes
 * @property {boolean} [isLog]
 * @property {boolean} [isFolded]
 *
 * @typedef {object} Moment  all heads at a moment of training
 * @property {number | null} step
 * @property {Record<string, Grid>} values  by statistic
 * @property {number[][]} verdicts  indices into PageData.verdicts
 * @property {[number, number][]} across  layer and cross-layer GTD
 * @property {string[][] | null} kinds  what heads look at, in a diagnosis
 *
 * @typedef {{ name: string, place: number, layout: any, moments: Moment[] }} HeadRun
 *
 * @typedef {object} Heads
 * @property {number[]} steps
 * @property {Record<string, string>} titles  by statistic
 * @property {Record<string, any>} scales  heat maps without values
 * @property {Record<string, Figure> | null} layers  lines without values
 * @property {Figure | null} across
 * @property {HeadRun[]} runs
 *
 * @typedef {{ step: number, triangle: boolean, codes: string }} StoredHead
 *
 * @typedef {object} Sentence
 * @property {string} text
 * @property {string[]} tokens
 * @property {(StoredHead | null)[][]} scores  by layer and head; null if not embedded
 *
 * @typedef {object} Explorer
 * @property {string} run
 * @property {string} subject
 * @property {string[]} layers
 * @property {boolean[]} in_order  per layer: causal
 * @property {{ factor: string, steps: number, damping: number, message_stride?: number } | null} refinement
 * @property {(number[] | null)[]} strengths  the model's own, negative for low
 * @property {Sentence[]} sentences
 * @property {string[]} left_out
 * @property {any} layout  of the heat map of all heads
 *
 * @typedef {"localised" | "healthyFrom" | "healthyTo" | "diffuse" | "sink" | "collapsed" | "spread" | "even" | "fullOdds" | "beta"} Limit
 * @typedef {Record<Limit, number>} Limits  of verdicts, the odds of a uniform map without a mask, and the weight of longer paths
 * @typedef {{ gtd: number, entropy: number, sink: number }} UniformMap  of uniform rows under the mask of a head
 *
 * @typedef {object} PageData
 * @property {Figure[]} curves
 * @property {Heads | null} heads
 * @property {any} gtd  the scale of GTD
 * @property {Explorer[]} explorers
 * @property {string[]} verdicts
 * @property {Record<string, string>} marks
 * @property {Record<string, string>} terms  explained, verdicts among them
 * @property {Limits} limits
 *
 * @typedef {object} Setting  how rows are refined
 * @property {string} factor  potts, key-bias, listing, elemmul, elemmul-prior or none
 * @property {number} strength  lambda; negative is low
 * @property {number} steps
 * @property {number} damping
 */
export {};
