"""Compares compiled kernels and launches for an H200 before and after a change.

    git worktree add ../before main
    python tools/compare_ptx.py record ../before/src before.json
    python tools/compare_ptx.py record src after.json
    python tools/compare_ptx.py compare before.json after.json

Needs no GPU. Records PTX, grid and arguments (without addresses) of every launch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIMULATORS = Path(__file__).parents[1] / "tests" / "kernels"
ENTRIES = ("saobp.kernels.fused", "saobp.kernels.call")
"""Where ``fused_attention`` is, now and in older trees."""
HOPPER_LAUNCH = ("saobp.kernels.dispatch", "saobp.kernels.short_hopper_launch")
OPERATOR = ("saobp.metrics.operators.fused", "saobp.metrics.fused")


def calls() -> Iterator[dict[str, Any]]:
    """Calls of every family: not every combination, but every option with every kind of kernel."""
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
    for causal, strength in itertools.product(ways, strengths):  # copy engine, two streams
        yield {"length": 8192, "causal": causal, "strength": strength, "heads": 4}
    for factor in ("high", "high-listing"):  # several spans of rows
        yield {"length": 20000, "causal": True, "factor": factor}
    for length, factor, option in itertools.product(
        (100, 128), ("high", "low-listing"), ("plain", "dropout", "padded")
    ):
        yield {"length": length, "factor": factor, "option": option, "hopper": True}
    for length, strength in itertools.product((512, 700), (0.2, 1.0)):
        yield {"length": length, "operator": strength}


def make(
    length: int, *, causal: bool = False, factor: str = "high", strength: str = "weak",
    dtype: str = "bfloat16", option: str = "plain", dim: int = 64, heads: int = 2, group: int = 1,
    hopper: bool = False, operator: float | None = None,
) -> None:  # fmt: skip
    """One call: inference, then with gradients, so that both operators of a family are recorded."""
    import torch

    from saobp.refinement import Refinement

    if operator is not None:
        states = torch.zeros(heads, length, dim, dtype=getattr(torch, dtype))
        made = found(OPERATOR, "FusedOperator").FusedOperator(
            states, states, Refinement(factor, operator), torch.full((heads,), operator), scale=0.125
        )
        made.sweep(states, states)
        return
    if hopper:
        found(HOPPER_LAUNCH, "HOPPER_FROM").HOPPER_FROM = 0
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
    attend = found(ENTRIES, "fused_attention").fused_attention
    two_streams = length >= 8192  # second calls launch directly, which needs a GPU
    for learning in (True,) if two_streams else (False, True):
        given = [one.requires_grad_(learning) for one in (query, key, value)]
        with torch.set_grad_enabled(learning):
            out = attend(
                *given, Refinement(factor, number), strengths,
                strongest=None if strength == "learned" else number, **options,
            )  # fmt: skip
        if learning:
            out.sum().backward()


def found(modules: tuple[str, ...], name: str) -> Any:
    """The first of these modules that defines a name."""
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):
            if hasattr(importlib.import_module(module), name):
                return importlib.import_module(module)
    raise SystemExit(f"none of {', '.join(modules)} in the source tree has {name}")


def record(every: int) -> dict[str, list[Any]]:
    """Launches by call, in order: kernel, SHA-256 of the PTX, grid, scalar arguments."""
    from triton.backends.nvidia.compiler import CUDABackend

    # PTX instead of machine code: the assembler is not ours, and takes most of the time.
    CUDABackend.make_cubin = lambda _self, ptx, *_: ptx.encode()
    sys.path.insert(0, str(SIMULATORS))
    from pretended_gpu import pretend_gpu

    launched = pretend_gpu()
    launches = {}
    for call in itertools.islice(calls(), 0, None, every):
        launched.clear()
        make(**call)
        launches[json.dumps(call)] = [
            (one.name, hashlib.sha256(one.binary).hexdigest(), one.grid, repr(one.numbers))
            for one in launched
        ]
    return launches


def run_in_tree(source: Path, every: int, result: Path, cache: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PYTHONPATH": str(source.resolve()), "TRITON_DISABLE_LINE_INFO": "1",
            "TRITON_CACHE_DIR": str(cache or folder),
        }  # fmt: skip
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, __file__, "_worker", "--every", str(every), str(result.resolve())]
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
        run_in_tree(given.source, given.every, given.result, given.cache)
    else:
        given.result.write_text(json.dumps(record(given.every), indent=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
