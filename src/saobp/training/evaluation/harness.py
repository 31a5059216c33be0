"""The same tasks through lm-evaluation-harness, if installed: its prompts and scoring, our rows."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from saobp.data.tasks import Split
from saobp.training.evaluation.zero_shot import articles_of, positions_of

_FILES = {
    "race-middle": "race/race.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "blimp": "blimp/_template_yaml",
}


def has_harness() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def require_harness() -> None:
    if not has_harness():
        raise ValueError("--harness needs lm-evaluation-harness: pip install 'saobp[harness]'")


def harness_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    split: Split,
    *,
    every: bool = False,
) -> dict[str, Any]:
    """Accuracy in percent as the harness finds it, by its own definition of the task on our rows.

    ``every``: RACE with every question as an article of its own.
    """
    require_harness()
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    documents = datasets.Dataset.from_list(_documents(task, split, every))
    config = harness_definition(task)
    name = f"saobp_{task.replace('-', '_')}"
    for unused in ("dataset_path", "dataset_name", "tag", "training_split", "validation_split"):
        config.pop(unused, None)
    config |= {"task": name, "test_split": "test", "custom_dataset": lambda **_: {"test": documents}}
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16, max_length=positions_of(model))
    with _silent_stderr():
        output = simple_evaluate(
            model=wrapped,
            tasks=[ConfigurableTask(config=config)],
            task_manager=TaskManager(include_defaults=False),  # its own would read thousands of definitions
            bootstrap_iters=0,
            log_samples=False,
        )
    assert output is not None
    return {"accuracy": 100 * output["results"][name]["acc,none"], "questions": len(documents)}


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Context without the harness's progress bars and git's complaint where there is no repository."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def harness_definition(task: str) -> dict[str, Any]:
    """The harness's own definition of a task, read from its files."""
    import lm_eval.tasks

    path = Path(next(iter(lm_eval.tasks.__path__)), _FILES[task])

    class Loader(yaml.SafeLoader):
        """YAML loader with the harness's ``!function`` tag."""

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Callable[..., Any]:
        module, _, name = str(loader.construct_scalar(node)).rpartition(".")
        spec = importlib.util.spec_from_file_location(module, path.parent / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return getattr(loaded, name)

    Loader.add_constructor("!function", function)
    config: dict[str, Any] = yaml.load(path.read_text(), Loader)
    return config


def _documents(task: str, split: Split, every: bool) -> list[dict[str, Any]]:
    """Rows in the shape that the harness's definitions read."""
    if task == "blimp":
        return split.table.to_pylist()
    if task == "boolq":
        rows = zip(split.column("passage"), split.column("question"), split.labels.tolist(), strict=True)
        return [
            {"passage": passage, "question": question, "label": label} for passage, question, label in rows
        ]
    names = ("question", "answer", "options")
    return [
        {
            "article": rows[0]["article"],
            "problems": repr([{name: row[name] for name in names} for row in rows]),
        }
        for rows in articles_of(split, every=every)
    ]
