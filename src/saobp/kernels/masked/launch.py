"""Masked attention: its operators, tile sizes and launches, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saobp.kernels.call_spec import (
    Block,
    CallNumbers,
    CallSpec,
    CallTensors,
    ceil_div,
    kernel_tensors,
    named_strides,
    strides,
)
from saobp.kernels.library.strength_gradient import strength_gradient
from saobp.kernels.masked import backward, forward, tiles
from saobp.kernels.runtime.custom_op import operator, register_autograd
from saobp.kernels.runtime.launcher import BufferSlice, LaunchSequence, cached, lay_out_buffer

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor strength, Tensor? nodes, Tensor? mask, Tensor? seed"
NUMBERS = "SymInt window, float scale, float dropout, float sign, int receives, bool causal"
INPUT_NAMES = ("q", "k", "v", "strength", "nodes", "mask", "seed")
TENSORS = len(INPUT_NAMES)
SPAN_STEP = 128
"""Keys (or rows) that ``mask_spans`` reads at once."""


class MaskNumbers(NamedTuple):
    """Scalars of a call: a row sees keys less than ``window`` away (0: any), with ``causal`` earlier ones only; the rest as
    in :class:`CallNumbers`."""

    window: int
    scale: float
    dropout: float
    sign: float
    receives: int
    causal: bool


class MaskedCall(NamedTuple):
    """What launches depend on: all of a call but the layout of its tensors. ``mask_shape``: batch and heads of the mask."""

    spec: CallSpec
    window: int
    causal: bool
    mask_shape: tuple[int, int] | None

    @classmethod
    def of(cls, tensors: tuple[Any, ...], numbers: MaskNumbers) -> MaskedCall:
        query, key, value, strength, _, mask, _ = tensors
        window, scale, dropout, sign, receives, causal = numbers
        of_call = CallNumbers(query.shape[2], scale, dropout, sign, receives)
        spec = CallSpec.of(CallTensors(query, key, value, strength), of_call)
        return cls(spec, window, causal, None if mask is None else (mask.shape[0], mask.shape[1]))

    def saved(self, saves: bool = True) -> tuple[dict[str, BufferSlice], int]:
        """Slices of the saved buffer and its bytes: log-sum-exp of rows in two parts, message sums, spans of the mask; if it ``saves``
        for the backward pass, also log normalisers of refined rows in two parts and the rounding error of the output."""
        rows, floats = self.spec.rows_shape, torch.float32
        tables = self.tables
        spans = (0,) if self.mask_shape is None else (*self.mask_shape, self.span_blocks, 2)
        rest = self.spec.states_shape if saves and self.spec.dtype != torch.float32 else (0,)
        belief = (2, *rows) if saves else (0,)
        message_sums = rows if self.spec.receives and not self.causal else (0,)
        return lay_out_buffer("saved", {
            "lse": ((2, *rows), floats), "belief": (belief, floats), "message_sums": (message_sums, floats),
            "past": (tables, floats), "spans": (spans, torch.int32), "key_spans": (spans, torch.int32),
            "rest": (rest, self.spec.dtype),
        })  # fmt: skip

    @property
    def back(self) -> int:
        """How far before its first row a causal block of rows sees, rounded up to whole tiles of keys."""
        keys = common_block(self.spec).keys
        return ceil_div(self.window - 1, keys) * keys

    @property
    def tables(self) -> tuple[int, ...]:
        """Shape of ``past`` and ``later``, ``[lines, blocks of rows, slots]``, a number per causal block of rows and key that it sees:
        linear in length."""
        if not self.causal or not self.spec.receives:
            return (0,)
        rows = common_block(self.spec).rows
        return (self.spec.batch * self.spec.heads, ceil_div(self.spec.length, rows), self.back + rows)

    @property
    def span_blocks(self) -> int:
        """Spans of the mask by rows, and as many by keys, of each head of the mask."""
        return ceil_div(self.spec.length, tiles.SPAN_BLOCK)

    def programs(self, size: int) -> int:
        return ceil_div(self.spec.length, size) * self.spec.batch * self.spec.heads


def block_of(call: MaskedCall, sweep: str) -> Block:
    """Tile of a sweep. Causal sweeps share one, since ``past`` and ``later`` are stored by its blocks of rows."""
    tile = common_block(call.spec)
    if call.causal or call.spec.dtype == torch.float32 or call.spec.dim > 64:
        return tile
    return replace(tile, stages=2 if sweep.endswith("gradient") else 3)


def common_block(spec: CallSpec) -> Block:
    """A tile that suits every sweep; small where registers are scarce."""
    dim = int(spec.dim)
    if spec.dtype == torch.float32 or dim > 128:
        return Block(32, 32, warps=4, stages=1)
    return Block(64, 32 if dim > 64 else 64, warps=4, stages=2)


def plan_forward(call: MaskedCall, tensors: tuple[Any, ...], saves: bool) -> LaunchSequence:
    query, mask = tensors[0], tensors[5]
    slices, _ = call.saved(saves)
    launches = LaunchSequence(query.device, (*INPUT_NAMES, "out", "saved"), slices)
    numbers = _numbers(call, tensors) | named_strides("o", call.spec.states_strides) | {"SAVES": saves}
    if call.mask_shape is not None:
        for name, outer, inner in (("spans", 2, 3), ("key_spans", 3, 2)):
            steps = _broadcast_strides(mask)
            sizes = {
                "m_outer": steps[outer], "m_inner": steps[inner], "mask_heads": call.mask_shape[1],
                "span_blocks": call.span_blocks, "SIZE": tiles.SPAN_BLOCK, "STEP": SPAN_STEP,
            }  # fmt: skip
            count = call.span_blocks * call.mask_shape[0] * call.mask_shape[1]
            launches.add(tiles.mask_spans, count, numbers | sizes, spans=name)
    sweeps = [forward.masked_row_sums, forward.masked_column_messages, forward.masked_output]
    if not call.spec.receives:
        del sweeps[1]
    for sweep in sweeps:
        _add_sweep(launches, call, sweep, numbers, by_rows=sweep is not forward.masked_column_messages)
    return launches


BACKWARD_NAMES = (
    *INPUT_NAMES, "grad", "out", "saved", "dq", "dk", "dv", "strength_grad", "mask_grad", "scratch",
)  # fmt: skip


class BackwardPlan(NamedTuple):
    launches: LaunchSequence
    scratch: int


def plan_backward(
    call: MaskedCall, tensors: tuple[Any, ...], grad: Tensor, out: Tensor, mask_learns: bool = False
) -> BackwardPlan:
    spec, rows = call.spec, (call.spec.rows_shape, torch.float32)
    scratch, size = lay_out_buffer(
        "scratch",
        {"delta": rows, "sums_grad": rows, "gamma_grad": rows, "later": (call.tables, torch.float32)},
    )
    launches = LaunchSequence(tensors[0].device, BACKWARD_NAMES, call.saved()[0] | scratch)
    numbers = _numbers(call, tensors) | strides("g", grad) | named_strides("d", spec.gradient_strides)
    sizes = {
        **strides("o", out), **named_strides("r", spec.states_strides), "blocks": ceil_div(spec.length, 64), "ROWS": 64,
    }  # fmt: skip
    launches.add(backward.row_products, call.programs(64), numbers | sizes)
    _add_sweep(launches, call, backward.masked_value_gradient, numbers, by_rows=False)
    _add_sweep(launches, call, backward.masked_query_gradient, numbers, by_rows=True)
    learns = numbers | {"LEARNS": mask_learns}
    _add_sweep(launches, call, backward.masked_key_gradient, learns, by_rows=False)
    sizes = {"batch": spec.batch, "SIZE": 4096, "num_warps": 16}
    launches.add(strength_gradient, spec.heads, numbers | sizes)
    return BackwardPlan(launches, size)


def _add_sweep(
    launches: LaunchSequence, call: MaskedCall, sweep: Any, numbers: dict[str, Any], *, by_rows: bool
) -> None:
    block = block_of(call, sweep.__name__)
    gridded = block.rows if by_rows else block.keys
    sizes = {
        "blocks": ceil_div(call.spec.length, gridded),
        "ROWS": block.rows,
        "KEYS": block.keys,
        "num_warps": block.warps,
        "num_stages": block.stages,
    }
    launches.add(sweep, call.programs(gridded), numbers | sizes)


def _numbers(call: MaskedCall, tensors: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments common to the sweeps."""
    query, key, value, _, nodes, mask, _ = tensors
    spec = call.spec
    node_steps = (0, 0) if nodes is None else _broadcast_strides(nodes)
    mask_steps = (0, 0, 0, 0) if mask is None else _broadcast_strides(mask)
    spans = (0, 0)
    if call.mask_shape is not None:
        batch, heads = call.mask_shape
        spans = (0 if batch == 1 else heads * call.span_blocks * 2, 0 if heads == 1 else call.span_blocks * 2)
    adds = mask is not None and mask.is_floating_point()
    return {
        **strides("q", query), **strides("k", key), **strides("v", value), **spec.numbers, **spec.constants,
        **spec.drop_numbers, "n_batch": node_steps[0], "n_head": node_steps[1],
        **dict(zip(("m_batch", "m_head", "m_row", "m_key"), mask_steps, strict=True)),
        "s_batch": spans[0], "s_head": spans[1], "window": call.window,
        "lowest_bias": torch.finfo(mask.dtype).min / 2 if adds else 0.0, "low_plane": spec.low_plane, "scale": spec.scale,
        "sign": spec.sign, "RECEIVES": spec.receives, "EXACT": spec.dtype == torch.float32, "DROPS": spec.dropout > 0,
        "MASK": 0 if mask is None else 2 if adds else 1, "NODES": nodes is not None, "WINDOWED": call.window > 0,
        "CAUSAL": call.causal, "back": call.back if call.causal else 0, "slots": call.tables[-1],
    }  # fmt: skip


