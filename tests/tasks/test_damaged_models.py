"""Damaged files of a saved model are refused in one sentence that names the file."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from saobp.cli import app
from saobp.data.tasks import load_task
from saobp.storage.manifest import check_manifest, write_manifest
from saobp.training.evaluation.run import load_language_model
from saobp.training.finetune import finetune, recipe_for


def test_a_damaged_model_of_a_run_is_refused(data_dir, bert, tmp_path):
    """One changed bit of its weights loads without an error and trains to another result."""
    model = tmp_path / "run" / "model"
    shutil.copytree(bert, model)
    write_manifest(model)
    check_manifest(model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    told = r"damaged, because model\.safetensors is not what was written: restore it or train it again"
    with pytest.raises(ValueError, match=told):
        finetune(
            tmp_path / "run",
            load_task("rte", data_dir),
            tmp_path / "tuned",
            recipe=recipe_for("rte", length=64),
        )
    with pytest.raises(ValueError, match=told):
        load_language_model(tmp_path / "run")
    (model / "manifest.json").unlink()
    load_language_model(tmp_path / "run")


def test_a_language_model_without_its_head_is_not_measured(bert, tmp_path):
    """Sentence encoders are saved so: their config names a language model, and its head would be random."""
    shutil.copytree(bert, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = {name: values for name, values in load_file(path).items() if "transform" not in name}
    save_file(weights, path, metadata={"format": "pt"})
    told = r"lacks weights of BertForMaskedLM, such as cls\.predictions\.transform\.\S+, and random ones"
    with pytest.raises(ValueError, match=told):
        load_language_model(tmp_path / "model")


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


def _pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save(Hostile(), folder / "pytorch_model.bin")


def _no_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


def _of_sentence_transformers(folder):
    """Weights of another size, beside a list that belongs there."""
    (folder / "modules.json").write_text('[{"idx": 0, "type": "sentence_transformers.models.Transformer"}]')
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


def _written(name, content):
    return lambda folder: (folder / name).write_text(content)


DAMAGES = [
    (_written("model.safetensors", ""), r"model\.safetensors is damaged"),
    (_written("config.json", "3"), r"config\.json holds no JSON object but 3"),
    (_written("config.json", "["), r"config\.json is not JSON"),
    (_written("tokenizer.json", "["), r"tokenizer\.json is not JSON"),
    (_of_sentence_transformers, "cannot load .* weights have other sizes than config.json says"),
    (_pickled, r"pytorch_model\.bin holds more than weights"),
    (_no_tokenizer, "holds no tokenizer"),
]


@pytest.mark.parametrize(("harm", "told"), DAMAGES)
def test_a_damaged_file_of_a_model_is_named_in_one_sentence(data_dir, bert, tmp_path, harm, told):
    model = tmp_path / "model"
    shutil.copytree(bert, model)
    harm(model)
    line = ["finetune", "--model", str(model), "--data-dir", str(data_dir), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, [*line, "--task", "rte", "--epochs", "1"])
    assert answer.exit_code == 1
    assert isinstance(answer.exception, SystemExit)
    last = " ".join(answer.output.split("rte failed:")[-1].split())
    assert re.search(told, last), last
    assert "Traceback" not in answer.output
