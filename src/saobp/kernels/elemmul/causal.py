"""Strict causal ElemMul in time and memory that grow like those of attention, in plain PyTorch.

Row i is ``O_i = sum_{j <= i} (A_i . A_j) V_j / z_i`` with ``z_i = sum_{j <= i} A_i . A_j``: causal linear attention whose
features are the rows of A. Rows are taken in chunks, with what earlier rows give to each key k in one state,

    S_k = sum_j A_jk [V_j, 1]              over earlier chunks
    z [O, 1] = A S + tril(A A^T) [V, 1]    of a chunk

Backward, with ``G_i = [dO_i, -dO_i . O_i] / z_i``, chunks are taken from the last to the first:

    T_k = sum_j A_jk G_j                   over later chunks
    [dV, .] = A T + tril(A A^T)^T G
    dA = G S^T + [V, 1] T^T + (W + W^T) A  with W = tril(G [V, 1]^T)

and dS = A (dA - E), E = rowsum(A dA), as for any softmax. S is led back by subtracting what each chunk added to it; O and z
are computed again.

Padding is no node: its V and 1 are 0. Two rows that share no key have similarity ``floor``, as in the specification. It
matters to padding rows only, since a real row is similar to itself; here it is added, to all rows.

Precision. For bfloat16 on a GPU ``maps``, the type of A in products, is bfloat16 in the forward pass, where S is summed up and
where it is led back, and so is dS where it meets queries and keys, as in eager attention. All other products are float32:
rounded, any of G, W and A A^T alone makes a sink's dK more than twice as wrong as eager's. Other types are at least float32
throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saobp.propagation.beliefs import without_autocast
from saobp.propagation.reference import share_heads

ROWS, GPU_ROWS = 64, 128
"""Rows of a chunk on a CPU and on a GPU. Longer chunks read and write the states less often and multiply more within themselves."""

ALIGNMENT = 8
"""Tensor cores take half types in sizes that are multiples of this."""


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
    def floor(self) -> float:
        """Smallest similarity."""
        precision = torch.finfo(self.arithmetic)
        return precision.tiny / precision.eps

    def chunks(self) -> list[tuple[int, int]]:
        """First row of each chunk, and the one after its last."""
        return [(start, min(start + self.step, self.length)) for start in range(0, self.length, self.step)]

    def wide(self, columns: Tensor, last: float) -> Tensor:
        """``[lines, length, value_dim]`` with one column more and zeros up to the width of states, in the type of arithmetic."""
        wide = columns.new_zeros(self.state_shape, dtype=self.arithmetic)
        wide[..., : self.value_dim] = columns
        wide[..., self.value_dim] = last
        return wide

    def values(self) -> Tensor:
        """[V, 1] of each row, 0 for padding: ``[lines, length, width]`` in the type of arithmetic."""
        value = share_heads(self.value, self.heads).reshape(-1, self.length, self.value_dim)
        return self.without_padding(self.wide(value, 1.0))

    def floors(self, values: Tensor) -> Tensor | None:
        """What ``floor`` adds to z [O, 1] of each row; None without padding, where it is nothing."""
        return None if self.mask is None else self.floor * values.cumsum(1)

    def inverse(self, found: Tensor) -> Tensor:
        """1 / z ``[lines, rows, 1]`` of z [O, 1]; 0 for rows that see no key."""
        total = found[..., self.value_dim : self.value_dim + 1]
        return total.reciprocal().masked_fill_(total == 0, 0.0)

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

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
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
        return torch.softmax(scores, -1, dtype=dtype).flatten(0, 1)


def map_type(query: Tensor) -> torch.dtype:
    """The type of A in products: bfloat16 only where these are fast."""
    if query.dtype == torch.bfloat16 and query.is_cuda:
        return query.dtype
    return torch.promote_types(query.dtype, torch.float32)


def state_shape(query: Tensor, value: Tensor) -> tuple[int, int, int]:
    """``[lines, length, width]``: of [V, 1] and of what has a column for each of its columns."""
    batch, heads, length, _ = query.shape
    return batch * heads, length, -(-(value.shape[-1] + 1) // ALIGNMENT) * ALIGNMENT


def causal_elemmul(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[batch, heads, length, dim]``, and S after the last row ``[lines, length, width]``; arguments as of
    :class:`CausalMap`."""
    with without_autocast(query.device.type):
        return _forward(CausalMap(query, key, value, mask, scale), query.dtype)


