"""Which path a call of attention takes, and why, without computing it."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from saobp.arguments import BoundedStrength
from saobp.functional import attention, checked_call
from saobp.kernels.call_spec import CallSpec, CallTensors
from saobp.kernels.calls import Path
from saobp.kernels.dispatch import numbers_of, select

if TYPE_CHECKING:
    from saobp.transformers.capture import AttentionCall


class LayerPath(NamedTuple):
    """The path of one attention call of a model; None if :func:`saobp.attention` does not compute it."""

    name: str
    path: Path | None
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.path or self.reason}"


class ModelPaths(tuple[LayerPath, ...]):
    """The attention calls of one forward pass, in order; printed one to a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def explain(first: Tensor | nn.Module, *others: Any, **options: Any) -> Path | ModelPaths:
    """``print(saobp.explain(query, key, value, refinement, ...))`` says which path that call takes, and why.

    Arguments are those of :func:`saobp.attention`. Gradients and autocast count as they would for the
    call itself; nothing is computed.

    ``print(saobp.explain(model, inputs))`` runs a Transformers model on its inputs, a mapping or a tensor of
    token ids, and says the same of every attention layer.
    """
    if isinstance(first, nn.Module):
        if len(others) + len(options) != 1 or not set(options) <= {"inputs"}:
            raise TypeError(
                "a model's paths depend on its inputs: saobp.explain(model, inputs), one mapping or tensor"
            )
        return explain_model(first, *others, **options)
    if not isinstance(first, Tensor):
        what = "what saobp.attention takes, beginning with a query, or a model and its inputs"
        raise TypeError(f"explain takes {what}, not {first!r}")
    try:
        signature(attention).bind(first, *others, **options)
    except TypeError as problem:
        raise TypeError(f"explain takes the arguments of saobp.attention: {problem}") from None
    return explain_call(first, *others, **options)


def explain_model(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> ModelPaths:
    """The path of each attention call in one forward pass of a model, in its mode and under its gradients."""
    from saobp.transformers.capture import watch

    if not isinstance(inputs, Tensor | Mapping):
        raise TypeError(
            f"a model's inputs are a mapping or a tensor of token ids, not {type(inputs).__name__}"
        )
    paths: list[LayerPath] = []
    with watch(model, lambda call: paths.append(_layer_path(call))):
        model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    return ModelPaths(paths)


def _layer_path(call: AttentionCall) -> LayerPath:
    if not call.is_refined:
        return LayerPath(call.name, None, f"{call.implementation} attention: its rows are not refined")
    route = call.route()
    if route.name == "step":
        keys = call.key.shape[-2]
        return LayerPath(
            call.name, None, f"fused decoding kernels: one row against the {keys} keys of a cache"
        )
    if route.name == "reference":
        return LayerPath(call.name, None, f"reference path with the whole map: because {route.reason}")
    if route.path is not None:
        return LayerPath(call.name, route.path, route.path.reason)
    refinement, strength = call.refinement()
    path = explain_call(
        call.query, call.key, call.value, refinement, attention_mask=call.mask, is_causal=call.is_causal,
        dropout_p=call.dropout, scale=call.scaling, strength=BoundedStrength(strength, refinement.strongest),
        sliding_window=call.sliding_window if call.sequences is None else None,
    )  # fmt: skip
    packed = "within each packed sequence, " if call.sequences is not None else ""
    return LayerPath(call.name, path, f"{packed}{path.reason}")


def explain_call(first: Tensor, *others: Any, **options: Any) -> Path:
    """The path of a call of :func:`saobp.attention` with these arguments, and why."""
    checked = checked_call(first, *others, **options)
    call, states = checked.call, (checked.query, checked.key, checked.value)
    path = select(call)
    if checked.seen is not None:
        checked.graph()  # raises for a mask that the call itself would refuse
    if path.family is None or path.family == "masked":
        return path
    from saobp.kernels.runtime.launcher import kernels_for

    strongest = None if checked.strength.requires_grad else call.strongest
    numbers = numbers_of(call.refinement, call.query[2], call.query[3], call.scale, call.dropout_p, strongest)
    spec = CallSpec.of(CallTensors(*states, checked.strength, checked.padding_mask), numbers)
    return path._replace(kernels=kernels_for(path.family, spec, *states))
