"""Strict causal ElemMul in time and memory that grow like those of attention, in plain PyTorch.

Row i is ``O_i = sum_{j <= i} (A_i . A_j) V_j / z_i`` with ``z_i = sum_{j <= i} A_i . A_j``: causal linear attention whose
features are the rows of A. Rows are taken in chunks, with what earlier rows give to each key k in one state,

    S_k = sum_j A_jk [V_j, 1]              over earlier chunks
    z [O, 1] = A S + tril(A A^T) [V, 1]    of a chunk

Backward, with ``G_i = [dO_i, -dO_i . O_i] / z_i``, chunks are taken from the last to the first:

    T_k = sum_j A_jk G_j                   over later chunks
    [dV, .] = A T + tril(A A^T)^T G
    dA = G S^T + [V, 1] T^T + (W + W^T) A  with W = tril(G [V, 1]^T)

and dS = A (dA - E), E = rowsum(A dA), as for any softmax. S is led back by subtracting what each chunk added to it.

Padding is no node: its V and 1 are 0. Two rows that share no key have similarity ``floor``, as in the specification. It
matters to padding rows only, since a real row is similar to itself; here it is added, to all rows.

Precision. ``maps`` is the type of what is as large as a chunk of the map, A and dS: bfloat16 for such states on a GPU, at
least float32 otherwise. Everything narrower is float32 and enters products in two bfloat16 parts: rounded once, G or W alone
gives a sink's dK more than twice eager's error. Rounded weights do not sum to 1 and dA is as large as E, so E comes
from the same rounded numbers, and is subtracted within the product that makes dA.
In float32 S is summed in float64, because subtracting loses the digits by which S shrinks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saobp.propagation.beliefs import without_autocast
from saobp.propagation.reference import share_heads

ROWS, GPU_ROWS = 64, 128
"""Rows of a chunk on a CPU and on a GPU. Longer chunks read and write the states less often and multiply more within themselves."""

ALIGNMENT = 8
"""Tensor cores take half types in sizes that are multiples of this."""


class Forward(NamedTuple):
    """Output ``[batch, heads, length, dim]``, and for the backward pass, both ``[lines, length, width]``:

    found: O and 1 / z of each row; 0 where it sees no key
    sums:  S of each key after the last row
    """

    output: Tensor
    found: Tensor
    sums: Tensor


class CausalMap:
    """A, whose rows are computed some at a time, and the states and types of a call. A *line* is a head of a sequence."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> None:
        """query ``[batch, heads, length, dim]``, key and value ``[batch, key_heads, length, dim]``; mask is bool
        ``[batch, length]``, True for real tokens."""
        self.batch, self.heads, self.length, self.dim = query.shape
        self.key_heads, self.value_dim = key.shape[1], value.shape[-1]
        self.arithmetic = torch.promote_types(query.dtype, torch.float32)
        self.maps = map_type(query)
        self.mask, self.scale = mask, scale
        self.query = query.to(self.maps).reshape(self.batch * self.key_heads, -1, self.length, self.dim)
        self.key = key.to(self.maps).reshape(-1, self.length, self.dim)
        self.value = value
        self.sees_none = None if mask is None else mask.cumsum(1) == 0
        self.step = min(self.length, GPU_ROWS if query.is_cuda else ROWS)
        self.later = torch.ones(self.step, self.step, dtype=torch.bool, device=query.device).triu_(1)
        self.state_shape = state_shape(query, value)

    @property
    def rounds(self) -> bool:
        """Whether A is rounded to a half type."""
        return self.maps != self.arithmetic

    @property
    def floor(self) -> float:
        """Smallest similarity."""
        precision = torch.finfo(self.arithmetic)
        return precision.tiny / precision.eps

    def chunks(self) -> list[tuple[int, int]]:
        """First row of each chunk, and the one after its last."""
        return [(start, min(start + self.step, self.length)) for start in range(0, self.length, self.step)]

    def wide(self, columns: Tensor, last: Tensor | float) -> Tensor:
        """``[lines, length, value_dim]`` with one column more and zeros up to the width of states, in the type of arithmetic."""
        wide = columns.new_zeros(*columns.shape[:2], self.state_shape[-1], dtype=self.arithmetic)
        wide[..., : self.value_dim] = columns
        wide[..., self.value_dim : self.value_dim + 1] = last
        return wide

    def values(self) -> Tensor:
        """[V, 1] of each row, 0 for padding: ``[lines, length, width]`` in the type of maps, in which they are exact."""
        value = share_heads(self.value, self.heads).reshape(-1, self.length, self.value_dim)
        return self.without_padding(self.wide(value, 1.0)).to(self.maps)

    def without_padding(self, states: Tensor) -> Tensor:
        """Sets those of padding to 0, in place; ``[lines, length, columns]``."""
        if self.mask is not None:
            states.view(self.batch, self.heads, *states.shape[1:]).masked_fill_(
                ~self.mask[:, None, :, None], 0.0
            )
        return states

    def queries(self, start: int, stop: int) -> Tensor:
        """``[batch * key_heads, rows, dim]``, those of all heads that share a key head."""
        return self.query[:, :, start:stop].flatten(1, 2)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of A with the keys up to the last of them, ``[lines, rows, stop]``.

        Scores are rounded as eager attention rounds them. A row that sees no key, which only padding can be, looks at
        itself: nothing is made of it.
        """
        scores = torch.bmm(self.queries(start, stop), self.key[:, :stop].mT).mul_(self.scale)
        scores = scores.view(self.batch, self.heads, stop - start, stop)
        last = scores[..., start:]
        last.masked_fill_(self.later[: stop - start, : stop - start], float("-inf"))
        if self.mask is not None and self.sees_none is not None:
            scores.masked_fill_(~self.mask[:, None, None, :stop], float("-inf"))
            last.diagonal(dim1=-2, dim2=-1).masked_fill_(self.sees_none[:, None, start:stop], 0.0)
        return torch.softmax(scores, -1).flatten(0, 1)


def map_type(query: Tensor) -> torch.dtype:
    """The type of A for these queries: bfloat16 only where products in it are fast."""
    if query.dtype == torch.bfloat16 and query.is_cuda:
        return query.dtype
    return torch.promote_types(query.dtype, torch.float32)


def sum_type(states: torch.dtype) -> torch.dtype:
    """The type of S: it loses digits where it is led back, which float32 has to spare for half types only."""
    return torch.float64 if states == torch.float32 else torch.promote_types(states, torch.float32)


def state_shape(query: Tensor, value: Tensor) -> tuple[int, int, int]:
    """``[lines, length, width]``: of [V, 1] and what has a column for each of its columns."""
    batch, heads, length, _ = query.shape
    return batch * heads, length, -(-(value.shape[-1] + 1) // ALIGNMENT) * ALIGNMENT


def causal_elemmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Forward:
    """Arguments as of :class:`CausalMap`."""
    with without_autocast(query.device.type):
        return _forward(CausalMap(query, key, value, mask, scale), query.dtype)


def causal_elemmul_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, found: Tensor, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value from that of the output; ``found`` and ``sums`` are those of :class:`Forward`."""
    with without_autocast(query.device.type):
        return _backward(CausalMap(query, key, value, mask, scale), grad, found, sums.clone(), query.dtype)


