"""Two penalties from the literature that act on attention: Entropy-Reg and Eigen-Reg.

    penalty = regularizer("entropy")
    with penalty.watch(model):
        loss = model(**batch).loss + penalty.penalty()

Both work on every model whose attention asks Transformers' registry, with any attention implementation.
docs/regularizers.md says which reading of each source is the default, and why.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from saobp.metrics.functional.entropy import row_entropy
from saobp.transformers.apply import attention_modules, head_count
from saobp.transformers.capture import AttentionCall, Watcher
from saobp.transformers.projections import query_key_weights


class Regularizer(nn.Module, ABC):
    """A penalty on a model's attention, already multiplied by its weight.

    Its parameters and buffers are created for a model by :meth:`attach`: call it before the optimizer is
    built, give the optimizer ``parameters()``, save ``state_dict()``.
    """

    sums_over_texts: bool = False
    """Whether the penalty of a batch is the sum over its micro-batches, not the mean."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight of a penalty is a number of at least 0, not {weight}")
        self.weight = float(weight)

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Create the parameters for this model's attention modules; does nothing the second time."""

    @abstractmethod
    def watch(self, model: nn.Module) -> Any:
        """A context in which the model's forward passes are recorded."""

    @abstractmethod
    def penalty(self) -> Tensor:
        """The penalty of the forward passes since the last call, a scalar with a gradient."""


class EntropyReg(Regularizer):
    """Pulls the entropy of every head towards a learned share of the largest one possible.

    E = mean entropy of the head's rows, d = E - threshold * log T for T real tokens,
    penalty = d^2 where |d| > margin * log T, else 0; mean over heads and layers, times ``weight``.

    weight:     lambda of the source
    margin:     gamma of the source
    threshold:  where every head's threshold starts; ``learned`` trains it, per layer and head
    reduction:  ``paper``: entropy averaged over rows and texts, as above. ``released``: every row is
                penalised on its own and the penalties are summed, with the first layer's thresholds for all
    longest:    what log T counts. ``length``: the real tokens of the text. ``visible``: the keys that each
                row sees, which is the largest entropy possible under a causal mask
    """

    threshold_bias: nn.ParameterList
    """Per layer ``[heads]``; the name excludes them from weight decay, which goes by names."""

    def __init__(
        self,
        weight: float = 1e-5,
        *,
        margin: float = 0.2,
        threshold: float = 0.5,
        learned: bool = True,
        reduction: str = "paper",
        longest: str = "length",
    ) -> None:
        super().__init__(weight)
        if reduction not in ("paper", "released"):
            raise ValueError(f"reduction must be 'paper' or 'released', not {reduction!r}")
        if longest not in ("length", "visible"):
            raise ValueError(f"longest must be 'length' or 'visible', not {longest!r}")
        for name, value in {"margin": margin, "threshold": threshold}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a share of the largest entropy, from 0 to 1, not {value}")
        self.margin, self.threshold, self.learned = margin, threshold, learned
        self.reduction, self.longest = reduction, longest
        self.sums_over_texts = reduction == "released"
        self.threshold_bias = nn.ParameterList()
        self._calls: list[AttentionCall] = []
        self._watcher: Watcher | None = None

    def attach(self, model: nn.Module) -> None:
        if self._watcher is not None and self._watcher.model is model:
            return
        modules = attention_modules(model)[: 1 if self.reduction == "released" else None]
        if len(self.threshold_bias):
            _check_same_heads([len(one) for one in self.threshold_bias], [one for _, one in modules])
            return
        for _, module in modules:
            like = next(module.parameters())
            start = torch.full((head_count(module),), self.threshold, device=like.device)
            self.threshold_bias.append(nn.Parameter(start, requires_grad=self.learned))

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Store queries and keys of each attention call; the rows are computed later, one layer at a time."""
        self.attach(model)
        self._calls.clear()
        if self._watcher is None or self._watcher.model is not model:
            self._watcher = Watcher(model, self._keep)
        with self._watcher.watching():
            yield

    def _keep(self, call: AttentionCall) -> None:
        self._calls.append(call)

    def penalty(self) -> Tensor:
        calls = list(self._calls)
        self._calls.clear()
        if not calls:
            raise ValueError(
                "no attention call was seen since the last penalty: run the model inside watch(model), and "
                "the model itself rather than a form that was compiled earlier"
            )
        if torch.is_grad_enabled() and not any(call.query.requires_grad for call in calls):
            raise ValueError(
                "the attention calls carry no gradient: run the model without torch.no_grad(), and with "
                "gradient checkpointing set use_reentrant=False"
            )
        penalties = [
            checkpoint(
                self._of_call, call.query, call.key, call, use_reentrant=False, preserve_rng_state=False
            )
            for call in calls
        ]
        return self.weight * torch.stack(penalties).mean()

    def _of_call(self, query: Tensor, key: Tensor, call: AttentionCall) -> Tensor:
        """Mean over heads of one call's penalties. The map is recomputed in the backward pass, not stored."""
        with torch.autocast(query.device.type, enabled=False):
            query, key = query.float(), key.float()
            seen = replace(call, query=query, key=key, value=key)
            rows = seen.rows()
            real, largest = _rows_and_maxima(seen, rows, self.longest)
            threshold = self.threshold_bias[0 if self.reduction == "released" else call.index].float()[
                :, None
            ]
            if self.reduction == "released":
                entropy = -(rows * (rows + 1e-9).log()).sum(-1)
                away = entropy - threshold * largest
                return (_outside(away, self.margin * largest) * real).sum((0, 2)).mean()
            count = real.sum(-1).clamp(min=1)
            entropy = (row_entropy(rows) * real).sum(-1) / count
            most = (largest * real).sum(-1) / count
            away = (entropy - threshold[:, 0] * most).mean(0)
            return _outside(away, self.margin * most.mean(0)).mean()


