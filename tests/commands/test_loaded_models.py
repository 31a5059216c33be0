"""The loaders behind the commands: the same folders are refused, and ``none`` takes a refinement off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModel, PreTrainedModel

from saobp.export.token_model import load_token_model
from saobp.metrics.diagnosis.loading import load_model
from saobp.refinement import Refinement
from saobp.storage.manifest import write_manifest
from saobp.testing.tiny_models import save_tiny_bert
from saobp.training import checkpoints
from saobp.training.evaluation.run import load_language_model

Loader = Callable[[str, Refinement | None], PreTrainedModel]
LOADERS: dict[str, Loader] = {
    "diagnose, explore, report": lambda name, asked: load_model(name, asked)[0],
    "export": lambda name, asked: load_token_model(name, asked).model,
    "evaluate": lambda name, asked: load_language_model(name, asked)[0],
    "finetune": lambda name, asked: checkpoints.load_model(name, AutoModel, asked),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("refined")
    save_tiny_bert(made, "high:2")
    return made


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_model_is_refined_as_saved_or_as_asked(load: Loader, folder: Path) -> None:
    assert load(str(folder), None).config.saobp["strength"] == 2.0
    assert load(str(folder), Refinement("low", 0.5)).config.saobp["factor"] == "low"
    assert not hasattr(load(str(folder), Refinement("none")).config, "saobp")


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "finetune"])
def test_files_that_differ_from_the_manifest_are_refused(name: str, tmp_path: Path) -> None:
    save_tiny_bert(tmp_path)
    write_manifest(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-02'))
    with pytest.raises(ValueError, match=r"is damaged, because config\.json is not what was written"):
        LOADERS[name](str(tmp_path), None)
