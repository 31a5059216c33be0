"""PEFT: adapters of refined models are trained, saved, reloaded and merged with their strengths."""

import warnings

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, CLIPTextModel, CLIPVisionModel

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import strength_parameters
from saobp.transformers.layer_refinement import named_refinements

peft = pytest.importorskip("peft")
TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def adapted(family, refinement, **options):
    config = peft.LoraConfig(r=2, target_modules=TARGETS[family], **options)
    return peft.get_peft_model(saobp.apply(tiny_model(family), refinement), config)


def train(model, steps=5):
    batch = tiny_batch()
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["saobp"]}])
def test_learned_strengths_are_trained_saved_reloaded_and_merged(family, options, tmp_path):
    model, batch = train(adapted(family, "high:learned", **options)), tiny_batch()
    strengths = [values.detach().clone() for values in strength_parameters(model)]
    assert len(strengths) == 2
    assert all(values.abs().max() > 0.01 for values in strengths)
    expected = logits(model, batch)
    model.save_pretrained(tmp_path)
    base = saobp.apply(tiny_model(family), "high:learned")
    assert (logits(base, batch) - expected).abs().max() > 1e-2
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    for own, values in zip(strength_parameters(again), strengths, strict=True):
        assert torch.equal(own, values)
        assert not own.requires_grad
    torch.testing.assert_close(logits(again, batch), expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged, batch), expected, rtol=1e-4, atol=1e-4)
    assert type(merged) is type(tiny_model(family))
    merged.save_pretrained(tmp_path / "merged")
    loaded = saobp.load(tmp_path / "merged", type(merged))
    torch.testing.assert_close(logits(loaded, batch), expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_an_adapter_in_it_is_not_saved_as_a_refined_model(tmp_path):
    model = adapted("bert", "high:learned")
    for given in (model, model.get_base_model()):
        with pytest.raises(ValueError, match=r"has an adapter \(PEFT\): save what .*merge_and_unload"):
            saobp.save(given, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_disabled_adapter_shows_the_base():
    base = saobp.apply(tiny_model("bert"), "high:learned")
    for parameter in strength_parameters(base):
        torch.nn.init.constant_(parameter, 0.7)
    expected, batch = logits(base, tiny_batch()), tiny_batch()
    model = train(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=TARGETS["bert"])))
    assert (logits(model, batch) - expected).abs().max() > 1e-2
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, batch), expected)
        assert all((own() == 0.7).all() for _, own in named_refinements(model))


def test_an_adapted_decoder_generates():
    model, batch = train(adapted("llama", "high:learned")), tiny_batch(batch=1)
    options = {"max_new_tokens": 5, "do_sample": False}
    cached = model.generate(**batch, **options)
    assert torch.equal(cached, model.generate(**batch, **options, use_cache=False))


@pytest.mark.parametrize("refinement", ["high:0.7", "high:learned"])
def test_an_adapter_of_a_refined_model_warns_on_a_plain_one(refinement, tmp_path):
    model, batch = train(adapted("bert", refinement)), tiny_batch()
    expected = logits(model, batch)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"made for a model with refined attention.*saobp\.apply"):
        plain = peft.PeftModel.from_pretrained(tiny_model("bert"), tmp_path)
    assert (logits(plain, batch) - expected).abs().max() > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT may be behind Transformers
        again = peft.PeftModel.from_pretrained(saobp.apply(tiny_model("bert"), refinement), tmp_path)
    torch.testing.assert_close(logits(again, batch), expected)


def test_strengths_that_come_after_the_adapter_are_not_saved_with_it(recwarn):
    config = peft.LoraConfig(target_modules=TARGETS["llama"])
    base = peft.get_peft_model(tiny_model("llama"), config).get_base_model()
    saobp.apply(base, "high:0.7")
    assert not [one for one in recwarn if "saobp" in str(one.message)]
    with pytest.warns(UserWarning, match=r"does not save learned strengths: call saobp.apply on the base"):
        saobp.apply(base, "high:learned")


@pytest.mark.parametrize("trainable", [False, True])
def test_an_adapter_of_a_plain_model_on_a_refined_one_leaves_its_strengths(trainable, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=TARGETS["bert"])
    train(peft.get_peft_model(tiny_model("bert"), config)).save_pretrained(tmp_path)
    base = saobp.apply(tiny_model("bert"), "high:learned")
    for parameter in strength_parameters(base):
        torch.nn.init.constant_(parameter, 0.7)
    with pytest.warns(UserWarning, match="adapter holds no learned strengths"):
        model = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=trainable)
    assert all((own() == 0.7).all() for _, own in named_refinements(model))
    assert torch.isfinite(logits(model, tiny_batch())).all()


def test_an_adapter_of_a_plain_model_is_left_alone():
    config = peft.LoraConfig(r=2, target_modules=TARGETS["bert"])
    peft.get_peft_model(tiny_model("bert"), config)
    assert config.modules_to_save is None


def test_adapters_that_transformers_puts_in():
    model, batch = saobp.apply(tiny_model("bert"), "high:learned"), tiny_batch()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=TARGETS["bert"]))
    train(model)
    assert all(values.abs().max() > 0.01 for values in strength_parameters(model))
    assert torch.isfinite(logits(model, batch)).all()


def clip():
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tower, "vocab_size": 64, "max_position_embeddings": 16, "initializer_range": 0.3}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**tower, "image_size": 16, "patch_size": 4, "initializer_range": 0.3}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()


LISTED = saobp.Refinement("high", [0.1, 0.2, 0.7, [0.8, 0.9, 1.0, 1.1]])


@pytest.mark.parametrize("refinement", ["high:0.7", "high:learned", LISTED])
def test_a_tower_of_a_refined_model_is_loaded_by_its_own_class(refinement, tmp_path):
    model = saobp.apply(clip(), refinement)
    for layer, parameter in enumerate(strength_parameters(model)):
        torch.nn.init.constant_(parameter, 0.3 + layer)
    model.save_pretrained(tmp_path)
    pixels, ids = torch.randn(2, 3, 16, 16), tiny_batch()["input_ids"]
    with torch.no_grad():
        expected = model.vision_model(pixels).pooler_output, model.text_model(ids).pooler_output
    with torch.no_grad():
        torch.testing.assert_close(
            CLIPVisionModel.from_pretrained(tmp_path)(pixels).pooler_output, expected[0]
        )
    vision, text = saobp.load(tmp_path, CLIPVisionModel), saobp.load(tmp_path, CLIPTextModel)
    with torch.no_grad():
        torch.testing.assert_close(vision(pixels).pooler_output, expected[0])
        torch.testing.assert_close(text(ids).pooler_output, expected[1])
    whole = saobp.load(tmp_path, CLIPModel)
    for (_, own), (_, other) in zip(named_refinements(whole), named_refinements(model), strict=True):
        assert torch.equal(own(), other())
    saobp.remove(whole)
    assert not any(hasattr(config, "saobp") for config in (whole.config, whole.config.vision_config))
