"""Compares compiled kernels and launches for an H200 before and after a change.

    git worktree add ../before main
    python tools/compare_ptx.py record ../before/src before.json
    python tools/compare_ptx.py record src after.json
    python tools/compare_ptx.py compare before.json after.json

Needs no GPU. Records PTX, grid and arguments (without addresses) of every launch.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIMULATORS = Path(__file__).parents[1] / "tests" / "kernels"
THRESHOLDS = (
    *("HOPPER_MIN_HEADS", "WHOLE_MIN_HEADS", "WHOLE_BACKWARD_MIN_HEADS"),
    *("CAUSAL_MIN_HEADS", "CAUSAL_MIN_ENTRIES", "SUMS_MIN_HEADS"),
)
"""Sizes from which kernels for Hopper are used."""
DTYPES = ("bfloat16", "float16", "float32")
DTYPES_AND_OPTIONS = (
    ("bfloat16", "plain"),
    ("bfloat16", "packed"),
    ("float16", "padded dropout"),
    ("float32", "padded dropout"),
)
ROW_MASKS = ("none", "causal", "padded", "shown", "added")


def calls() -> Iterator[dict[str, Any]]:
    """Calls of every family: not every combination, but every option with every kind of kernel.

    Of a kind other than ``attention``, one of ``KINDS``, they name it.
    """
    ways, strengths = (False, True), ("weak", "strong", "learned")
    options = ("dropout", "padded", "packed", "padded dropout")
    dims = ((64, "plain"), (64, "padded"), (64, "packed"), (96, "plain"), (256, "padded"))
    for length, causal, factor, strength, dtype in itertools.product(
        (40, 64, 128, 512), ways, ("high", "high-listing"), strengths, ("bfloat16", "float16")
    ):
        yield {"length": length, "causal": causal, "factor": factor, "strength": strength, "dtype": dtype}
    for length, causal, factor, strength, option in itertools.product(
        (100, 300), ways, ("low", "low-listing"), ("weak", "learned"), options
    ):
        yield {"length": length, "causal": causal, "factor": factor, "strength": strength, "option": option}
    for length, causal, dim, strength in itertools.product(
        (128, 512), ways, (8, 96, 128, 256), ("weak", "strong")
    ):
        others = {"group": 2, "dtype": "float16"} if strength == "strong" else {}
        yield {"length": length, "causal": causal, "dim": dim, "strength": strength, **others}
    for length, causal, factor, option in itertools.product(
        (100, 300), ways, ("high", "low-listing"), ("plain", "padded dropout", "packed")
    ):
        yield {"length": length, "causal": causal, "factor": factor, "option": option, "dtype": "float32"}
    for dtype, (dim, option) in itertools.product(("bfloat16", "float16", "float32"), dims):
        yield {"length": 300, "factor": "elemmul", "dtype": dtype, "dim": dim, "option": option}
    for causal, strength in itertools.product(ways, strengths):  # TMA, two streams
        yield {"length": 8192, "causal": causal, "strength": strength, "heads": 4}
    for factor in ("high", "high-listing"):  # several spans of rows
        yield {"length": 20000, "causal": True, "factor": factor}
    for length, factor, option in itertools.product(
        (100, 128), ("high", "low-listing"), ("plain", "dropout", "padded")
    ):
        yield {"length": length, "factor": factor, "option": option, "hopper": True}
    for length, factor, strength, option in itertools.product(
        (200, 256), ("high", "low-key-bias"), ("weak", "learned"), ("plain", "padded dropout")
    ):
        yield {"length": length, "factor": factor, "strength": strength, "option": option, "hopper": True}
    for causal, strength, option in itertools.product(ways, ("weak", "learned"), ("plain", "padded dropout")):
        others = {"causal": causal, "strength": strength, "option": option}
        yield {"length": 1000 if causal else 512, **others, "hopper": True}
    yield from calls_with_key_bias()
    yield from calls_of_several_steps()
    for length, strength in itertools.product((512, 700), (0.2, 1.0)):
        yield {"kind": "operator", "length": length, "strength": strength}
    yield from masked_calls()
    for dtype, dim, marked in itertools.product(DTYPES, (64, 96), ways):
        yield {"kind": "decoding", "dtype": dtype, "dim": dim, "marked": marked}
    for dtype, dim, mask in itertools.product(DTYPES, (24, 64), ROW_MASKS):
        yield {"kind": "statistics", "dtype": dtype, "dim": dim, "mask": mask}


def calls_with_key_bias() -> Iterator[dict[str, Any]]:
    """Rows that receive their own message too; above a stride of 1, from a part of the rows."""
    for length, stride, (dtype, option) in itertools.product((100, 300), (1, 4), DTYPES_AND_OPTIONS):
        factor = "high-key-bias" if length == 300 else "low-key-bias"
        yield {"length": length, "factor": factor, "stride": stride, "dtype": dtype, "option": option}
    for length, strength, (dtype, option) in itertools.product(
        (100, 300, 1200), ("weak", "learned"), DTYPES_AND_OPTIONS
    ):
        others = {"causal": True, "strength": strength, "dtype": dtype, "option": option}
        yield {"length": length, "factor": "low-key-bias" if length == 300 else "high-key-bias", **others}
    for dim, strength in itertools.product((64, 256), ("weak", "learned")):
        others = {"group": 2, "dim": dim, "strength": strength}
        yield {"length": 512, "factor": "high-key-bias", "stride": 4, **others}


def calls_of_several_steps() -> Iterator[dict[str, Any]]:
    """Two to four steps, damped or not."""
    for length, damping, (dtype, option) in itertools.product((100, 300), (0.0, 0.3), DTYPES_AND_OPTIONS):
        several = {"steps": 3 if option == "plain" else 2, "damping": damping}
        yield {"length": length, "strength": "learned", "dtype": dtype, "option": option, **several}
    for length, factor, steps in itertools.product((128, 512), ("low-listing", "high-key-bias"), (2, 4)):
        yield {"length": length, "factor": factor, "steps": steps}
    for length, group in itertools.product((128, 512), (1, 2)):
        yield {"length": length, "steps": 2, "group": group, "strength": "strong"}


def masked_calls() -> Iterator[dict[str, Any]]:
    """Under a window, causal or not, and under masks that hide entries or add to them."""
    for dtype, factor in itertools.product(("bfloat16", "float32"), ("high", "low-listing", "high-key-bias")):
        for causal, window, mask, option in (
            (False, 65, "none", "plain"),
            (True, 65, "none", "plain"),
            (False, 0, "shown", "plain"),
            (False, 65, "added", "padded dropout"),
        ):
            others = {"causal": causal, "window": window, "mask": mask, "option": option}
            yield {"kind": "masked", "dtype": dtype, "factor": factor, **others}
    for dim, causal in itertools.product((96, 256), (False, True)):
        yield {"kind": "masked", "dim": dim, "causal": causal, "window": 65, "option": "padded dropout"}


def make_operator(length: int, *, strength: float, dim: int = 64, heads: int = 2) -> None:
    """Refined weights as an operator on other states."""
    import torch

    from saobp.metrics.operators.fused import FusedOperator
    from saobp.refinement import Refinement

    states = torch.zeros(heads, length, dim, dtype=torch.bfloat16)
    made = FusedOperator(
        states, states, Refinement("high", strength), torch.full((heads,), strength), scale=0.125
    )
    made.sweep(states, states)


def make_masked(
    *, causal: bool = False, window: int = 0, mask: str = "none", factor: str = "high",
    dtype: str = "bfloat16", option: str = "plain", dim: int = 64, length: int = 300,
) -> None:  # fmt: skip
    """Attention under a window, a mask or both: inference, then with gradients."""
    import torch

    from saobp.kernels.masked.attention import masked_attention
    from saobp.refinement import Refinement

    for learning in (False, True):
        states = (
            torch.zeros(2, length, heads, dim, dtype=getattr(torch, dtype)).transpose(1, 2)
            for heads in (4, 2, 2)
        )
        given = [one.requires_grad_(learning) for one in states]
        options: dict[str, Any] = {"is_causal": causal, "window": window or None}
        if mask == "shown":
            options["mask"] = torch.ones(2, 1, length, length, dtype=torch.bool)
        if mask == "added":
            options["mask"] = torch.zeros(1, 4, length, length, requires_grad=learning)
        if option == "padded dropout":
            options |= {"nodes": torch.ones(2, 1, length, dtype=torch.bool), "dropout_p": 0.1}
        strength = torch.zeros(4, requires_grad=learning)
        out = masked_attention(*given, Refinement(factor, "learned"), strength, **options)
        if learning:
            out.sum().backward()


def make_decoding(*, dtype: str, dim: int, marked: bool) -> None:
    """Two steps of decoding, the first without sums of earlier rows."""
    import torch

    from saobp.kernels.decoding import launch

    launch.multiprocessors = lambda _: 132
    query, strength = torch.zeros(2, 4, 1, dim, dtype=getattr(torch, dtype)), torch.zeros(4)
    totals = None
    for keys in (300, 301):
        states = torch.zeros(2, 2, keys, dim, dtype=query.dtype)
        marks = torch.ones(2, keys, dtype=torch.bool) if marked else None
        _, totals = launch.decoding_step(query, states, states, strength, totals, marks, 0.1, 1.0)


def make_statistics(*, dtype: str, dim: int, mask: str) -> None:
    """The sweep over queries and keys for statistics of rows."""
    import torch

    from saobp.kernels.statistics.launch import sweep_rows
    from saobp.propagation.row_statistics import RowMask

    length, real = 300, torch.ones(2, 300, dtype=torch.bool)
    masks = {
        "none": RowMask(),
        "causal": RowMask(causal=True, window=65),
        "padded": RowMask(real_keys=real, real_rows=real, starts=torch.zeros(2, dtype=torch.int32)),
        "shown": RowMask(entries=torch.ones(2, 1, length, length, dtype=torch.bool)),
        "added": RowMask(entries=torch.zeros(1, 4, length, length)),
    }
    states = [
        torch.zeros(2, length, heads, dim, dtype=getattr(torch, dtype)).transpose(1, 2) for heads in (4, 2, 2)
    ]
    sweep_rows(*states, masks[mask], scale=0.1, first=4)


def make_attention(
    length: int, *, causal: bool = False, factor: str = "high", strength: str = "weak",
    dtype: str = "bfloat16", option: str = "plain", dim: int = 64, heads: int = 2, group: int = 1,
    hopper: bool = False, stride: int = 1, steps: int = 1, damping: float = 0.0,
) -> None:  # fmt: skip
    """One call: inference, then with gradients, so that both operators of a family are recorded."""
    import torch

    from saobp.kernels import dispatch
    from saobp.kernels.fused import fused_attention
    from saobp.kernels.hopper import launch
    from saobp.refinement import Refinement

    if hopper:
        for name in THRESHOLDS:
            setattr(dispatch, name, 0)
        launch.multiprocessors = lambda _: 132
    lengths = (length, length // 2, 3) if option == "packed" else (length,)
    batch, tokens = (1, sum(lengths)) if option == "packed" else (2, length)
    query, key, value = (
        torch.zeros(batch, tokens, count, dim, dtype=getattr(torch, dtype)).transpose(1, 2)
        for count in (heads, heads // group, heads // group)
    )
    number = {"weak": 0.2, "strong": 1.0, "learned": 0.2}[strength]
    strengths = torch.full((heads,), number, requires_grad=strength == "learned")
    options: dict[str, Any] = {"is_causal": causal, "dropout_p": 0.1 if "dropout" in option else 0.0}
    if "padded" in option:
        options["padding_mask"] = torch.ones(batch, tokens, dtype=torch.bool)
    if option == "packed":
        ends = [0, *itertools.accumulate(lengths)]
        options |= {"cumulative_lengths": torch.tensor(ends, dtype=torch.int32), "longest": length}
    several = {"message_stride": (stride, 1), "steps": (steps, 1), "damping": (damping, 0.0)}
    changed = {name: value for name, (value, usual) in several.items() if value != usual}
    refinement = Refinement(factor, number, **changed)
    two_streams = length >= 8192  # second calls launch directly, which needs a GPU
    for learning in (True,) if two_streams else (False, True):
        given = [one.requires_grad_(learning) for one in (query, key, value)]
        with torch.set_grad_enabled(learning):
            out = fused_attention(
                *given, refinement, strengths,
                strongest=None if strength == "learned" else number, **options,
            )  # fmt: skip
        if learning:
            out.sum().backward()


KINDS: dict[str, Callable[..., None]] = {
    "attention": make_attention,
    "operator": make_operator,
    "masked": make_masked,
    "decoding": make_decoding,
    "statistics": make_statistics,
}


def make(kind: str = "attention", **call: Any) -> None:
    """Launches the kernels of one of ``calls``."""
    KINDS[kind](**call)


def record(every: int, containing: str) -> dict[str, list[Any]]:
    """Launches by call, in order: kernel, SHA-256 of the PTX, grid, scalar arguments."""
    from triton.backends.nvidia.compiler import CUDABackend

    # PTX instead of machine code: the assembler is not ours, and takes most of the time.
    CUDABackend.make_cubin = lambda _self, ptx, *_: ptx.encode()
    sys.path.insert(0, str(SIMULATORS))
    from pretended_gpu import pretend_gpu

    launched = pretend_gpu()
    launches = {}
    chosen = (call for call in calls() if containing in json.dumps(call))
    for call in itertools.islice(chosen, 0, None, every):
        launched.clear()
        make(**call)
        launches[json.dumps(call)] = [
            (one.name, hashlib.sha256(one.binary).hexdigest(), one.grid, repr(one.numbers))
            for one in launched
        ]
    return launches


def run_in_tree(source: Path, every: int, containing: str, result: Path, cache: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": str(source.resolve()), "TRITON_DISABLE_LINE_INFO": "1",
            "TRITON_CACHE_DIR": str(cache or folder),
        }  # fmt: skip
        environment.pop("TRITON_INTERPRET", None)
        chosen = ["--every", str(every), "--containing", containing]
        command = [sys.executable, __file__, "_worker", *chosen, str(result.resolve())]
        subprocess.run(command, env=environment, check=True)


def compare(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> int:
    """Prints what was compared; the number of calls that differ."""
    differing = [call for call in before.keys() | after.keys() if before.get(call) != after.get(call)]
    for call in differing[:20]:
        print(f"differs: {call}")
        for old, new in itertools.zip_longest(before.get(call, []), after.get(call, [])):
            if old != new:
                print(f"  before {old}\n  after  {new}")
    for name, launches in (("before", before), ("after", after)):
        every = [one for call in launches.values() for one in call]
        kernels, binaries = {one[0] for one in every}, {(one[0], one[1]) for one in every}
        counts = f"{len(every)} launches, {len(kernels)} kernels, {len(binaries)} different PTX"
        print(f"{name}: {len(launches)} calls, {counts}")
    print(f"{len(differing)} calls differ")
    return len(differing)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "_worker"):
        one = commands.add_parser(name)
        one.add_argument("--every", type=int, default=1, help="take only every n-th call")
        one.add_argument("--containing", default="", help='only calls with this text, such as "masked"')
        if name == "record":
            one.add_argument("source", type=Path, help="folder that holds the package saobp")
            one.add_argument("--cache", type=Path, help="folder of what an interrupted run compiled")
        one.add_argument("result", type=Path)
    one = commands.add_parser("compare")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return int(compare(*(json.loads(path.read_text()) for path in (given.before, given.after))) > 0)
    if given.command == "record":
        run_in_tree(given.source, given.every, given.containing, given.result, given.cache)
    else:
        given.result.write_text(json.dumps(record(given.every, given.containing), indent=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
