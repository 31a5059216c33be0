"""Folders of runs for the tests of the arena."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from saobp.training.recipes import named_recipe


def made_up_run(folder: Path, family: str, method: str, seed: int, loss: float, **changes: Any) -> None:
    recipe = named_recipe("modern", family, "mini").to_dict()
    key = "regularizer" if method == "entropy" else "refinement"
    recipe |= {"kind": "pretrain", "seed": seed, key: None if method == "none" else method, **changes}
    result = {"eval_loss": loss, "parameters": 11_000_000, "tokens_per_second": 1e6}
    record = {"status": "finished", "seed": seed, "commit": "abc", "data": {"text": "sum"}}
    record |= {"command": "saobp pretrain", "environment": {}}
    record["started"] = "later" if changes else "before"
    folder /= f"{family}-{method.replace(':', '-')}-{seed}"
    folder.mkdir(parents=True)
    for name, content in (("recipe", recipe), ("record", record), ("result", result)):
        (folder / f"{name}.json").write_text(json.dumps(content))
