"""Intercept every attention call of a model, for any attention implementation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from saobp.functional import build_graph
from saobp.propagation.graph import FactorGraph
from saobp.propagation.reference import reference_attention
from saobp.refinement import Refinement
from saobp.transformers.apply import class_names, other_attention, reachable_attention, through_registry
from saobp.transformers.attention_function import (
    apply_variants,
    is_recomputation,
    reject,
    resolve_refinement,
    rows_wanted,
    sink_of,
)
from saobp.transformers.cache import MessageCacheLayer
from saobp.transformers.layer_refinement import (
    IMPLEMENTATION,
    get_layer_refinement,
    is_causal_call,
    reject_cross_attention,
    variants_of,
)
from saobp.transformers.masks import graph_of, read_mask
from saobp.transformers.packed_sequences import (
    are_sequences,
    same_sequence,
    sequence_numbers,
    with_sequences,
)
from saobp.transformers.position_bias import biased_mask
from saobp.transformers.routes import RefinedCall, Route, select_route

PLAIN = Refinement("none")
_ARGUMENTS = ("query", "key", "value", "attention_mask", "dropout", "scaling")


@dataclass(frozen=True)
class AttentionCall:
    """One call of one attention module, just before it is computed.

    name, index:         the attention module's name in the model, and its index among them
    query:               ``[batch, heads, queries, dim]``; key and value may have fewer heads
    mask, options:       as passed to the implementation; ``graph`` reads the mask, which includes a bias of
                         positions
    sequences:           sequence number of each token, ``[batch, keys]``, if packed
    """

    name: str
    index: int
    module: nn.Module
    implementation: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scaling: float
    dropout: float
    is_causal: bool
    sliding_window: int | None
    options: dict[str, Any] = field(default_factory=dict)
    sequences: Tensor | None = None

    @property
    def is_refined(self) -> bool:
        return self.implementation == IMPLEMENTATION

    @property
    def knows_window(self) -> bool:
        """Whether the implementation applies the sliding window itself; others get it in their mask."""
        return "flash" in self.implementation or self.is_refined

    @property
    def window(self) -> int | None:
        """The sliding window, where the implementation applies it and it hides a key."""
        keys, window = self.key.shape[-2], self.sliding_window
        return window if self.knows_window and window is not None and window < keys else None

    def refinement(self) -> tuple[Refinement, Tensor]:
        """How the rows are refined, with their strengths; factor ``none`` for other models."""
        refinement, strength, _ = self._refinement()
        return refinement, strength

    def graph(self) -> tuple[FactorGraph, Tensor | None]:
        """The factor graph, in which padding rows send no message, and the mask's bias on scores."""
        if self.is_refined:
            return graph_of(
                self._full_mask(),
                self.query,
                self.key.shape[-2],
                self._refinement()[0],
                self.is_causal,
                self.sliding_window,
            )
        return self._plain_graph()

    def rows(self) -> Tensor:
        """The attention rows ``[batch, heads, queries, keys]`` before dropout, refined if the model's are."""
        reject_cross_attention(self.module)
        reject(self.module, self.options)
        refinement, strength, messages = self._refinement()
        graph, bias = self.graph()
        return reference_attention(
            self.query,
            self.key,
            self.value,
            refinement,
            strength,
            graph,
            bias=bias,
            scale=self.scaling,
            past=None if messages is None else messages.past_of(self.key.shape[-2]),
        ).rows

    def route(self) -> Route:
        """What computes a refined call."""
        refinement, strength, messages = self._refinement()
        return select_route(
            RefinedCall(
                self.query, self.key, self.value, refinement, strength, self._full_mask(),
                self.sliding_window, messages if self.is_causal else None,
                sink_of(variants_of(get_layer_refinement(self.module))), self.is_causal,
                rows_wanted(self.options), self.dropout, self.scaling,
            )
        )  # fmt: skip

    def _full_mask(self) -> Any:
        """The mask that also separates packed sequences."""
        return self.mask if self.sequences is None else with_sequences(self.mask, self.sequences)

    def _refinement(self) -> tuple[Refinement, Tensor, MessageCacheLayer | None]:
        if self.is_refined:
            return resolve_refinement(
                self.module, get_layer_refinement(self.module), self.query, self.key.shape[-2]
            )
        return PLAIN, torch.zeros(self.query.shape[1], device=self.query.device), None

    def _plain_graph(self) -> tuple[FactorGraph, Tensor | None]:
        """Read the mask of eager, sdpa or flash attention, for which None means different things."""
        queries, keys, device = self.query.shape[-2], self.key.shape[-2], self.query.device
        is_short = self.mask is None or (isinstance(self.mask, Tensor) and self.mask.ndim != 4)
        if "flash" in self.implementation and is_short:
            padding = None if self.mask is None else self.mask[:, -keys:].bool()
            seen = None if self.sequences is None else same_sequence(self.sequences)
            graph = build_graph(
                queries, keys, PLAIN, padding, self.is_causal, device, seen=seen, window=self.sliding_window
            )
            return graph, None
        if self.mask is not None:
            return read_mask(self.mask, queries, keys, causal=self.is_causal)
        hides = self.implementation == "sdpa" and self.is_causal and queries > 1
        visible = _causal_mask(self.query, self.key) if hides else None
        return FactorGraph(visible, causal=self.is_causal), None


Callback = Callable[[AttentionCall], object]


