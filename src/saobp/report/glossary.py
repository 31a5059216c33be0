"""Terms of the page, each with a sentence for readers who meet it for the first time."""

from __future__ import annotations

from saobp.metrics.diagnosis.head_kinds import KIND_FROM, Kind
from saobp.metrics.health.verdicts import HEALTHY_FROM, HEALTHY_TO
from saobp.report.summaries import MEANINGS

KIND_MEANINGS: dict[Kind, str] = {
    "first token": "It looks at the first token of the text.",
    "previous token": "It looks at the token before.",
    "next token": "It looks at the token after.",
    "self": "Each token looks at itself.",
    "delimiter": "It looks at punctuation, line ends and special tokens other than the first.",
    "duplicate token": "It looks at the earlier copy of the same token, found on random tokens that repeat.",
    "induction": "It looks at the token after the earlier copy of the same token, found on random tokens "
    "that repeat.",
}
TERMS: dict[str, str] = {
    "GTD": "Global token dependency: of all that a head passes on, the share that takes indirect paths of "
    f"two to four hops. From {HEALTHY_FROM} to {HEALTHY_TO} counts as healthy.",
    "indirect entropy": "How evenly the indirect paths of a head spread over tokens, in nats: 0 if all end "
    "at one token.",
    "attention entropy": "How evenly a row spreads its weight over keys, in nats, mean over rows: 0 if each "
    "row looks at one key.",
    "sink mass": "The largest share of all attention that goes to a single token.",
    "GTD across layers": "GTD of paths through consecutive layers, heads averaged, instead of one layer "
    "again and again.",
    "head": "One of several attention maps of a layer, with weights of its own.",
    "row": "The attention of one token: its weights over all keys, which sum to one.",
    "key": "A token that others look at.",
    "softmax": "The attention of the model before any refinement.",
    "refined": "The same attention after belief propagation: each row has heard what the others chose.",
    "λ": "Strength of the refinement. Above 0 (high) rows that chose the same key repel each other, below 0 "
    "(low) they attract; at 0 nothing changes.",
    "strength": "λ, how strongly rows influence each other. Learned strengths are trained, one per head; "
    "fixed ones were given.",
    "factor": "What one row tells another about each key: high and low are the paper's equation, the listing "
    "its printed program, elemmul compares whole rows.",
    "steps": "How often rows tell each other and choose again.",
    "damping": "Share of the old choice that is kept at each of several steps.",
    "two-hop paths": "Ways from one token to another by a third in between: the product of both weights.",
    "arcs": "An arc joins a token to one that it looks at; the wider, the more.",
    "perplexity": "Among how many tokens the model is unsure, as if it guessed: lower is better.",
    "seed": "The random start of a run. Runs that differ in the seed alone show how much is chance.",
    "kind": f"What a head looks at, if that takes at least {KIND_FROM} of its attention beyond what even "
    "rows would give. It is no verdict.",
    **{str(name): meaning for name, meaning in KIND_MEANINGS.items()},
    **{str(name): f"{meaning[0].upper()}{meaning[1:]}." for name, meaning in MEANINGS.items()},
}
"""By the words that the page shows."""
