"""One function per experiment, by name, which fills its page from results."""

from collections.abc import Callable
from functools import partial

from saobp.lab.pages import many_seeds, plateau
from saobp.lab.pages import open_questions as questions
from saobp.lab.pages import paper_figures as figures
from saobp.lab.pages import paper_tables as tables
from saobp.lab.result_page import Page
from saobp.lab.results import Results

PAGES: dict[str, Callable[[Results, Page], None]] = {
    "pretraining": tables.pretraining,
    "gtd": tables.gtd,
    "tasks": tables.tasks,
    "glue": tables.glue,
    "baselines": tables.baselines,
    "decoders": tables.decoders,
    "gtd-correlation": tables.gtd_correlation,
    "sparsity": tables.sparsity,
    "cost": tables.cost,
    "attention-maps": figures.attention_maps,
    "gtd-graph": figures.gtd_graph,
    "gtd-performance": figures.gtd_performance,
    "layers": partial(figures.profile, measure="race-middle"),
    "sparsity-maps": figures.sparsity_maps,
    "squad-profile": partial(figures.profile, measure="squad"),
    "sst2-profile": partial(figures.profile, measure="sst2"),
    "decoder-leak": questions.decoder_leak,
    "printed-forms": questions.printed_forms,
    "strengths": questions.strengths,
    "learned": questions.learned,
    "steps": questions.steps,
    "plateau": plateau.plateau,
    "one-model-many-seeds": many_seeds.many_seeds,
    "arena": questions.arena,
}