def _forward(a: CausalMap, dtype: torch.dtype) -> Forward:
    values = a.values()
    found = values.new_empty(values.shape, dtype=a.arithmetic)
    sums = values.new_zeros(values.shape, dtype=sum_type(dtype))
    for start, stop in a.chunks():
        rows, here = a.rows(start, stop), values[:, start:stop]
        alike = _product(rows, rows.mT).tril_()
        found[:, start:stop] = torch.bmm(alike, here.to(a.arithmetic))
        if start:
            found[:, start:stop] += _product_in_parts(
                rows[..., :start], _parts(sums[:, :start].to(a.arithmetic), a.maps)
            )
        sums[:, :stop] += _product(rows.mT, here)
    if a.mask is not None:
        found += a.floor * values.to(a.arithmetic).cumsum(1)
    total = found[..., a.value_dim : a.value_dim + 1]
    inverse = total.reciprocal().masked_fill_(total == 0, 0.0)
    found *= inverse
    total.copy_(inverse)
    output = found.new_empty(a.batch, a.length, a.heads, a.value_dim, dtype=dtype).transpose(1, 2)
    output.copy_(found[..., : a.value_dim].view(output.shape))
    return Forward(output, found, sums)


def _backward(
    a: CausalMap, grad: Tensor, found: Tensor, sums: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrites ``sums``."""
    values, pulls = a.values(), _pulls(a, grad, found)
    later, d_value = torch.zeros_like(pulls), torch.empty_like(pulls)
    d_query = a.query.new_empty(a.query.shape, dtype=dtype)
    d_key = a.key.new_zeros(a.key.shape, dtype=a.arithmetic)
    for start, stop in reversed(a.chunks()):
        rows, here, pull = a.rows(start, stop), values[:, start:stop], pulls[:, start:stop]
        sums[:, :stop] -= _product(rows.mT, here)
        sums[:, start:stop] = (
            0.0  # of no row before this chunk; not quite so where a product differs from the forward pass's
        )
        alike = _product(rows, rows.mT)
        pairs = torch.bmm(pull, here.to(a.arithmetic).mT).tril_()
        pairs += pairs.mT.clone()
        earlier, after = (_parts(x[:, :stop].to(a.arithmetic), a.maps) for x in (sums, later))
        pull_parts = _parts(pull, a.maps)
        reached = _product_in_parts(rows, after)
        d_value[:, start:stop] = reached + torch.bmm(alike.tril().mT, pull)
        left = torch.cat([*pull_parts * len(earlier), *[here] * len(after)], -1)
        right = torch.cat([one for one in earlier for _ in pull_parts] + after, -1)
        d_rows = _product(left, right.mT)
        later[:, :stop] += _product_in_parts(rows.mT, pull_parts)
        if a.rounds:
            pair_parts = _parts(pairs, a.maps)
            share = (_product_in_parts(rows, earlier) * _joined(pull_parts)).sum(-1, keepdim=True)
            share += (reached * here).sum(-1, keepdim=True)
            share += (_joined(pair_parts) * alike).sum(-1, keepdim=True)
            share /= rows.sum(-1, keepdim=True, dtype=a.arithmetic)
            d_rows += _product_and_shift(pair_parts, rows, share)
            d_scores = torch.mul(d_rows, rows, out=rows)
        else:
            d_rows.baddbmm_(pairs, rows)
            d_scores = torch._softmax_backward_data(d_rows, rows, -1, rows.dtype)
        d_scores = d_scores.view(len(a.key), -1, stop)
        d_queries = _product(d_scores, a.key[:, :stop]).mul_(a.scale)
        d_query[:, :, start:stop] = d_queries.view_as(d_query[:, :, start:stop])
        d_key[:, :stop] += _product(d_scores.mT, a.queries(start, stop))
    d_value = d_value[..., : a.value_dim]
    if a.mask is not None:
        d_value = a.without_padding(d_value + a.floor * pulls.flip(1).cumsum(1).flip(1)[..., : a.value_dim])
    d_value = d_value.unflatten(0, (a.batch, a.key_heads, -1)).sum(2)
    d_key = d_key.mul_(a.scale).view(a.batch, a.key_heads, a.length, a.dim)
    return d_query.view(a.batch, a.heads, a.length, a.dim), d_key.to(dtype), d_value.to(dtype)


def _pulls(a: CausalMap, grad: Tensor, found: Tensor) -> Tensor:
    """G of each row, ``[lines, length, width]``."""
    grad = grad.reshape(-1, a.length, a.value_dim).to(a.arithmetic)
    delta = (grad * found[..., : a.value_dim]).sum(-1, keepdim=True)
    return a.wide(grad, -delta).mul_(found[..., a.value_dim : a.value_dim + 1])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two batches of matrices, in at least float32."""
    if left.dtype.itemsize > 2:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """``x`` as one or two tensors of this type that add up to it."""
    first = x.to(dtype)
    return [first] if dtype == x.dtype else [first, (x - first).to(dtype)]


def _joined(parts: list[Tensor]) -> Tensor:
    """The sum of two parts, in float32."""
    return parts[0].float() + parts[1]


def _product_in_parts(left: Tensor, parts: list[Tensor]) -> Tensor:
    """``left @ sum(parts)``."""
    product = _product(left, torch.cat(parts, -1))
    return product if len(parts) == 1 else product.unflatten(-1, (2, -1)).sum(-2)


def _product_and_shift(parts: list[Tensor], rows: Tensor, shift: Tensor) -> Tensor:
    """``sum(parts) @ rows - shift``, in one product; shift ``[lines, rows, 1]`` float32."""
    shift_parts = _parts(-shift, rows.dtype)
    shift_parts += _parts(-shift - _joined(shift_parts), rows.dtype)
    padding = rows.new_zeros(*shift.shape[:2], ALIGNMENT - len(shift_parts))
    ones = rows.new_ones(len(rows), ALIGNMENT, rows.shape[-1])
    return _product(torch.cat([*parts, *shift_parts, padding], -1), torch.cat([rows, rows, ones], 1))
