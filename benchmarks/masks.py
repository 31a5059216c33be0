"""Refined attention under windows and masks: kernels against the reference, PyTorch's SDPA and FlexAttention.

    python benchmarks/masks.py --out FOLDER                       on a GPU, two minutes or so
    python benchmarks/masks.py --device cpu --lengths 64 --turns 1 --budget 0.01

bfloat16, 12 heads of 64 and learned strengths, as in ModernBERT-base. SDPA and FlexAttention are plain, under
the same mask: what a model without the refinement would pay. Memory is what a call adds to the peak. The last
rows are whole ModernBERT-base models of random weights, forward and backward, with their local layers by the
kernels and by the whole map.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import saobp
from saobp import Refinement
from saobp.benchmarking.table import BenchmarkTable, Cell, milliseconds, ratio
from saobp.kernels import dispatch
from saobp.propagation.graph import in_window
from saobp.runs.machine import machine
from saobp.timing import Call, added_memory, clock_of, in_turn

HEADS, DIM, WINDOW = 12, 64, 65
"""ModernBERT-base: rows of its local layers see 64 tokens on either side."""
REFINEMENT = Refinement("high", "learned")
MASKS = ("window", "documents", "pairs", "numbers")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def mask_of(kind: str, length: int, device: str, dtype: torch.dtype) -> Tensor:
    """bool or numbers ``[1, 1, length, length]``."""
    places = torch.arange(length, device=device)
    if kind == "window":
        seen = in_window(WINDOW, length, length, False, places.device)
    elif kind == "documents":  # of 300 tokens each
        seen = places[:, None] // 300 == places // 300
    elif kind == "pairs":  # nine in ten, everywhere, so that no tile can be skipped
        seen = (places[:, None] * places) % 10 != 1
    else:
        return -0.05 * (places[:, None] - places).abs().to(dtype)[None, None]
    return seen[None, None]


def attentions(
    kind: str, length: int, device: str, strength: Tensor, dtype: torch.dtype, with_flex: bool
) -> dict[str, Attend]:
    """Ways to compute attention under a mask; all but sdpa and flex refine, and "again" repeats "refined"."""
    mask = mask_of(kind, length, device, dtype)
    own = {"sliding_window": WINDOW} if kind == "window" else {"attn_mask": mask}
    refined = partial(saobp.attention, refinement=REFINEMENT, strength=strength, **own)
    fused = "fused" if device == "cuda" else "auto"
    flex = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    entries = mask[0, 0]

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row - key).abs() < WINDOW if kind == "window" else entries[row, key]

    def biased(score: Tensor, _batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return score + entries[row, key]

    if kind == "numbers":
        options = {"score_mod": biased}
    else:
        options = {"block_mask": create_block_mask(sees, None, None, length, length, device=device)}
    ways: dict[str, Attend] = {
        "refined": partial(refined, backend=fused),
        "again": partial(refined, backend=fused),
        "reference": partial(refined, backend="reference"),
        "sdpa": partial(scaled_dot_product_attention, attn_mask=mask),
    }
    return ways | ({"flex": partial(flex, **options)} if with_flex else {})


def operation(kind: str, length: int, options: argparse.Namespace) -> Iterator[dict[str, Cell]]:
    """Rows of the table for one mask and length: forward, and forward with backward."""
    device, cuda = options.device, options.device == "cuda"
    shape = max(1, options.tokens // length), length, HEADS, DIM
    dtype = torch.bfloat16 if cuda else torch.float32
    query, key, value, gradient = (
        torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)
    )
    strength = torch.logspace(-1.3, 0.6, HEADS, device=device)
    ways = attentions(kind, length, device, strength, dtype, length in options.flex)
    for direction in ("forward", "forward + backward"):
        calls: dict[str, Call] = {}
        for name, attend in ways.items():
            if direction == "forward":
                calls[name] = partial(without_gradient, attend, query, key, value)
            elif cuda or name != "flex":
                leaves = [one.detach().requires_grad_() for one in (query, key, value)]
                calls[name] = partial(with_gradient, attend, leaves, gradient)
        found = in_turn(calls, turns=options.turns, budget=options.budget, clock=clock_of(options.device))
        cells: dict[str, Cell] = {"what": kind, "tokens": f"{shape[0]} x {length}", "direction": direction}
        cells |= {f"{name} ms": milliseconds(one) for name, one in found.items() if name != "again"}
        for name in ("again", "reference", "sdpa", "flex"):
            over = ratio(found["refined"], found.get(name))
            cells["again" if name == "again" else f"over {name}"] = over
        if cuda:
            cells |= {f"{name} MiB": memory_of(calls[name]) for name in calls if name != "again"}
        yield cells


def without_gradient(attend: Attend, *states: Tensor) -> None:
    with torch.no_grad():
        attend(*states)


def with_gradient(attend: Attend, leaves: list[Tensor], gradient: Tensor) -> None:
    torch.autograd.grad(attend(*leaves), leaves, gradient)


def memory_of(call: Call) -> Cell:
    """MiB that a call adds to the peak, or the name of its error."""
    try:
        return added_memory(call)
    except Exception as error:
        return type(error).__name__


@contextmanager
def whole_maps() -> Iterator[None]:
    """Inside, calls under masks and windows take the reference, which holds the whole map."""
    with patch.object(dispatch, "_masked_obstacle", lambda _: "this benchmark asks for the whole map"):
        yield


def model(length: int, options: argparse.Namespace) -> dict[str, Cell]:
    """The table's row for a whole model at a length.

    "refined" takes the default path of models: whole maps, until kernels for masks are used unasked.
    """
    from transformers import ModernBertConfig, ModernBertModel

    device, cuda = options.device, options.device == "cuda"
    sizes = (
        {}
        if cuda
        else {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 32}
    )
    config = ModernBertConfig(**sizes, attn_implementation="sdpa")
    ids = torch.randint(5, 1000, (max(1, options.tokens // length), length), device=device)
    calls: dict[str, Call] = {}
    for name in ("sdpa", "refined", "reference"):
        torch.manual_seed(0)
        made = ModernBertModel(config).to(device, torch.bfloat16 if cuda else torch.float32).train()
        made = made if name == "sdpa" else saobp.apply(made, REFINEMENT)
        calls[name] = partial(step, made, ids, whole=name == "reference")
    calls["again"] = calls["refined"]
    found = in_turn(calls, turns=options.turns, budget=options.budget, clock=clock_of(options.device))
    cells: dict[str, Cell] = {"what": "ModernBERT-base", "tokens": f"{len(ids)} x {length}"}
    cells |= {"direction": "forward + backward"}
    cells |= {f"{name} ms": milliseconds(one) for name, one in found.items() if name != "again"}
    for name in ("again", "reference", "sdpa"):
        cells["again" if name == "again" else f"over {name}"] = ratio(found["refined"], found[name])
    if cuda:
        cells |= {f"{name} MiB": memory_of(calls[name]) for name in ("refined", "reference", "sdpa")}
    return cells


def step(model: torch.nn.Module, ids: Tensor, *, whole: bool) -> None:
    model.zero_grad(set_to_none=True)
    if whole:
        with whole_maps():
            output = model(ids)
    else:
        output = model(ids)
    output.last_hidden_state.float().square().mean().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--masks", nargs="*", choices=MASKS, default=MASKS)
    parser.add_argument("--models", type=int, nargs="*", default=[1024, 4096], help="lengths of the models")
    parser.add_argument(
        "--flex", type=int, nargs="*", default=[1024, 4096], help="lengths at which to time flex"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a batch")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of one call over all turns")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = BenchmarkTable(
        "masks",
        "Refined attention under windows and masks, learned strengths",
        machine(options.device),
    )
    table.notes.append(
        "Milliseconds, medians over turns. 'refined' are the kernels, 'reference' the whole map; 'sdpa' and "
        "'flex' are plain attention under the same mask, flex compiled. 'over' is 'refined' over that one, "
        "'again' over itself. MiB: what a call adds to the peak of memory."
    )

    def save() -> None:
        if options.out is not None:
            table.write(options.out)

    for kind in options.masks:
        for length in options.lengths:
            for cells in operation(kind, length, options):
                table.rows.append(cells)
                save()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    for length in options.models:
        table.rows.append(model(length, options))
        save()
    table.show(Console())


if __name__ == "__main__":
    main()
