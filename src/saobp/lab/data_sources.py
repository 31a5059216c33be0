"""Where texts and tasks come from: folders that are named, or at the smoke scale made up on the spot."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from pathlib import Path

from saobp.lab.scales import Scale
from saobp.storage.atomic import replacing
from saobp.testing.tiny_tasks import COLOURS, NOUNS, SIGNS, sentence, write_rows, write_tasks
from saobp.training.dataset import Texts, find_texts
from saobp.training.recipes import PretrainRecipe

MADE_UP = "made-up"
DOCUMENTS, ROWS = 240, 32


@dataclass(frozen=True)
class Sources:
    """The folders of an invocation."""

    scale: Scale
    tokens: Path
    data_dir: Path | None = None

    def texts(self, recipe: PretrainRecipe) -> Texts:
        """Rows for one run; runs of one family and corpus share them, each in the order of its seed."""
        found = _texts(self, recipe.family, recipe.corpus, recipe.length)
        return replace(found, train=found.train.with_seed(recipe.seed))


@functools.lru_cache(maxsize=4)
def _texts(sources: Sources, family: str, corpus: str, length: int) -> Texts:
    """Verified in full, which reads every token: once for all seeds."""
    return find_texts(
        family,
        corpus,
        length=length,
        seed=0,
        tokens=sources.tokens,
        data_dir=sources.data_dir,
        vocabulary=sources.scale.vocabulary,
        held_out=0.01 if sources.scale.vocabulary is None else 0.1,
    )


def make_up(folder: Path) -> Path:
    """A data folder with texts and every task, invented, whole or absent; one that is there stays."""
    if not folder.exists():
        with replacing(folder) as new:
            write_tasks(new, rows=ROWS)
            draw = random.Random(0)
            texts = [{"text": _document(draw)} for _ in range(DOCUMENTS)]
            write_rows(new / MADE_UP / "part00.parquet", texts)
    return folder


def _document(draw: random.Random) -> str:
    parts = []
    for _ in range(12):
        parts.append(sentence(draw))
        if draw.random() < 0.5:
            parts.append(f"the {draw.choice(NOUNS)} is {draw.choice([*SIGNS, *COLOURS])} .")
    return " ".join(parts)
