"""Sources of texts and tasks."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from saobp.lab.scales import Scale
from saobp.training.dataset import PretrainingData, find_pretraining_data
from saobp.training.recipes import PretrainRecipe


@dataclass(frozen=True)
class DataSources:
    """The folders of an invocation."""

    scale: Scale
    tokens: Path
    data_dir: Path | None = None

    def texts(self, recipe: PretrainRecipe) -> PretrainingData:
        """Rows for one run; runs of one family and corpus share them, each in the order of its seed."""
        found = _texts(self, recipe.family, recipe.corpus, recipe.length)
        return replace(found, train=found.train.with_seed(recipe.seed))


@functools.lru_cache(maxsize=4)
def _texts(sources: DataSources, family: str, corpus: str, length: int) -> PretrainingData:
    """Cached for all seeds, since verifying a token store reads every token."""
    return find_pretraining_data(
        family,
        corpus,
        length=length,
        seed=0,
        tokens=sources.tokens,
        data_dir=sources.data_dir,
        vocabulary=sources.scale.vocabulary,
        held_out=0.01 if sources.scale.vocabulary is None else 0.1,
    )
