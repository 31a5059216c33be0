"""Measures the attention of a model while it runs; no map is kept."""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saobp.metrics.attention_inputs import AttentionInputs, inputs_of
from saobp.metrics.functional.gtd import BETA, HOPS, check_path, share_through_layers
from saobp.metrics.health.head_health import CROSS_LAYER, Health
from saobp.metrics.health.verdicts import UniformMap, uniform_map
from saobp.metrics.query_key_statistics import PLAIN, Method, checked_statistics, measure_heads
from saobp.metrics.sampling import SAMPLED, Sampling, checked_sampling, exact_estimate
from saobp.propagation.beliefs import without_autocast
from saobp.refinement import check_count
from saobp.transformers.apply import attention_modules
from saobp.transformers.capture import AttentionCall, watch

EXACT_UP_TO = 1024
"""Texts up to this many tokens are measured exactly by method ``auto``."""


@contextmanager
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
) -> Iterator[Health]:
    """Context manager that measures every head of ``model`` in each forward; yields its :class:`Health`.

    With ``every=n`` only each n-th forward is measured, with ``texts=n`` the first n of a batch. Statistics
    are those of :func:`saobp.metrics.measure` and ``cross_layer_gtd``. ``auto`` samples beyond 1,024 tokens;
    what it cannot sample, such as clustering, needs ``exact``. Give the compiled model if it is compiled:
    measured forwards run eagerly, the others compiled. Afterwards, also after an exception, the model is as
    before.
    """
    recorder = Recorder(model, statistics, method, texts, beta, hops, sampling)
    with forwards_of(model, recorder.measuring, every, "the probe"):
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
        attention_modules(model)
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
        self._calls: dict[str, int] = {}
        self._layers_below: deque[list[Tensor]] = deque(maxlen=hops - 1)
        self._stack = ""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure every forward inside this context; compiled parts run eagerly."""
        self._calls.clear()
        self._layers_below.clear()
        self.health.forwards += 1
        with torch.compiler.set_stance("force_eager"), watch(self.model, self._record):
            yield
        self._layers_below.clear()

    def _record(self, call: AttentionCall) -> None:
        with torch.no_grad(), without_autocast(call.query.device.type):
            length = call.query.shape[-2]
            sampled = self.method == "sampled" or (self.method == "auto" and length > EXACT_UP_TO)
            heads = inputs_of(call, self.texts, linear=True)
            if heads is None:
                self.health.skipped.add(call.name)
                return
            if sampled and heads.strength.ndim > 1:
                raise ValueError(
                    f"{call.name} has strengths that are not one per head, whose maps cannot be sampled: use "
                    "method 'exact'"
                )
            heads = heads.without_empty_texts()
            if not len(heads.query):  # still adds the layer: all processes must reduce alike
                nothing = exact_estimate(heads.query.new_zeros(heads.query.shape[:2], dtype=torch.float32))
                estimates = dict.fromkeys(self.statistics, nothing)
                self.health.add(layer_name(call.name, self._calls), estimates, self._uniform(heads))
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
            across = self._cross_layer_gtd(call.name, averages.maps) if self.across and not sampled else None
            self.health.add(layer_name(call.name, self._calls), estimates, self._uniform(heads), across)

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
        nothing = heads.query.new_zeros(batch, 1, length, 1)
        visible = None if heads.visible is None else heads.visible[:, :1]
        even = replace(
            heads,
            query=nothing,
            key=nothing,
            strength=nothing[0, :, 0, 0],
            refinement=PLAIN,
            visible=visible,
            bias=None,
        )
        method: Method = "exact" if length <= EXACT_UP_TO else "sampled"
        names = ("gtd", "attention_entropy", "sink_mass")
        estimates = measure_heads(
            even, method, names, beta=self.beta, hops=self.hops, sampling=self._sampling()
        )
        return UniformMap(*(estimates[name].value[:, 0] for name in names))

    def _cross_layer_gtd(self, name: str, averages: list[Tensor]) -> Tensor | None:
        """Cross-layer GTD of each text for the current layer, from head averages of the layers below.

        Separate for encoder and decoder, and for text and image models: their tokens differ.
        """
        stack = re.split(r"\.\d+(?:\.|$)", name)[0]
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


@contextmanager
def forwards_of(
    model: nn.Module, measuring: Callable[[], AbstractContextManager[None]], every: int, observer: str
) -> Iterator[None]:
    """Enter ``measuring`` around each ``every``-th forward; ``observer`` warns if there was none."""
    check_count("every", every)
    forwards = ForwardHooks(measuring, every)
    with forwards.of(model):
        yield
    if not forwards.seen:
        warnings.warn(
            f"{observer} saw no forward: run the very model that it was given, compiled or not", stacklevel=5
        )


class ForwardHooks:
    """Enters ``measuring`` around each ``every``-th call of a model."""

    def __init__(self, measuring: Callable[[], AbstractContextManager[None]], every: int) -> None:
        self.measuring, self.every, self.seen = measuring, every, 0
        self._open: list[ExitStack] = []

    def __deepcopy__(self, _: object) -> ForwardHooks:
        """Hooks that do nothing: a copy of the model made meanwhile, which keeps them, is not measured."""
        return ForwardHooks(nullcontext, 1)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Hooks a model; one compiled in place is wrapped, since hooks would run inside its compiled call."""
        compiled = model.__dict__.get("_compiled_call_impl")
        if compiled is not None:
            model.__dict__["_compiled_call_impl"] = self._around(compiled)
            try:
                yield
            finally:
                model.__dict__["_compiled_call_impl"] = compiled
            return
        handles = [
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._before()
            try:
                return compiled(*args, **kwargs)
            finally:
                self._after()

        return call

    def _before(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._open.append(ExitStack())
        if len(self._open) == 1:
            self.seen += 1
            if (self.seen - 1) % self.every == 0:
                self._open[0].enter_context(self.measuring())

    def _after(self, *_: Any) -> None:
        if self._open and not torch.compiler.is_compiling():
            self._open.pop().close()
