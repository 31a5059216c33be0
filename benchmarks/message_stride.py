"""Key bias with messages from all rows, every second and every fourth: time against cuDNN, and error.

    python benchmarks/message_stride.py --out FOLDER         on a GPU, about a minute
    python benchmarks/message_stride.py --device cpu --lengths 9 --checked 9 --rows 144 --turns 1 --repeats 1

bfloat16, heads of 64, learned strengths of 0.05 to 4 with their gradient, states laid out as in a model, CUDA
graphs up to 1024 tokens. Errors are against float64 on random inputs, over those of eager attention in the
same precision (twice is allowed); repeats must be equal bit by bit.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend

import saobp
from saobp import Refinement
from saobp.benchmarking.attention import (
    DIM,
    HEADS,
    REPLAYED,
    ROWS,
    attend_plain,
    learned_call,
    one_call,
    states_and_gradient,
)
from saobp.benchmarking.table import BenchmarkTable, Cell, milliseconds, ratio, spread
from saobp.functional import Backend
from saobp.runs.machine import machine
from saobp.testing.error_budget import assert_within_budget, distance, run
from saobp.testing.inputs import AttentionInputs, attention_inputs
from saobp.timing import Call, clock_of, in_turn

STRIDES = (1, 2, 4)


def refinement_of(stride: int) -> Refinement:
    return Refinement("high-key-bias", "learned", message_stride=stride)


def time_of(length: int, direction: str, options: argparse.Namespace) -> dict[str, Cell]:
    """A row of the table of times: cuDNN, and the key bias with messages from every so many-th row."""
    cuda = options.device == "cuda"
    shape = max(1, options.rows // (HEADS * length)), HEADS, length, DIM
    states = states_and_gradient(shape, torch.bfloat16 if cuda else torch.float32, options.device)
    plain = partial(attend_plain, SDPBackend.CUDNN_ATTENTION if cuda else None, False)
    calls: dict[str, Call] = {"cudnn": one_call(plain, states, direction)}
    for stride in STRIDES:
        calls[f"stride {stride}"] = learned_call(refinement_of(stride), False, states, direction)
    calls["again"] = calls["stride 4"]
    found = in_turn(
        calls, turns=options.turns, budget=options.budget, clock=clock_of(options.device),
        replayed=cuda and length <= REPLAYED,
    )  # fmt: skip
    cells: dict[str, Cell] = {"tokens": f"{shape[0]} x {length}", "pass": direction}
    cells |= {f"{name} ms": milliseconds(one) for name, one in found.items() if name != "again"}
    cells |= {f"{name} / cudnn": ratio(found[name], found["cudnn"]) for name in found if name != "cudnn"}
    return cells | {"spread %": spread(found["stride 4"]), "cudnn spread %": spread(found["cudnn"])}


def errors_of(length: int, stride: int, padding: bool, options: argparse.Namespace) -> dict[str, Cell]:
    """A row of the table of errors: root mean squares over eager attention's, and the share of the budget."""
    inputs = attention_inputs(
        2, 4, length, DIM, strength=(0.05, 0.5, 1.5, 4.0), padding="right" if padding else None,
        transposed=True, dtype=torch.bfloat16 if options.device == "cuda" else torch.float16,
        device=options.device,
    )  # fmt: skip
    refinement = refinement_of(stride)
    fused = partial(attend, inputs, refinement, "fused")
    exact = run(partial(attend, inputs, refinement, "reference"), inputs.to(torch.float64))
    eager = run(partial(attend, inputs, refinement, "reference"), inputs)
    cells: dict[str, Cell] = {"tokens": length, "stride": stride, "padding": "right" if padding else "none"}
    first = run(fused, inputs)
    for name, truth in exact.items():
        cells[name] = distance(first[name], truth).typical / distance(eager[name], truth).typical
    try:
        errors = assert_within_budget(fused, inputs, refinement)
        cells["budget"] = max(one.found.worst / one.allowed.worst for one in errors)
    except AssertionError as error:
        cells["budget"] = str(error)
    same = (
        all(torch.equal(first[name], one) for name, one in run(fused, inputs).items())
        for _ in range(options.repeats)
    )
    return cells | {"equal repeats": f"{sum(same)} of {options.repeats}"}


def attend(
    inputs: AttentionInputs,
    refinement: Refinement,
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor,
) -> Tensor:
    return saobp.attention(
        query, key, value, refinement, attention_mask=inputs.padding_mask, strength=strength, backend=backend
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192, 512, 128])
    parser.add_argument("--checked", type=int, nargs="*", default=[128, 300, 1024], help="lengths of errors")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="rows (batch x heads x length) of a timed call"
    )
    parser.add_argument("--repeats", type=int, default=20, help="repeats that must be equal")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of one call over all turns")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    title = "Key bias with messages from a part of the rows"
    times = BenchmarkTable("message-stride", f"{title}: time", machine(options.device))
    times.notes.append(
        f"Milliseconds, medians of {options.turns} turns, bfloat16, {HEADS} heads of {DIM}, about "
        f"{options.rows} rows, learned strengths and their gradient; CUDA graphs up to {REPLAYED} tokens. "
        "'again' is stride 4 timed a second time. The spread is half the distance of the quartiles."
    )
    errors = BenchmarkTable("message-stride-errors", f"{title}: error", machine(options.device))
    errors.notes.append(
        "Root-mean-square error against float64 over that of eager attention in the same precision, for "
        "output and gradients; 'budget': the largest error as a share of what is allowed; 2 x 4 heads of 64, "
        "strengths of 0.05, 0.5, 1.5 and 4."
    )
    for length in options.checked:
        for stride, padding in ((1, False), (2, False), (4, False), (4, True)):
            errors.rows.append(errors_of(length, stride, padding, options))
    errors.show(Console(width=200))
    for length in options.lengths:
        for direction in ("forward", "forward + backward"):
            times.rows.append(time_of(length, direction, options))
    times.show(Console(width=200))
    if options.out is not None:
        errors.write(options.out)
        times.write(options.out)


if __name__ == "__main__":
    main()
