/**
 * What Python writes into the page, and what the modules hand to each other. Types only.
 *
 * @typedef {(number | null)[][]} Grid  one entry per layer and head
 * @typedef {"gtd" | "indirect_entropy" | "attention_entropy" | "sink_mass"} Statistic
 * @typedef {Record<Statistic, number>} Numbers
 *
 * @typedef {object} Series
 * @property {string} of  the seed, in a run with several
 * @property {Record<string, (number | null)[]>} axes  by step, tokens or seconds
 * @property {(number | null)[]} values
 * @property {number | null} thinned  how many points there were, if not all are here
 *
 * @typedef {object} Snapshot
 * @property {number | null} step
 * @property {string[]} layers
 * @property {Record<string, Grid>} statistics
 * @property {Record<string, Grid>} errors
 * @property {Grid | null} strengths
 * @property {number[][]} verdicts  places in PageData.verdicts
 * @property {number | null} largest  entropy of rows that are even over all they may see
 * @property {Record<string, number>} across  cross-layer GTD by layer
 *
 * @typedef {object} Run
 * @property {string} name
 * @property {string} kind
 * @property {string[]} words
 * @property {string[]} problems
 * @property {Record<string, Series[]>} curves
 * @property {Snapshot[]} health
 * @property {[string, string][]} facts
 * @property {[string, string][]} recipe
 * @property {[string, string][]} result
 *
 * @typedef {{ step: number, triangle: boolean, codes: string }} StoredHead
 *
 * @typedef {object} Sentence
 * @property {string} text
 * @property {string[]} tokens
 * @property {(StoredHead | null)[][]} scores  by layer and head; null where the page has no room
 *
 * @typedef {object} Explorer
 * @property {string} run
 * @property {string} subject
 * @property {string[]} layers
 * @property {boolean[]} in_order  per layer: rows hear earlier rows alone
 * @property {{ factor: string, steps: number, damping: number } | null} refinement
 * @property {(number[] | null)[]} strengths  the model's own, negative for low
 * @property {Sentence[]} sentences
 * @property {string[]} left_out
 *
 * @typedef {object} Limits
 * @property {number} localised
 * @property {number} healthyFrom
 * @property {number} healthyTo
 * @property {number} diffuse
 * @property {number} sink
 * @property {number} collapsed
 * @property {number} beta
 *
 * @typedef {object} PageData
 * @property {string} title
 * @property {string} made
 * @property {string} version
 * @property {Run[]} runs
 * @property {{ title: string, columns: string[], rows: string[][], note: string }[]} tables
 * @property {string | null} sample
 * @property {string[]} notes
 * @property {{ characters: number, tokens: number, subject: string } | null} live
 * @property {Explorer[]} explorers
 * @property {Record<string, string>} titles
 * @property {string[]} verdicts
 * @property {Record<string, string>} meanings
 * @property {Limits} limits
 *
 * @typedef {object} Setting  how rows are refined
 * @property {string} factor  potts, listing, elemmul, elemmul-prior or none
 * @property {number} strength  lambda; negative is low
 * @property {number} steps
 * @property {number} damping
 */
export {};
