"""Names of the files and folders of a run, and of runs of several seeds.

    recipe.json      kind of run and every resolved field
    record.json      status, command, commit, times, seed, data checksums, environment
    metrics.jsonl    one object a line: step, tokens, seconds, loss, ...; evaluations with step and eval_...
    health.jsonl     statistics per layer and head, and the strengths
    result.json      final numbers; it exists = the run is finished
    model/           the trained model and its tokenizer, with a manifest of checksums
    checkpoints/     step-000500/, each with a manifest of checksums
    seed-42/         such a folder for each seed of a fine-tuning run

``saobp diagnose`` writes diagnosis.json and explorer.json instead.
"""

from __future__ import annotations

from pathlib import Path

RECIPE, RECORD, RESULT = "recipe.json", "record.json", "result.json"
METRICS, HEALTH = "metrics.jsonl", "health.jsonl"
MODEL, CHECKPOINTS = "model", "checkpoints"
DIAGNOSIS, EXPLORER = "diagnosis.json", "explorer.json"
LOCK = ".lock"
"""Locked by the process that works on the run; removed when the run is finished."""
SEED = "seed-"


def seed_folder(folder: Path, seed: int) -> Path:
    """The run of one seed inside a fine-tuning run."""
    return folder / f"{SEED}{seed}"


def seed_folders(folder: Path) -> list[Path]:
    """The runs of single seeds inside a fine-tuning run."""
    return sorted(path for path in folder.glob(f"{SEED}*") if path.is_dir())


def run_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it."""
    if is_run(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir() and is_run(path)) or [folder]


def is_run(folder: Path) -> bool:
    """Whether any file of a run or of a diagnosis is there."""
    files = (RECIPE, RECORD, RESULT, METRICS, HEALTH, DIAGNOSIS, EXPLORER)
    return bool(seed_folders(folder)) or any((folder / name).is_file() for name in files)
