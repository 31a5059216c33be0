"""``saobp export``: a model, refined or not, as a file that runs without this package."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import AsJson, fail, print_json, print_note, print_result, stdout_console

if TYPE_CHECKING:
    from saobp.export.folder import Export


class Form(StrEnum):
    """What is written."""

    onnx = "onnx"
    exported = "exported"
    executorch = "executorch"


def export(
    model: Annotated[str, typer.Argument(help="Folder of a run or of a saved model, or a name on the hub.")],
    to: Annotated[Form, typer.Option(help="ONNX, a program of torch.export, or ExecuTorch.")] = Form.onnx,
    out: Annotated[Path, typer.Option(help="Folder to write, which must not exist.")] = Path("exported"),
    refinement: Annotated[
        str | None, typer.Option(help="Refine the model first, as in high:0.2; none takes its own off.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Store weights as int8 (ONNX only).")] = False,
    length: Annotated[int, typer.Option(help="Tokens in a text when times are taken.", min=1)] = 128,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Export a model for any batch and length, check its numbers, and time it beside PyTorch."""
    try:
        from saobp.storage.model_folders import checked_folder

        checked_folder(model)
        from saobp.export.folder import check_request, record
        from saobp.export.folder import export as write

        check_request(out, to.value, int8=int8)
        from saobp.commands.quiet_logs import quiet_transformers
        from saobp.commands.refinement_option import parse_refinement_option
        from saobp.export.token_model import load_token_model

        import_user_code(imports)
        override = None if refinement is None else parse_refinement_option(refinement)
        quiet_transformers()
        loaded = load_token_model(model, override)
        result = write(loaded, out, to.value, int8=int8, length=length)
    except (ValueError, OSError) as problem:
        fail(problem)
    if as_json:
        print_json(record(loaded, to.value, int8, result))
    else:
        show(result, to.value)
    print_note(f"wrote {result.file}, {result.megabytes:.1f} MB")


def show(result: Export, form: str) -> None:
    """Print the times of both, and how far their numbers are apart."""
    name = {"onnx": "onnxruntime", "exported": "torch.export", "executorch": "ExecuTorch"}[form]
    threads = f"{result.threads} thread{'s' if result.threads > 1 else ''}"
    title = f"milliseconds per call, and times as fast call by call: medians, {threads}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("batch x tokens", "PyTorch", name, "times as fast"):
        table.add_column(column, justify="right")
    for speed in result.speeds:
        shape = f"{speed.batch} x {speed.length}"
        table.add_row(shape, f"{speed.pytorch:.2f}", f"{speed.exported:.2f}", f"{speed.ratio:.2f}")
    stdout_console().print(table)
    apart = result.difference
    print_result(
        f"largest difference from PyTorch {apart.absolute:.1e}, of numbers up to {apart.largest:.3g}"
    )
