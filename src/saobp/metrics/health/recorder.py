"""Measures the attention of a model while it runs; no map is kept."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from saobp.metrics.attention_inputs import AttentionInputs
from saobp.metrics.functional.gtd import BETA, HOPS, check_path, share_through_layers
from saobp.metrics.health.head_health import CROSS_LAYER, RETURNED_MAPS, Health
from saobp.metrics.health.measured_forwards import WithBlock, forwards_of
from saobp.metrics.health.verdicts import UniformMap, uniform_map
from saobp.metrics.observed_attention import ObservedAttention
from saobp.metrics.query_key_statistics import Method, checked_statistics, measure_heads
from saobp.metrics.sampling import SAMPLED, Sampling, checked_sampling, exact_estimate
from saobp.propagation.beliefs import without_autocast
from saobp.refinement import check_count

EXACT_UP_TO = 1024
"""Texts up to this many tokens are measured exactly by method ``auto``."""


def probe(
    model: nn.Module,
    *,
    every: int = 1,
    texts: int | None = None,
    statistics: Collection[str] = SAMPLED,
    method: Literal["auto", "exact", "sampled"] = "auto",
    beta: float = BETA,
    hops: int = HOPS,
    sampling: Sampling | None = None,
) -> AbstractContextManager[Health]:
    """Context manager that measures every head of ``model`` in each forward; yields its :class:`Health`.

    With ``every=n`` only each n-th forward is measured, with ``texts=n`` the first n of a batch. Statistics
    are those of :func:`saobp.metrics.measure` and ``cross_layer_gtd``. ``auto`` samples beyond 1,024 tokens;
    what it cannot sample, such as clustering, needs ``exact``. A Transformers model outside the attention
    registry is measured exactly, from the maps that it returns. Give the compiled model if it is compiled:
    measured forwards run eagerly, the others compiled. Afterwards, also after an exception, the model is as
    before.
    """
    return WithBlock(
        _probing(Recorder(model, statistics, method, texts, beta, hops, sampling), every),
        "saobp.probe(model)",
    )


@contextmanager
def _probing(recorder: Recorder, every: int) -> Iterator[Health]:
    with recorder.attached(), forwards_of(recorder.model, recorder.measuring, every, "the probe"):
        yield recorder.health


class Recorder:
    """Accumulates statistics of a model's attention calls inside ``measuring()``."""

    def __init__(
        self,
        model: nn.Module,
        statistics: Collection[str] = SAMPLED,
        method: str = "auto",
        texts: int | None = None,
        beta: float = BETA,
        hops: int = HOPS,
        sampling: Sampling | None = None,
    ) -> None:
        check_path(beta, hops)
        self.across = CROSS_LAYER in statistics
        alone = isinstance(statistics, str)  # refused below
        wanted = statistics if alone else [name for name in statistics if name != CROSS_LAYER]
        if self.across and not wanted:
            raise ValueError(f"{CROSS_LAYER} is measured beside others: name one more, such as gtd")
        self.statistics = checked_statistics(method, wanted, ("auto", "exact", "sampled"))
        if self.across and method == "sampled":
            raise ValueError(f"{CROSS_LAYER} has no sampled form: use method 'exact' or 'auto'")
        if texts is not None:
            check_count("texts", texts)
        self.model, self.method, self.texts = model, method, texts
        self.beta, self.hops, self.sampling = beta, hops, checked_sampling(sampling)
        self.health = Health(self.statistics)
        self._observed = ObservedAttention(model, self._record, self.health.skipped.add, texts)
        if self._observed.from_maps:
            self.health.measured_from = RETURNED_MAPS
            if method == "sampled":
                raise ValueError(
                    f"{type(model).__name__} computes attention without Transformers' attention registry, so "
                    "it is measured from the maps that it returns, which are not sampled: use method "
                    "'exact' or 'auto'"
                )
        self._calls: dict[str, int] = {}
        self._layers_below: deque[list[Tensor]] = deque(maxlen=hops - 1)
        self._stack = ""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure every forward inside this context; compiled parts run eagerly."""
        self._calls.clear()
        self._layers_below.clear()
        self.health.forwards += 1
        with torch.compiler.set_stance("force_eager"), self._observed.observing():
            yield
        self._layers_below.clear()

    def attached(self) -> AbstractContextManager[None]:
        """To be entered before a forward whose hooks enter ``measuring``."""
        return self._observed.attached()

    def _record(self, name: str, stack: str, heads: AttentionInputs) -> None:
        with torch.no_grad(), without_autocast(heads.query.device.type):
            length = heads.query.shape[-2]
            sampled = self.method == "sampled" or (self.method == "auto" and length > EXACT_UP_TO)
            sampled = sampled and not self._observed.from_maps
            if sampled and heads.strength.ndim > 1:
                raise ValueError(
                    f"{name} has strengths that are not one per head, whose maps cannot be sampled: use "
                    "method 'exact'"
                )
            heads = heads.without_empty_texts()
            if not len(heads.query):  # still adds the layer: all processes must reduce alike
                nothing = exact_estimate(heads.query.new_zeros(heads.query.shape[:2], dtype=torch.float32))
                estimates = dict.fromkeys(self.statistics, nothing)
                self.health.add(layer_name(name, self._calls), estimates, self._uniform(heads))
                return
            averages = HeadAverages(heads.query.shape[1])
            estimates = measure_heads(
                heads,
                "sampled" if sampled else "exact",
                self.statistics,
                beta=self.beta,
                hops=self.hops,
                sampling=self._sampling(),
                on_maps=averages.add if self.across else None,
            )
            across = self._cross_layer_gtd(stack, averages.maps) if self.across and not sampled else None
            self.health.add(layer_name(name, self._calls), estimates, self._uniform(heads), across)

    def _sampling(self) -> Sampling:
        """New random draws in every forward, so that errors average out."""
        drawn = self.sampling
        return Sampling(drawn.probes, drawn.rows, drawn.seed + self.health.forwards - 1)

    def _uniform(self, heads: AttentionInputs) -> UniformMap:
        """Statistics of uniform maps under the mask of each text."""
        batch, _, length, _ = heads.query.shape
        if heads.window is None and heads.visible is None:
            tokens = torch.full((batch,), float(length), device=heads.query.device)
            if heads.padding_mask is not None:
                tokens = heads.padding_mask.sum(-1).float()
            return uniform_map(tokens, causal=heads.causal, beta=self.beta, hops=self.hops)
        method: Method = "exact" if length <= EXACT_UP_TO else "sampled"
        names = ("gtd", "attention_entropy", "sink_mass")
        estimates = measure_heads(
            heads.even(), method, names, beta=self.beta, hops=self.hops, sampling=self._sampling()
        )
        return UniformMap(*(estimates[name].value[:, 0] for name in names))

    def _cross_layer_gtd(self, stack: str, averages: list[Tensor]) -> Tensor | None:
        """Cross-layer GTD of each text for the current layer, from head averages of the layers below.

        Separate for encoder and decoder, and for text and image models: their tokens differ.
        """
        if stack != self._stack or any(
            [rows.shape for rows in below] != [rows.shape for rows in averages]
            for below in self._layers_below
        ):
            self._layers_below.clear()
        self._stack = stack
        values = [
            share_through_layers(rows, [below[index] for below in self._layers_below], self.beta)
            for index, rows in enumerate(averages)
        ]
        first = not self._layers_below
        self._layers_below.appendleft(averages)
        return None if first else torch.cat(values)


class HeadAverages:
    """The mean over heads of the maps of each text, from maps that come block by block."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self._sums: dict[int, Tensor] = {}

    def add(self, texts: slice, rows: Tensor) -> None:
        """rows ``[texts, some heads, length, length]``"""
        row_sums = rows.sum(1)
        self._sums[texts.start] = (
            self._sums[texts.start] + row_sums if texts.start in self._sums else row_sums
        )

    @property
    def maps(self) -> list[Tensor]:
        """Of texts measured together, ``[texts, length, length]``; all blocks must have been added."""
        return [total / self.heads for total in self._sums.values()]


def layer_name(name: str, calls: dict[str, int]) -> str:
    """Name of a layer; a module shared by several layers, as in ALBERT, counts as several.

    ``calls`` counts the calls of each module in one forward.
    """
    calls[name] = calls.get(name, 0) + 1
    count = calls[name]
    return unwrapped(name) if count == 1 else f"{unwrapped(name)} ({count})"


def unwrapped(name: str) -> str:
    """The name of a module without the prefixes of compiled and distributed models."""
    return re.sub(r"^(?:_orig_mod\.|module\.)+", "", name)