def _broadcast_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides, 0 where there is one entry for all."""
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


_plans: dict[Any, Any] = {}


def _layout(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if one is None else (one.shape, one.stride(), one.dtype, one.device) for one in tensors)


def _run_forward(saves: bool, *flat: Any) -> tuple[Tensor, Tensor]:
    tensors, numbers = flat[:TENSORS], MaskNumbers(*flat[TENSORS:])
    call = MaskedCall.of(tensors, numbers)
    plan = cached(_plans, ("forward", saves, _layout(tensors), numbers), plan_forward, call, tensors, saves)
    out, saved = _outputs(saves, *flat)
    plan(*kernel_tensors(tensors), out, saved)
    return out, saved


def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    return _run_forward(True, *flat)


def _output(*flat: Any) -> Tensor:
    return _run_forward(False, *flat)[0]


def _fake_forward(*flat: Any) -> tuple[Tensor, Tensor]:
    return _outputs(True, *flat)


def _outputs(saves: bool, *flat: Any) -> tuple[Tensor, Tensor]:
    call, query = MaskedCall.of(flat[:TENSORS], MaskNumbers(*flat[TENSORS:])), flat[0]
    out = query.new_empty_strided(call.spec.states_shape, call.spec.states_strides)
    return out, query.new_empty(call.saved(saves)[1], dtype=torch.uint8)


def _backward(grad: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    tensors, (out, saved), (*numbers, mask_learns) = (
        flat[:TENSORS],
        flat[TENSORS : TENSORS + 2],
        flat[TENSORS + 2 :],
    )
    call = MaskedCall.of(tensors, MaskNumbers(*numbers))
    key = ("backward", _layout((*tensors, grad, out)), *numbers, mask_learns)
    plan: BackwardPlan = cached(_plans, key, plan_backward, call, tensors, grad, out, mask_learns)
    gradients = _fake_backward(grad, *flat)
    scratch = grad.new_empty(plan.scratch, dtype=torch.uint8)
    plan.launches(*kernel_tensors(tensors), grad, out, saved, *gradients, scratch)
    return gradients


def _fake_backward(_grad: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    *numbers, mask_learns = flat[TENSORS + 2 :]
    spec = MaskedCall.of(flat[:TENSORS], MaskNumbers(*numbers)).spec
    query = flat[0]
    states = [query.new_empty_strided(spec.states_shape, spec.gradient_strides) for _ in range(3)]
    maps = (*spec.rows_shape, spec.length) if mask_learns else (0,)
    mask_grad = query.new_zeros(maps, dtype=torch.float32)  # tiles that no row sees are skipped
    return *states, query.new_empty(spec.heads, dtype=torch.float32), mask_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.numbers = inputs[TENSORS:]


def _gradients(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, _, strength, _, mask, *_ = saved
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    mask_learns = ctx.needs_input_grad[INPUT_NAMES.index("mask")]
    dq, dk, dv, learned, d_mask = masked_backward(grad, *saved, *ctx.numbers, mask_learns)
    if key.shape[1] != query.shape[1]:
        dk, dv = (d.unflatten(1, (key.shape[1], -1)).sum(2) for d in (dk, dv))
    d_mask = d_mask.sum_to_size(mask.shape).to(mask.dtype) if mask_learns else None
    return dq, dk, dv, learned.to(strength.dtype), None, d_mask, *[None] * (len(ctx.needs_input_grad) - 7)


masked_forward = operator(
    "masked_attention", f"({INPUTS}, {NUMBERS}) -> (Tensor, Tensor)", _forward, _fake_forward
)
masked_output = operator(
    "masked_attention_inference",
    f"({INPUTS}, {NUMBERS}) -> Tensor",
    _output,
    lambda *flat: _fake_forward(*flat)[0],
)
masked_backward = operator(
    "masked_attention_backward",
    f"(Tensor grad, {INPUTS}, Tensor out, Tensor saved, {NUMBERS}, bool mask_learns) -> ({', '.join(['Tensor'] * 5)})",
    _backward, _fake_backward,
)  # fmt: skip
register_autograd(masked_forward, _gradients, _save)