class EigenReg(Regularizer):
    """Shrinks the spread of the eigenvalues of each head's W = W_Q W_K^T and keeps their mean.

    With n = dim of a head, m = tr W / n, v = ||W||_F^2 / n - m^2:

    reading:     ``penalised``: weight * (v + mean_weight * (m - m0)^2), m0 the mean when first attached.
                 ``constrained``: weight * ||W||_F^2 / n with the part of its gradient removed that would move
                 tr W, which is the descent along tr W = constant
    spread:      ``frobenius``: ||W||_F^2, as above. ``trace``: tr W^2, the true second moment of the
                 eigenvalues, which has no lower bound
    count:       ``head``: n = dim of a head. ``model``: n = width of the model, which counts the zero
                 eigenvalues that W always has
    scaled:      whether W includes the 1/sqrt(head dim) of the scores
    """

    def __init__(
        self,
        weight: float = 1e-3,
        *,
        mean_weight: float = 1.0,
        reading: str = "penalised",
        spread: str = "frobenius",
        count: str = "head",
        scaled: bool = False,
    ) -> None:
        super().__init__(weight)
        for name, value, known in (
            ("reading", reading, ("penalised", "constrained")),
            ("spread", spread, ("frobenius", "trace")),
            ("count", count, ("head", "model")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, not {value!r}")
        self.mean_weight, self.reading, self.spread, self.count = mean_weight, reading, spread, count
        self.scaled = scaled
        self._modules_seen: list[nn.Module] = []
        self._models_seen: list[nn.Module] = []

    def attach(self, model: nn.Module) -> None:
        if self._models_seen and self._models_seen[0] is model:
            return
        modules = [module for _, module in attention_modules(model)]
        if self._buffers:
            _check_same_heads([len(one) for one in self.buffers()], modules)
        self._models_seen[:] = [model]
        self._modules_seen[:] = modules
        for index, module in enumerate(modules):
            if f"mean_{index}" not in self._buffers:
                with torch.no_grad():
                    self.register_buffer(f"mean_{index}", self._moments(module)[0].clone())

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Store the model: this penalty depends on its weights only."""
        self.attach(model)
        yield

    def penalty(self) -> Tensor:
        if not self._modules_seen:
            raise ValueError("there is no model to look at: call penalty() after watch(model)")
        penalties = [self._of_module(index, module) for index, module in enumerate(self._modules_seen)]
        return self.weight * torch.stack(penalties).mean()

    def _of_module(self, place: int, module: nn.Module) -> Tensor:
        mean, square, held = self._moments(module)
        if self.reading == "constrained":
            return (square - held).mean()
        away = mean - self.get_buffer(f"mean_{place}")
        return (square - mean**2 + self.mean_weight * away**2).mean()

    def _moments(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """First and second moment of each head's eigenvalues ``[heads]``, and a trace-preserving correction.

        The third has value 0; its gradient is the part of the second moment's that would change the trace.
        """
        query, key = query_key_weights(module)
        with torch.autocast(query.device.type, enabled=False):
            query, key = query.float(), key.float()
            if self.scaled:
                query = query * query.shape[-2] ** -0.5
            number = query.shape[-2] if self.count == "head" else query.shape[-1]
            trace = (query * key).sum((-2, -1))
            square = _second_moment(query, key, self.spread)
            pull = _pull(query.detach(), key.detach())
            held = pull * (trace - trace.detach())
            return trace / number, square / number, held / number


def _check_same_heads(known: list[int], modules: list[nn.Module]) -> None:
    """Raises if a penalty made for layers with so many heads each is given a model of another shape."""
    heads = [head_count(module) for module in modules]
    if heads != known:
        raise ValueError(
            f"this penalty was attached to a model whose layers have {known} heads, and this "
            f"one's have {heads}: make another for it"
        )


PENALTIES: dict[str, type[Regularizer]] = {"entropy": EntropyReg, "eigen": EigenReg}


def regularizer(name: str, **options: Any) -> Regularizer:
    """``entropy`` or ``eigen``, with the options of :class:`EntropyReg` or :class:`EigenReg`.

    Options may be part of the text, as on the command line: ``"entropy,weight=1e-4,reduction=released"``.
    """
    name, *written = [part.strip() for part in name.split(",")]
    if name not in PENALTIES:
        raise ValueError(f"unknown regularizer {name!r}: choose one of {', '.join(PENALTIES)}")
    parameters = inspect.signature(PENALTIES[name]).parameters
    for part in written:
        option, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"cannot read {part!r}: options are written name=value, as in weight=1e-4")
        options[option] = _value(option, value, parameters[option].default) if option in parameters else value
    for option in options:
        if option not in parameters:
            raise ValueError(f"{name} has no option {option!r}: it has {', '.join(parameters)}")
    return PENALTIES[name](**options)


def _value(option: str, text: str, default: object) -> float | bool | str:
    """Parse an option, of the same type as its default."""
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{option} is true or false, not {text!r}")
        return text.lower() == "true"
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{option} is a number, as in {option}={default}, not {text!r}") from None
    return text


def _outside(away: Tensor, margin: Tensor) -> Tensor:
    """Squared distance where it exceeds the margin, else 0."""
    return torch.where(away.abs() > margin, away.square(), 0.0)


def _rows_and_maxima(call: AttentionCall, rows: Tensor, longest: str) -> tuple[Tensor, Tensor]:
    """Which rows are real, and the largest entropy of each: both ``[batch, heads, queries]``."""
    graph, _ = call.graph()
    visible = torch.ones_like(rows, dtype=torch.bool)
    if graph.visible is not None:
        visible = graph.visible.expand_as(rows)
    real = visible.any(-1)
    if graph.senders is not None:
        real = real & graph.senders[..., 0]
    if longest == "visible":
        keys = visible.sum(-1)
    else:
        keys = (visible & real[..., None]).any(-2).sum(-1, keepdim=True).expand_as(real)
    return real, keys.clamp(min=1).log()


def _pull(query: Tensor, key: Tensor) -> Tensor:
    """Derivative of the second moment along the trace, ``[heads]``, from ``[heads, head dim, width]``.

    The trace's gradient is K for Q and Q for K. Its product with the second moment's, over its own square;
    both spreads have the same product.
    """
    along = 2 * ((query @ query.mT + key @ key.mT) * (query @ key.mT)).sum((-2, -1))
    length = (query.square() + key.square()).sum((-2, -1))
    return along / length.clamp(min=torch.finfo(length.dtype).tiny)


def _second_moment(query: Tensor, key: Tensor, spread: str) -> Tensor:
    """||W||_F^2 or tr W^2 of each head from ``[heads, head dim, width]``; W itself is never formed."""
    if spread == "frobenius":
        return ((query @ query.mT) * (key @ key.mT)).sum((-2, -1))
    small = key @ query.mT
    return (small * small.mT).sum((-2, -1))
