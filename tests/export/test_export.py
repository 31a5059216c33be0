"""Exported models give PyTorch's numbers at any batch and length; what cannot be exported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.export import folder as export_folder
from saobp.export.folder import Difference, difference, export
from saobp.export.formats import open_onnx
from saobp.export.token_model import TokenModel, token_model
from saobp.testing.tiny_models import tiny_model
from saobp.transformers import strength_parameters

SHAPES = [(1, 1), (2, 2), (1, 9), (5, 3), (2, 31)]
"""Rows and lengths other than the traced ones."""


def refined(family: str, refinement: str, learned: float = 0.7, **options: Any) -> TokenModel:
    torch.manual_seed(0)
    model = saobp.apply(tiny_model(family, **options), refinement)
    for parameter in strength_parameters(model):
        torch.nn.init.constant_(parameter, learned)
    return token_model(model)


def test_a_program_of_torch_export_gives_the_numbers_of_the_model(tmp_path: Path) -> None:
    model = refined("bert", "high:learned", num_hidden_layers=1)
    result = export(model, tmp_path / "new", "exported", length=8, batches=(1,))
    assert result.difference.is_within_tolerance
    loaded = torch.export.load(result.file).module()

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return loaded(*tensors)

    assert difference(model, run, SHAPES).is_within_tolerance
    plain = token_model(saobp.remove(model.model))
    assert difference(plain, run, SHAPES).absolute > 1e-3
    record = json.loads((tmp_path / "new" / "export.json").read_text())
    assert record["refinement"] == {**record["refinement"], "factor": "high", "strength": "learned"}
    assert [one["batch"] for one in record["milliseconds"]] == [1]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"config.json", "export.json", "model.pt2"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "refinement", "learned"),
    [
        ("bert", "high:0.2", 0.0),
        ("bert", "high:learned", 6.0),
        ("bert", "elemmul", 0.0),
        ("modernbert", "high:learned", -0.7),
        ("gpt2", "high:learned", 0.7),
        ("llama", "low:0.5", 0.0),
        ("llama", "high:0.5,steps=2", 0.0),
    ],
)
def test_onnxruntime_gives_the_numbers_of_the_model(
    tmp_path: Path, family: str, refinement: str, learned: float
) -> None:
    model = refined(family, refinement, learned)
    result = export(model, tmp_path / "new", "onnx", length=16, batches=(1,))
    assert difference(model, open_onnx(result.file, 1), SHAPES).is_within_tolerance


@pytest.mark.slow
def test_executorch_gives_the_numbers_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip(
        "executorch.exir", reason="ExecuTorch is not installed: pip install 'saobp[executorch]'"
    )
    model = refined("bert", "high:learned")
    result = export(model, tmp_path / "new", "executorch", length=8, batches=(1,))
    assert result.difference.is_within_tolerance
    assert result.file.name == "model.pte"


@pytest.mark.slow
def test_a_classifier_of_pairs_is_exported_by_the_command(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=64, num_labels=3, max_position_embeddings=32, **shape)
    model = saobp.apply(BertForSequenceClassification(config), "high:0.3/0.1")
    model.save_pretrained(tmp_path / "model")
    line = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "new"), "--length", "16", "--int8"]
    said = CliRunner().invoke(app, line)
    assert said.exit_code == 0, said.output
    assert "times as fast" in said.stdout
    record = json.loads((tmp_path / "new" / "export.json").read_text())
    assert record["inputs"] == ["input_ids", "attention_mask", "token_type_ids"]
    assert record["outputs"] == ["logits"]
    assert 1e-5 < record["largest difference from PyTorch"] < 0.1
    assert [path.name for path in (tmp_path / "new").glob("*.onnx*")] == ["model.onnx"]


def test_what_cannot_be_exported_is_refused() -> None:
    with pytest.warns(UserWarning, match="messages of later rows"):
        leaking = saobp.apply(tiny_model("gpt2"), "high:0.2,future=paper")
    with pytest.raises(ValueError, match=r"do not exist yet while a text is generated.*future='strict'"):
        token_model(leaking)
    image = {"image_size": 8, "patch_size": 4, "num_hidden_layers": 1, "hidden_size": 8}
    vision = ViTForImageClassification(ViTConfig(num_attention_heads=2, intermediate_size=8, **image))
    with pytest.raises(ValueError, match="takes pixel_values: saobp export writes models of tokens"):
        token_model(vision)
    model = tiny_model("bert")
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="an encoder with a decoder"):
        token_model(model)


def test_nothing_is_overwritten_and_nothing_wrong_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = refined("bert", "high:0.2")
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(ValueError, match="is there already, and nothing is overwritten"):
        export(model, there, "exported")
    with pytest.raises(ValueError, match="knows 64 positions, fewer than --length 65"):
        export(model, tmp_path / "new", "exported", length=65)
    with pytest.raises(ValueError, match="int8 weights are written as ONNX"):
        export(model, tmp_path / "new", "exported", int8=True)
    monkeypatch.setattr(export_folder, "exported_program", lambda *_: None)
    monkeypatch.setattr(export_folder, "write_exported", lambda _, path: path.write_text("wrong"))
    monkeypatch.setattr(export_folder, "difference", lambda *_: Difference(0.01, 3.0))
    with pytest.raises(ValueError, match=r"apart from PyTorch's by 0\.01.*nothing was written"):
        export(model, tmp_path / "new", "exported", length=8)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_program_that_cannot_be_traced_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = refined("bert", "high:0.2", num_hidden_layers=1)
    model.model.bert.register_forward_pre_hook(lambda *_: bool(torch.ones(()).item() > torch.rand(()).item()))
    with pytest.raises(ValueError, match=r"^BertForMaskedLM cannot be exported with any batch and length"):
        export(model, tmp_path / "new", "exported", length=8)
    assert not list(tmp_path.iterdir())
