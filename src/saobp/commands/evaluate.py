"""``saobp evaluate``: perplexity and zero-shot questions of a saved language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from saobp.commands.own_code import Imports, import_own
from saobp.commands.streams import AsJson, fail, print_json, print_note, print_result, stdout_console
from saobp.progress import ProgressBar, ProgressBars
from saobp.storage.model_folders import checked_folder


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder of a language model, such as RUN/model.")],
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            "--tasks",
            help="wikitext, race-middle, boolq, blimp, joined by commas; or all. Default: all but blimp.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the files; without it they come from the hub.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to keep the results in.")] = None,
    refinement: Annotated[
        str | None, typer.Option(help="Take this instead of the checkpoint's own; none takes it off.")
    ] = None,
    positions: Annotated[
        int, typer.Option(help="Positions that pseudo-perplexity hides, one at a time; 0 for all.", min=0)
    ] = 20_000,
    length: Annotated[int | None, typer.Option(help="Tokens in a block or window.", min=2)] = None,
    limit: Annotated[int | None, typer.Option(help="So many rows, for a quick look.", min=1)] = None,
    against: Annotated[
        Path | None, typer.Option(help="Results on blimp of another model, to compare pair by pair.")
    ] = None,
    harness: Annotated[
        bool, typer.Option("--harness", help="Ask through lm-evaluation-harness too.")
    ] = False,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Measure a language model: WikiText, BLiMP, and RACE-Middle and BoolQ zero-shot for decoders."""
    try:
        import_own(imports)
        checked_folder(model)
        from saobp.commands.asked_refinement import asked_refinement
        from saobp.commands.quiet_logs import quiet_transformers
        from saobp.training.evaluation.run import KNOWN, MEASURED
        from saobp.training.evaluation.run import evaluate as run

        asked = None if refinement is None else asked_refinement(refinement)
        quiet_transformers()
        if against is not None:
            from saobp.training.evaluation.blimp import read_items

            if out is None:
                raise ValueError("--against compares kept results: name a folder for these by --out")
            base = read_items(against)
        if task is None:
            chosen: tuple[str, ...] = MEASURED
        else:
            chosen = KNOWN if task == "all" else tuple(name.strip() for name in task.split(","))
        with ProgressBars() as bars:
            shown: dict[str, ProgressBar] = {}

            def advance(name: str, done: int, total: int) -> None:
                if name not in shown:
                    shown[name] = bars.add(name)
                shown[name](done, total)

            found = run(
                model, chosen, data_dir=data_dir, folder=out, refinement=asked, harness=harness,
                positions=positions or None, length=length, limit=limit, advance=advance,
            )  # fmt: skip
        compared = _compared(out, base) if against is not None and out is not None else None
    except (ValueError, OSError) as problem:
        fail(problem)
    if as_json:
        print_json(found | ({} if compared is None else {"blimp_difference": compared}))
    else:
        stdout_console().print(_table(found))
        if compared is not None:
            apart = f"{compared['difference']:+.2f} ± {compared['error']:.2f} %"
            print_result(f"blimp: {apart} over {compared['pairs']:,} pairs in common")
        for words in found["notes"]:
            print_result(words)
    if out is not None:
        print_note(f"results are in {out}")


def _compared(out: Path, base: Any) -> dict[str, Any]:
    """Paired difference of BLiMP results in a folder from another model's."""
    from saobp.training.evaluation.blimp import difference, read_items

    return difference(read_items(out), base)


def _table(found_by_task: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    lines = _lines(found_by_task)
    compared = ["harness"] if any("harness" in found for _, _, found, _ in lines) else []
    for name in ("task", "measure", "value", "± error", "count", *compared):
        table.add_column(name, justify="left" if name in ("task", "measure") else "right", no_wrap=True)
    for task, measure, found, unit in lines:
        key = "perplexity" if "perplexity" in found else "accuracy"
        error = f"{found['error']:.2f}" if "error" in found else ""
        other = [f"{found['harness'][key]:.2f}" if "harness" in found else "" for _ in compared]
        table.add_row(task, measure, f"{found[key]:.2f}", error, f"{found[unit]:,} {unit}", *other)
    return table


def _lines(results: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], str]]:
    """Rows of the table: task, metric, values, sample size."""
    lines = []
    text = results.get("wikitext")
    if text is not None and results["decoder"]:
        lines.append(("wikitext", "causal perplexity", text, "tokens"))
    elif text is not None:
        lines += [
            ("wikitext", f"{name} perplexity", text[name], "positions") for name in ("pseudo", "masked")
        ]
    if "race-middle" in results:
        found = results["race-middle"]
        lines.append(("race-middle", "last question", found, "questions"))
        lines.append(("race-middle", "every question", found["every_question"], "questions"))
    if "blimp" in results:
        lines.append(("blimp", "minimal pairs", results["blimp"], "questions"))
        lines += [("", field, found, "questions") for field, found in results["blimp"]["fields"].items()]
    if "boolq" in results:
        lines.append(("boolq", "accuracy", results["boolq"], "questions"))
    return lines
