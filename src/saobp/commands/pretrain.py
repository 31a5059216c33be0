"""``saobp pretrain``: train a model from scratch, with or without a refinement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saobp.commands.import_option import Imports, import_user_code
from saobp.commands.streams import fail, has_options, print_note, print_result, stdout_console
from saobp.runs.layout import RECIPE, RESULT

if TYPE_CHECKING:
    from saobp.training.recipes import PretrainRecipe

EXPLANATION = """\
[bold]saobp pretrain[/] trains a BERT, ModernBERT, GPT-2 or Llama from nothing.

  saobp pretrain --size mini --refinement high --corpus books.txt --out runs/high
  saobp pretrain --size mini --corpus wikipedia_en:0.6,imdb_reviews:0.4 --data-dir data --out runs/plain
  saobp pretrain --recipe tiny --corpus books.txt --vocabulary 1024 --out runs/trial      on a laptop
  accelerate launch --num_processes 4 -m saobp pretrain ...                               on four GPUs

[bold]saobp pretrain --help[/] lists the options."""


def pretrain(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    corpus: Annotated[
        str,
        typer.Option(help="Texts with weights, as in a:0.6,b:0.4, or one; default: all in --tokens."),
    ] = "",
    data_dir: Annotated[Path | None, typer.Option(help="Folder in which texts and tokenizers are.")] = None,
    tokens: Annotated[Path, typer.Option(help="Folder of token stores, made or used.")] = Path("tokens"),
    tokenizer: Annotated[str | None, typer.Option(help="bert, gpt2, a folder or a name on the hub.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Learn a vocabulary of this size.")] = None,
    family: Annotated[str, typer.Option(help="bert, modernbert, gpt2 or llama.")] = "bert",
    size: Annotated[str | None, typer.Option(help="mini, small, medium, tiny or micro.")] = None,
    refinement: Annotated[
        str, typer.Option(help="none, high:learned, high-key-bias:learned, gate ...")
    ] = "none",
    regularizer: Annotated[str | None, typer.Option(help="A penalty on attention, such as entropy.")] = None,
    recipe: Annotated[str, typer.Option(help="fast, modern, paper or tiny.")] = "fast",
    steps: Annotated[int | None, typer.Option(help="Fewer or more steps than the recipe's.")] = None,
    seed: Annotated[int, typer.Option(help="For weights, order of texts, masks and dropout.")] = 42,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of the recipe: --set learning_rate=5e-4")
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of the texts kept for evaluation; 0 for none.")
    ] = 0.01,
    report_to: Annotated[str, typer.Option(help="Trackers of Trainer: tensorboard, ..., all.")] = "none",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")] = False,
    portable: Annotated[
        bool, typer.Option("--portable", help="Save code with the model, so that it loads without saobp.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
    imports: Imports = None,
) -> None:
    """Train a model from nothing, with or without a refinement."""
    if out is None and not dry_run and not has_options(context):
        stdout_console().print(EXPLANATION)
        return
    try:
        if out is None and not dry_run:
            raise ValueError("name a folder for the run by --out")
        import_user_code(imports)
        resolved = _recipe(recipe, family, size, steps, set_ or [], seed, refinement, regularizer, corpus)
        from saobp.training.pretrain import check_refinement

        check_refinement(resolved)
        if dry_run:
            stdout_console().print_json(json.dumps(resolved.to_dict()))
            return
        assert out is not None
        from saobp.runs.folder import RunFolder

        if resume and RunFolder(out).is_finished:
            RunFolder(out).check_recipe("pretrain", resolved.to_dict())
            RunFolder(out).clean_up()
            print_result(f"The run in {out} is finished already; its result is in {out / RESULT}.")
            return
        RunFolder(out).check_free(resume)
        from saobp.progress import ProgressBars
        from saobp.training.dataset import data_of
        from saobp.training.pretrain import pretrain as train
        from saobp.training.progress import plain_sentences
        from saobp.training.trackers import trackers

        trackers(report_to)
        with ProgressBars() as bars:
            texts = data_of(
                resolved,
                tokens,
                data_dir=data_dir,
                tokenizer=tokenizer,
                vocabulary=vocabulary,
                held_out=held_out,
                progress=bars.add,
            )
        parts = ", ".join(f"{name}: {count:,}" for name, count in texts.train.composition.items())
        epochs = resolved.steps * resolved.batch_size / len(texts.train)
        print_note(
            f"{len(texts.train):,} sequences of {resolved.length} tokens an epoch ({parts}); "
            f"{resolved.steps:,} steps of {resolved.batch_size} sequences are {epochs:.2f} epochs."
        )
        with plain_sentences(print_note):
            result = train(
                resolved,
                out,
                train=texts.train,
                validation=texts.validation,
                tokenizer=texts.tokenizer,
                resume=resume,
                portable=portable,
                report_to=report_to,
                notify=print_note,
            )
    except (ValueError, OSError) as problem:
        fail(problem)
    except KeyboardInterrupt:
        if out is not None and (out / RECIPE).exists():
            print_note(f"Stopped. The same command with --resume goes on with the run in {out}.")
        raise
    held = "" if result.eval_perplexity is None else f", held-out perplexity {result.eval_perplexity:.2f}"
    spent = f"{result.tokens:,} tokens in {result.seconds:.0f} s"
    print_result(f"Training loss {result.loss:.4f}{held} after {spent}: {out}")


def _recipe(
    name: str,
    family: str,
    size: str | None,
    steps: int | None,
    overrides: list[str],
    seed: int,
    refinement: str,
    regularizer: str | None,
    corpus: str,
) -> PretrainRecipe:
    """The named recipe with command-line overrides."""
    from dataclasses import replace

    from saobp.commands.refinement_option import parse_refinement_option
    from saobp.training.recipes import named_recipe, parse_override, with_steps

    resolved = named_recipe(name, family, size or ("tiny" if name == "tiny" else "mini"))
    if steps is not None:
        resolved = with_steps(resolved, steps)
    changes: dict[str, Any] = dict(parse_override(text) for text in overrides)
    changes |= {"seed": seed, "regularizer": regularizer, "corpus": corpus}
    changes["refinement"] = None if refinement == "none" else parse_refinement_option(refinement)
    return replace(resolved, **changes)
