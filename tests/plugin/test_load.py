"""Saving and loading a refined model in the ways that users do."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertForMaskedLM,
    PreTrainedModel,
)

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import strength_parameters
from saobp.transformers.layer_refinement import named_refinements


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


@pytest.fixture
def learned(tmp_path):
    model = saobp.apply(tiny_model("bert"), "high:learned")
    for layer, parameter in enumerate(strength_parameters(model)):
        parameter.data = torch.tensor([0.5, -0.5, 1.0, 0.1]) * (layer + 1)
    model.save_pretrained(tmp_path / "learned")
    return model, tmp_path / "learned"


@pytest.mark.parametrize("auto_class", [AutoModelForMaskedLM, BertForMaskedLM])
def test_auto_classes_and_classes_load(learned, auto_class):
    model, path = learned
    loaded = saobp.load(path, auto_class)
    assert type(loaded) is BertForMaskedLM
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    torch.testing.assert_close(logits(loaded, tiny_batch()), logits(model, tiny_batch()))


def test_loading_takes_the_options_of_from_pretrained(learned):
    _, path = learned
    loaded = saobp.load(path, AutoModelForMaskedLM, dtype=torch.bfloat16, attn_implementation="eager")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert strength_parameters(loaded)[1][2] == 2
    assert saobp.remove(loaded).config._attn_implementation == "eager"


def test_asking_for_the_implementation_by_name_changes_nothing(learned):
    model, path = learned
    loaded = saobp.load(str(path), AutoModelForMaskedLM, attn_implementation="saobp")
    torch.testing.assert_close(logits(loaded, tiny_batch()), logits(model, tiny_batch()))
    assert saobp.remove(loaded).config._attn_implementation != "saobp"


def test_sharded_checkpoints_load(learned, tmp_path):
    model, _ = learned
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    loaded = saobp.load(tmp_path / "shards", AutoModelForMaskedLM)
    torch.testing.assert_close(logits(loaded, tiny_batch()), logits(model, tiny_batch()))


def test_the_body_of_a_saved_model_loads_with_its_strengths(learned):
    model, path = learned
    body = saobp.load(path, AutoModel)
    for own, expected in zip(strength_parameters(body), strength_parameters(model), strict=True):
        assert torch.equal(own, expected)


def test_a_loaded_model_saves_and_loads_again(learned, tmp_path):
    _, path = learned
    loaded = saobp.load(path, AutoModelForMaskedLM)
    loaded.save_pretrained(tmp_path / "again")
    again = saobp.load(tmp_path / "again", AutoModelForMaskedLM)
    assert again.config.architectures == ["BertForMaskedLM"]
    torch.testing.assert_close(logits(again, tiny_batch()), logits(loaded, tiny_batch()))


def test_a_loaded_decoder_generates(tmp_path):
    model = saobp.apply(tiny_model("llama"), saobp.Refinement("high", [[0.5] * 4, [0.1, 0.2, 0.3, 0.4]]))
    model.save_pretrained(tmp_path)
    loaded = saobp.load(tmp_path, AutoModelForCausalLM)
    for (_, own), (_, expected) in zip(named_refinements(loaded), named_refinements(model), strict=True):
        assert torch.equal(own(), expected())
    ids = tiny_batch(batch=1)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


def test_a_removed_refinement_is_not_saved(learned, tmp_path):
    model, _ = learned
    saobp.remove(model).save_pretrained(tmp_path / "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BertForMaskedLM.from_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"no config\.saobp"):
        saobp.load(tmp_path / "plain", AutoModelForMaskedLM)


@pytest.mark.parametrize("auto_class", [AutoModelForMaskedLM, BertForMaskedLM])
def test_a_saved_model_names_its_attention_so_from_pretrained_refines_it(learned, auto_class):
    model, path = learned
    assert json.loads((path / "config.json").read_text())["attn_implementation"] == "saobp"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = auto_class.from_pretrained(path)
    assert torch.equal(logits(loaded, tiny_batch()), logits(model, tiny_batch()))
    assert saobp.remove(loaded).config._attn_implementation == "sdpa"


def test_a_saved_model_asked_for_other_attention_warns(learned):
    _, path = learned
    with pytest.warns(UserWarning, match=r"saobp\.load\(path, BertForMaskedLM\)"):
        AutoModelForMaskedLM.from_pretrained(path, attn_implementation="eager")


def test_a_saved_model_does_not_load_where_its_attention_is_unknown(learned, monkeypatch):
    """As in a process without saobp, where no implementation of that name is registered."""
    monkeypatch.delitem(AttentionInterface._global_mapping, "saobp")
    _, path = learned
    original = PreTrainedModel.from_pretrained.__func__.__wrapped__
    with pytest.raises(ValueError, match='attn_implementation="saobp"` is not supported'):
        original(BertForMaskedLM, path)


def test_a_checkpoint_without_its_strengths_is_refused(learned):
    _, path = learned
    file = path / "model.safetensors"
    tensors = {name: values for name, values in load_file(file).items() if "saobp" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks its learned strengths"):
        saobp.load(path, AutoModelForMaskedLM)


def test_loading_info_is_refused(learned):
    with pytest.raises(ValueError, match="output_loading_info"):
        saobp.load(learned[1], AutoModelForMaskedLM, output_loading_info=True)


def test_the_class_is_found_from_the_config(learned, tmp_path):
    model, path = learned
    loaded = saobp.load(path)
    assert type(loaded) is BertForMaskedLM
    torch.testing.assert_close(logits(loaded, tiny_batch()), logits(model, tiny_batch()))
    model.config.architectures = None
    model.config.save_pretrained(tmp_path / "nameless")
    with pytest.raises(ValueError, match="names no class, which Transformers does not have: give a class"):
        saobp.load(tmp_path / "nameless")