def causal_elemmul_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from that of the output and S after the last row."""
    with without_autocast(query.device.type):
        return _backward(CausalMap(query, key, value, mask, scale), grad, sums, query.dtype)


def _forward(a: CausalMap, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = a.values()
    rounded = values.to(a.maps)
    found = torch.empty_like(values)
    sums = torch.zeros_like(values)
    for start, stop in a.chunks():
        rows = a.rows(start, stop, a.maps)
        alike = _product(rows, rows.mT).tril_()
        torch.bmm(alike, values[:, start:stop], out=found[:, start:stop])
        if start:
            found[:, start:stop].add_(_product(rows[..., :start], sums[:, :start].to(a.maps)))
        sums[:, :stop].add_(_product(rows.mT, rounded[:, start:stop]))
    if (floors := a.floors(values)) is not None:
        found += floors
    found *= a.inverse(found)
    output = found.new_empty(a.batch, a.length, a.heads, a.value_dim, dtype=dtype).transpose(1, 2)
    output.copy_(found[..., : a.value_dim].view(output.shape))
    return output, sums


def _backward(a: CausalMap, grad: Tensor, sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk, ``earlier`` is S before it, ``later`` T after it, and ``pulls`` is G, which begins as dO."""
    values, pulls = a.values(), a.wide(grad.reshape(-1, a.length, a.value_dim), 0.0)
    rounded, floors = values.to(a.maps), a.floors(values)
    states = torch.cat([sums, torch.zeros_like(sums)], -1)
    earlier, later = states.chunk(2, -1)
    d_query = a.query.new_empty(a.query.shape, dtype=dtype)
    d_key = a.key.new_zeros(a.key.shape, dtype=a.arithmetic)
    d_value = torch.empty_like(values)
    for start, stop in reversed(a.chunks()):
        rows = a.rows(start, stop, a.arithmetic)
        here, pull = values[:, start:stop], pulls[:, start:stop]
        earlier[:, :stop].sub_(_product(rows.to(a.maps).mT, rounded[:, start:stop]))
        earlier[:, start:stop] = 0.0  # no earlier row sees these keys: what subtracting leaves is rounding
        alike = torch.bmm(rows, rows.mT).tril_()
        reached = torch.bmm(rows, states[:, :stop])
        from_earlier, from_later = reached.chunk(2, -1)
        found = torch.baddbmm(from_earlier, alike, here)
        if floors is not None:
            found += floors[:, start:stop]
        inverse = a.inverse(found)
        pull[..., a.value_dim] = -(pull * found).sum(-1) * inverse[..., 0]
        pull *= inverse
        torch.baddbmm(from_later, alike.mT, pull, out=d_value[:, start:stop])
        pairs = torch.bmm(pull, here.mT).tril_()
        d_rows = torch.bmm(torch.cat([pull, here], -1), states[:, :stop].mT)
        d_rows.baddbmm_(pairs + pairs.mT, rows)
        later[:, :stop].baddbmm_(rows.mT, pull)
        d_scores = torch._softmax_backward_data(d_rows, rows, -1, rows.dtype).to(a.maps)
        d_scores = d_scores.view(len(a.key), -1, stop)
        d_queries = _product(d_scores, a.key[:, :stop]).mul_(a.scale)
        d_query[:, :, start:stop] = d_queries.view_as(d_query[:, :, start:stop])
        d_key[:, :stop].add_(_product(d_scores.mT, a.queries(start, stop)))
    if a.mask is not None:
        d_value += a.floor * pulls.flip(1).cumsum(1).flip(1)
    d_value = a.without_padding(d_value)[..., : a.value_dim].unflatten(0, (a.batch, a.key_heads, -1)).sum(2)
    d_key = d_key.mul_(a.scale).view(a.batch, a.key_heads, a.length, a.dim)
    return d_query.view(a.batch, a.heads, a.length, a.dim), d_key.to(dtype), d_value.to(dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two batches of matrices, in at least float32."""
    if left.dtype.itemsize > 2:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