class Watcher:
    """Calls ``callback`` with every attention call of ``model`` made inside :meth:`watching`.

    Create it once per model and reuse it: entering is then free, and a step compiled inside, callback
    included, is not recompiled, since the compiler's guards see the same objects. ``left_out`` names the
    attention modules without the registry, whose calls are not seen.
    """

    def __init__(self, model: nn.Module, callback: Callback) -> None:
        self.model, self.callback = model, callback
        modules = reachable_attention(model)
        self.places = {module: (name, index) for index, (name, module) in enumerate(modules)}
        others = other_attention(model)
        self.left_out = {name for name, _ in others}
        if others:
            warnings.warn(
                f"{type(model).__name__} computes part of its attention without Transformers' attention "
                f"registry ({class_names(others)}): that part is left out",
                stacklevel=4,
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        with through_registry(self.model):
            self._check()
            _captures.append(self)
            _install()
            try:
                yield
            finally:
                _captures.remove(self)
                _uninstall()

    def _check(self) -> None:
        for module in self.places:
            config: Any = module.config
            if getattr(module, "reorder_and_upcast_attn", False) and config._attn_implementation == "eager":
                raise ValueError(
                    f"{type(module).__name__} with reorder_and_upcast_attn computes eager attention on a "
                    "path of its own, which cannot be watched: set it to False or use another attention "
                    "implementation"
                )


@contextmanager
def watch(model: nn.Module, callback: Callback) -> Iterator[None]:
    """Call ``callback`` with every attention call of ``model``, for any attention implementation.

    (:func:`saobp.watch` measures heads.) The recomputation of gradient checkpointing is not reported. Watch
    the model itself, not its compiled form.
    """
    with Watcher(model, callback).watching():
        yield


@contextmanager
def record_attention(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the attention rows ``[batch, heads, queries, keys]`` of every call, by attention module name.

    Works for models that ignore ``output_attentions`` and for implementations that never form the rows.
    A module that serves several layers, as in ALBERT, lists them in order.
    """
    recorded: dict[str, list[Tensor]] = {name: [] for name, _ in reachable_attention(model)}

    def record(call: AttentionCall) -> None:
        with torch.no_grad():
            recorded[call.name].append(call.rows())

    with watch(model, record):
        yield recorded


_captures: list[Watcher] = []
_original: list[Callable] = []


def _install() -> None:
    """Make the registry return functions that report their calls, while any watcher is active."""
    if not _original:
        _original.append(AttentionInterface.get_interface)
        AttentionInterface.get_interface = _observed_interface  # type: ignore[method-assign]


def _uninstall() -> None:
    if not _captures:
        AttentionInterface.get_interface = _original.pop()  # type: ignore[method-assign]


def _observed_interface(self: AttentionInterface, attn_implementation: str, default: Callable) -> Callable:
    function = _original[0](self, attn_implementation, default)

    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_recomputation():
            _report(module, attn_implementation, dict(zip(_ARGUMENTS, args, strict=False)) | kwargs)
        return function(module, *args, **kwargs)

    return observed


def _report(module: nn.Module, implementation: str, arguments: dict[str, Any]) -> None:
    options = {name: value for name, value in arguments.items() if name not in _ARGUMENTS}
    states = arguments["query"], arguments["key"], arguments["value"]
    if implementation == IMPLEMENTATION:
        states = apply_variants(module, *states)
    query, key, value = states
    mask, sequences, lengths = arguments.get("attention_mask"), None, options.get("cu_seq_lens_q")
    if implementation == "flex_attention" and mask is not None and not isinstance(mask, Tensor):
        mask = _as_tensor(mask, query, key)
    if implementation == IMPLEMENTATION and are_sequences(mask):
        mask, sequences = None, mask
    elif lengths is not None and (implementation == IMPLEMENTATION or "flash" in implementation):
        sequences = sequence_numbers(lengths, query, key.shape[-2])
    scaling = arguments.get("scaling")
    is_causal = is_causal_call(module, options.pop("is_causal", None))
    window = options.pop("sliding_window", None)
    if "flash" not in implementation and (bias := options.pop("position_bias", None)) is not None:
        if mask is None and implementation == "sdpa" and is_causal and query.shape[-2] > 1:
            mask = _causal_mask(query, key)
        with torch.no_grad():
            mask = biased_mask(mask, bias)
    for capture in tuple(_captures):
        if module not in capture.places:
            continue
        name, index = capture.places[module]
        capture.callback(
            AttentionCall(
                name=name,
                index=index,
                module=module,
                implementation=implementation,
                query=query,
                key=key,
                value=value,
                mask=mask,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                dropout=arguments.get("dropout", 0.0),
                is_causal=is_causal,
                sliding_window=window,
                options=options,
                sequences=sequences,
            )
        )


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """What sdpa hides of causal attention if it gets no mask: bool ``[1, 1, queries, keys]``."""
    lengths = query.shape[-2], key.shape[-2]
    return torch.ones(1, 1, *lengths, dtype=torch.bool, device=query.device).tril()


_dense: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def _as_tensor(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Flex attention's BlockMask as bool ``[batch, 1, queries, keys]``, once for all layers that share it."""
    from torch.nn.attention.flex_attention import create_mask

    if mask not in _dense:
        lengths = query.shape[-2], key.shape[-2]
        _dense[mask] = create_mask(mask.mask_mod, query.shape[0], 1, *lengths, query.device)
    return _dense[mask]
