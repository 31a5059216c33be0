"""One decoding step of a layer: refined attention against a cache, over Transformers' SDPA attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention

from saobp.benchmarking.table import BenchmarkTable, Cell, milliseconds, ratio, spread
from saobp.refinement import Refinement
from saobp.runs.machine import machine
from saobp.timing import Call, Result, clock_of, in_turn
from saobp.transformers.attention_function import saobp_attention
from saobp.transformers.cache import MessageDynamicLayer
from saobp.transformers.layer_refinement import SUBMODULE, LayerRefinement, get_layer_refinement


class Shape(NamedTuple):
    """Attention of one layer: that of Llama 3 with 8 billion parameters."""

    heads: int = 32
    key_heads: int = 8
    dim: int = 128


BATCHES, KEYS, LLAMA = (1, 32), 8192, Shape()
VERSIONS = {"fixed": "high:0.2", "learned": "high,strength=learned"}
PARTS = ("attention", "attention and cache update")


class Step(NamedTuple):
    """A token and the cache after it, which has its key and value last.

    query ``[batch, heads, 1, dim]``, key and value ``[batch, key_heads, 1, dim]``: of the token
    keys and values ``[batch, key_heads, keys, dim]``: of the cache
    totals ``[1, batch, heads, keys]``: sums of log messages; mask: bool ``[batch, 1, 1, keys]``
    """

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    totals: Tensor
    mask: Tensor


def decoding_speed(
    *,
    device: str = "cuda",
    batches: Sequence[int] = BATCHES,
    keys: int = KEYS,
    shape: Shape = LLAMA,
    turns: int,
    budget: float,
    notify: Callable[[str], None] = print,
    save: Callable[[BenchmarkTable], object] = lambda _: None,
) -> BenchmarkTable:
    """One row for each batch size, part of the step, and way to launch."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    title = f"A decoding step against {keys} keys, {dtype}, Llama's shapes {tuple(shape)}"
    table = BenchmarkTable("decoding", title, machine(device))
    table.notes.append(
        f"Milliseconds of one layer, medians of {turns} turns in which every version runs once; heads, key "
        "heads and head size are in the title. 'sdpa' is Transformers' own attention function, 'fixed' "
        "`high` with strength 0.2, 'learned' strengths from 0.05 to 4. The cache is a DynamicCache, whose "
        "update copies all keys and values. 'again' is sdpa timed a second time, over the first."
    )
    for batch in batches:
        step = make_step(batch, keys, shape, dtype, device)
        for part in PARTS:
            calls = {name: step_call(name, step, shape, part) for name in ("sdpa", *VERSIONS)}
            calls["again"] = calls["sdpa"]
            for replayed in (False, True) if device == "cuda" else (False,):
                notify(f"batch {batch}, {part}, {'CUDA graph' if replayed else 'launched from Python'} ...")
                results = in_turn(
                    calls, turns=turns, budget=budget, clock=clock_of(device), replayed=replayed
                )
                table.rows.append(_row(batch, part, replayed, results))
                save(table)
    return table


def _row(batch: int, part: str, replayed: bool, found: dict[str, Result]) -> dict[str, Cell]:
    sdpa = found.get("sdpa")
    cells: dict[str, Cell] = {"batch": batch, "part": part, "CUDA graph": "yes" if replayed else "no"}
    cells |= {name: milliseconds(found.get(name)) for name in ("sdpa", *VERSIONS)}
    cells |= {f"{name} / sdpa": ratio(found.get(name), sdpa) for name in VERSIONS}
    return cells | {"spread %": spread(sdpa), "again": ratio(found.get("again"), sdpa)}


def make_step(batch: int, keys: int, shape: Shape, dtype: torch.dtype, device: str) -> Step:
    """Random states and messages of a step after which the cache has ``keys`` keys."""
    random = torch.Generator(device).manual_seed(0)

    def make(heads: int, tokens: int) -> Tensor:
        return torch.randn(batch, heads, tokens, shape.dim, generator=random, device=device, dtype=dtype)

    query = make(shape.heads, 1)
    keys_after, values_after = make(shape.key_heads, keys), make(shape.key_heads, keys)
    totals = -torch.rand(1, batch, shape.heads, keys, generator=random, device=device)
    mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=device)
    new = keys_after[:, :, -1:], values_after[:, :, -1:]
    return Step(query, *new, keys_after, values_after, totals, mask)


def step_call(name: str, step: Step, shape: Shape, part: str) -> Call:
    """A step of a version: attention alone, or with the cache's update; calls first restore the cache."""
    updates = part == PARTS[1]
    module = _layer(name, step, shape)
    layer: Any = DynamicLayer() if name == "sdpa" else MessageDynamicLayer()
    layer.lazy_initialization(step.key, step.value)
    past = step.keys.shape[2] - 1
    old_keys, old_values = (cached[:, :, :past].contiguous() for cached in (step.keys, step.values))
    old_totals = step.totals[..., :past]

    def call() -> object:
        with torch.no_grad():
            keys, values = step.keys, step.values
            if updates:
                layer.keys, layer.values = old_keys, old_values
            if name != "sdpa":
                layer.totals, layer.stale = old_totals, False
            if updates:
                keys, values = layer.update(step.key, step.value)
            elif name != "sdpa":
                layer.keys = step.keys
                layer._align(past, 1, past + 1)
                layer.stale = True  # as update leaves it
            if name == "sdpa":
                return sdpa_attention_forward(module, step.query, keys, values, None, scaling=module.scaling)
            get_layer_refinement(module).call.messages = layer  # type: ignore[union-attr]
            return saobp_attention(module, step.query, keys, values, step.mask, scaling=module.scaling)

    return call


def _layer(name: str, step: Step, shape: Shape) -> LlamaAttention:
    config = LlamaConfig(
        hidden_size=shape.heads,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.dim,
    )
    module = LlamaAttention(config, layer_idx=0).to(step.query.device).eval()
    if name != "sdpa":
        refinement = Refinement.parse(VERSIONS[name])
        layer_refinement = LayerRefinement(
            refinement, 0, 1, shape.heads, shape.heads * shape.dim, shape.dim, step.totals
        )
        if refinement.is_learned:
            layer_refinement.strength_bias.data.copy_(torch.linspace(0.05, 4.0, shape.heads))
        module.add_module(SUBMODULE, layer_refinement)
    return module
