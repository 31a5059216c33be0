"""``saobp evaluate``: perplexity and zero-shot questions of a saved language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import (
    AsJson,
    check_data_dir,
    fail,
    print_json,
    print_note,
    print_result,
    stdout_console,
)
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
    limit: Annotated[int | None, typer.Option(help="So many examples, for a quick look.", min=1)] = None,
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
        import_user_code(imports)
        check_data_dir(data_dir)
        checked_folder(model)
        from saobp.commands.quiet_logs import quiet_transformers
        from saobp.commands.refinement_option import parse_refinement_option
        from saobp.training.evaluation.run import KNOWN, MEASURED
        from saobp.training.evaluation.run import evaluate as run

        override = None if refinement is None else parse_refinement_option(refinement)
        quiet_transformers()
        if against is not None:
            from saobp.training.evaluation.blimp import difference, read_items

            if out is None:
                raise ValueError("--against compares kept results: name a folder for these by --out")
            base = read_items(against)
        if task is None:
            chosen: tuple[str, ...] = MEASURED
        else:
            chosen = KNOWN if task == "all" else tuple(name.strip() for name in task.split(","))
        with ProgressBars() as bars:
            shown_bars: dict[str, ProgressBar] = {}

            def advance(name: str, done: int, total: int) -> None:
                if name not in shown_bars:
                    shown_bars[name] = bars.add(name)
                shown_bars[name](done, total)

            results = run(
                model, chosen, data_dir=data_dir, folder=out, refinement=override, harness=harness,
                positions=positions or None, length=length, limit=limit, advance=advance,
            )  # fmt: skip
        compared = None if against is None or out is None else difference(read_items(out), base)
    except (ValueError, OSError) as problem:
        fail(problem)
    if as_json:
        print_json(results | ({} if compared is None else {"blimp_difference": compared}))
    else:
        stdout_console().print(_table(results))
        if compared is not None:
            apart = f"{compared['difference']:+.2f} ± {compared['error']:.2f} %"
            print_result(f"blimp: {apart} over {compared['pairs']:,} pairs in common")
        for words in results["notes"]:
            print_result(words)
    if out is not None:
        print_note(f"results are in {out}")


def _table(results: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    rows = _rows(results)
    compared = ["harness"] if any("harness" in result for _, _, result, _ in rows) else []
    for name in ("task", "measure", "value", "± error", "count", *compared):
        table.add_column(name, justify="left" if name in ("task", "measure") else "right", no_wrap=True)
    for task, measure, result, unit in rows:
        key = "perplexity" if "perplexity" in result else "accuracy"
        error = f"{result['error']:.2f}" if "error" in result else ""
        other = [f"{result['harness'][key]:.2f}" if "harness" in result else "" for _ in compared]
        table.add_row(task, measure, f"{result[key]:.2f}", error, f"{result[unit]:,} {unit}", *other)
    return table


def _rows(results: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], str]]:
    """Rows of the table: task, metric, values, sample size."""
    rows = []
    wikitext = results.get("wikitext")
    if wikitext is not None and results["decoder"]:
        rows.append(("wikitext", "causal perplexity", wikitext, "tokens"))
    elif wikitext is not None:
        rows += [
            ("wikitext", f"{name} perplexity", wikitext[name], "positions") for name in ("pseudo", "masked")
        ]
    if "race-middle" in results:
        result = results["race-middle"]
        rows.append(("race-middle", "last question", result, "questions"))
        rows.append(("race-middle", "every question", result["every_question"], "questions"))
    if "blimp" in results:
        rows.append(("blimp", "minimal pairs", results["blimp"], "questions"))
        rows += [("", field, result, "questions") for field, result in results["blimp"]["fields"].items()]
    if "boolq" in results:
        rows.append(("boolq", "accuracy", results["boolq"], "questions"))
    return rows
