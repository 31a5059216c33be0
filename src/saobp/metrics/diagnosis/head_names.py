"""Titles of statistics, marks of verdicts and colours of runs, for tables, pages and figures."""

TITLES = {
    "gtd": "GTD",
    "indirect_entropy": "indirect entropy (nats)",
    "attention_entropy": "attention entropy (nats)",
    "sink_mass": "sink mass",
    "sparsity": "sparsity",
    "clustering": "clustering",
    "betweenness": "betweenness",
    "cross_layer_gtd": "GTD across layers",
}
MARKS = {"localised": "▼", "diffuse": "▲", "sink": "●", "undefined": "?"}
COLOURS = ("#1f5fa8", "#c2571a", "#2d8a57", "#8a4fa3", "#b58a00", "#3aa0b5", "#c43d6b", "#6b6f76")
