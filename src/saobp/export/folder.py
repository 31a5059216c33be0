"""Writes the folder of an exported model, whose numbers and times are compared with PyTorch's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saobp.export.formats import (
    FILES,
    ROWS,
    Run,
    check_packages,
    exported_program,
    write_executorch,
    write_exported,
    write_onnx,
)
from saobp.export.token_model import TokenModel
from saobp.storage.atomic import replacing, write_atomically
from saobp.storage.places import check_can_write
from saobp.timing import Timing, in_turn, wall_clock
from saobp.version import __version__

TOLERANCE = 1e-5
"""Largest difference allowed, as a share of the largest number where that is above 1."""


@dataclass(frozen=True)
class Difference:
    """absolute: largest difference at real tokens; largest: the largest number among PyTorch's."""

    absolute: float
    largest: float

    @property
    def is_within_tolerance(self) -> bool:
        return self.absolute <= TOLERANCE * max(1.0, self.largest)


@dataclass(frozen=True)
class Speed:
    """Medians in milliseconds of one call."""

    batch: int
    length: int
    pytorch: float
    exported: float
    ratio: float
    """Median over turns of PyTorch's time over the export's: above 1 the export is faster."""


def difference(model: TokenModel, run: Run, shapes: Sequence[tuple[int, int]]) -> Difference:
    """Compare on batches of random tokens with padding; ``shapes`` are rows and lengths."""
    absolute = largest = 0.0
    for rows, length in shapes:
        batch = model.batch(rows, length)
        real = batch[model.inputs.index("attention_mask")].bool()
        for actual, expected in zip(run(*batch), pytorch(model)(*batch), strict=True):
            if expected.shape[:2] == real.shape:
                actual, expected = actual[real], expected[real]
            apart = (actual - expected).abs().max()
            absolute = max(absolute, float(apart.nan_to_num(nan=float("inf"))))
            largest = max(largest, float(expected.abs().max()))
    return Difference(absolute, largest)


def speeds(model: TokenModel, run: Run, shapes: Sequence[tuple[int, int]]) -> list[Speed]:
    """Median times without padding, both in turn."""
    results = []
    for rows, length in shapes:
        batch = model.batch(rows, length, padding=False)
        calls: dict[str, Any] = {
            "pytorch": lambda batch=batch: pytorch(model)(*batch),
            "exported": lambda batch=batch: run(*batch),
        }
        timed = in_turn(calls, turns=9, budget=1.5, clock=wall_clock)
        ours, theirs = timed["pytorch"], timed["exported"]
        assert isinstance(ours, Timing)
        assert isinstance(theirs, Timing)
        results.append(Speed(rows, length, ours.median, theirs.median, ours.over(theirs)))
    return results


def pytorch(model: TokenModel) -> Run:
    """The model as it is, with its refinement."""
    forward = model.forward

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            outputs: tuple[Tensor, ...] = forward(*tensors)
        return outputs

    return run


RECORD = "export.json"


@dataclass(frozen=True)
class Export:
    """What was written, how far its numbers are from PyTorch's, and how fast it is."""

    file: Path
    megabytes: float
    difference: Difference
    speeds: list[Speed]
    threads: int


def check_request(out: Path, form: str, *, int8: bool) -> None:
    """Raises on what can be refused before a model is loaded."""
    if out.exists():
        raise ValueError(f"{str(out)!r} is there already, and nothing is overwritten: name another by --out")
    check_can_write(out, "name another folder by --out")
    if form not in FILES:
        raise ValueError(f"{form!r} is no form of export: choose {' or '.join(FILES)}")
    if int8 and form != "onnx":
        raise ValueError("int8 weights are written as ONNX: add --to onnx, or leave --int8 out")
    check_packages(form)


def export(
    model: TokenModel,
    out: Path,
    form: str,
    *,
    int8: bool = False,
    length: int = 128,
    batches: tuple[int, ...] = (1, 8),
) -> Export:
    """Export to a new folder, which appears once the numbers of the saved program were found right.

    form: ``onnx``, ``exported`` or ``executorch``. Raises ValueError where the numbers differ by more than
    rounding; with int8 weights the difference is only measured.
    """
    check_request(out, form, int8=int8)
    if length > model.longest:
        raise ValueError(f"the model knows {model.longest} positions, fewer than --length {length}")
    threads = torch.get_num_threads()
    program = exported_program(model, ROWS[form])
    with replacing(out) as folder:
        file = folder / FILES[form]
        if form == "onnx":
            run = write_onnx(program, model, file, int8=int8, threads=threads)
        elif form == "executorch":
            run = write_executorch(program, file)
        else:
            run = write_exported(program, file)
        # A single token, a sentence, and a padded batch at another length than the traced one.
        shapes = [(1, 1), (1, min(16, model.longest)), (4, min(40, model.longest))]
        largest_difference = difference(model, run, shapes)
        if not int8 and not largest_difference.is_within_tolerance:
            raise ValueError(
                f"the export's numbers are apart from PyTorch's by {largest_difference.absolute:.2g}, more "
                f"than {TOLERANCE:g} of the largest ({largest_difference.largest:.3g}): nothing was written"
            )
        timed = speeds(model, run, [(rows, length) for rows in batches])
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        model.model.config.save_pretrained(folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)
        result = Export(out / file.name, size, largest_difference, timed, threads)
        write_atomically(folder / RECORD, json.dumps(record(model, form, int8, result), indent=1) + "\n")
    return result


def record(model: TokenModel, form: str, int8: bool, result: Export) -> dict[str, Any]:
    return {
        "model": model.name,
        "class": type(model.model).__name__,
        "refinement": model.refinement,
        "form": form,
        "int8": int8,
        "inputs": list(model.inputs),
        "outputs": list(model.outputs),
        "longest": model.longest,
        "largest difference from PyTorch": result.difference.absolute,
        "threads": result.threads,
        "milliseconds": [asdict(speed) for speed in result.speeds],
        "versions": {"saobp": __version__, "torch": torch.__version__},
    }
