"""Refined models in the hands of other tools: meta device, offloading, quantisation, export."""

import copy
import warnings

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch.ao.quantization import quantize_dynamic
from transformers import (
    AutoModelForMaskedLM,
    CLIPConfig,
    CLIPModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
)
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.utils import decompose_prefill_decode

import saobp
from saobp.testing.tiny_models import DECODERS, FAMILIES, tiny_batch, tiny_model
from saobp.transformers import strength_parameters
from saobp.transformers.layer_refinement import named_refinements

ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize(("refinement", "expected"), [("high:0.7", 0.7), ("high:learned", 0.0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_the_meta_device_starts_with_its_strengths(family, refinement, expected):
    with torch.device("meta"):
        model = saobp.apply(tiny_model(family), refinement)
    assert all(own().is_meta for _, own in named_refinements(model))
    with torch.no_grad():
        model.to_empty(device="cpu")
        model.init_weights()
    for _, own in named_refinements(model):
        assert torch.equal(own().detach(), torch.full((4,), expected))


@pytest.mark.parametrize(("refinement", "expected"), [("high:0.7", 0.7), ("high:learned", 0.0)])
def test_sharding_that_starts_on_the_meta_device(refinement, expected, tmp_path):
    """As FSDP 2 starts: weights on the meta device are divided, made and initialised."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = saobp.apply(tiny_model("bert"), refinement)
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device="cpu")
        model.init_weights()
        for _, own in named_refinements(model):
            found = own().detach()
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert torch.equal(found, torch.full((4,), expected))
    finally:
        destroy_process_group()


def test_fixed_strengths_survive_to_empty_of_a_model_that_was_real():
    model = saobp.apply(tiny_model("bert"), "high:0.7").to_empty(device="cpu")
    assert all(torch.equal(own(), torch.full((4,), 0.7)) for _, own in named_refinements(model))


def test_another_implementation_is_noticed_once():
    model, batch = saobp.apply(tiny_model("llama"), "high:0.7"), tiny_batch()
    refined = logits(model, batch)
    model.config._attn_implementation = "eager"
    cure = r"'eager' was selected after.*set_attn_implementation\('saobp'\)"
    with pytest.warns(UserWarning, match=cure):
        plain = logits(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(model, batch)
    assert (plain - refined).abs().max() > 1e-3
    model.set_attn_implementation("saobp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(model, batch), refined)


def test_another_implementation_is_noticed_after_the_same_refinement_was_applied_again():
    model, batch = tiny_model("llama"), tiny_batch()
    for _ in range(2):
        saobp.apply(model, "high:0.7").set_attn_implementation("eager")
        with pytest.warns(UserWarning, match="'eager' was selected after"):
            logits(model, batch)


def test_another_implementation_is_noticed_in_a_part_of_a_refined_model():
    """Its first layer was not the first of the whole."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CLIPConfig(text_config=shape, vision_config={**shape, "image_size": 8, "patch_size": 4})
    model = saobp.apply(CLIPModel(config), "high:0.7")
    vision = saobp.apply(model.vision_model, "high:0.7")
    vision.set_attn_implementation("eager")
    with pytest.warns(UserWarning, match="'eager' was selected after"):
        vision(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("refinement", ["high:0.7", "high:learned"])
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offloaded_weights(kind, refinement, tmp_path):
    model, batch = saobp.apply(tiny_model("bert"), refinement), tiny_batch()
    for parameter in strength_parameters(model):
        torch.nn.init.constant_(parameter, 0.7)
    expected = logits(model, batch)
    if kind == "cpu":
        model = cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert next(model.parameters()).is_meta
    torch.testing.assert_close(logits(model, batch), expected)


@pytest.mark.parametrize("refinement", ["high:0.7", "high:learned"])
def test_a_device_map_with_offloading(refinement, tmp_path):
    model, batch = saobp.apply(tiny_model("bert"), refinement), tiny_batch()
    for parameter in strength_parameters(model):
        torch.nn.init.constant_(parameter, 0.7)
    model.save_pretrained(tmp_path / "model")
    devices = {"bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu", "cls": "cpu"}
    devices["bert.encoder.layer.1"] = "disk"
    options = {"device_map": devices, "offload_folder": tmp_path / "disk"}
    loaded = saobp.load(tmp_path / "model", AutoModelForMaskedLM, **options)
    assert loaded.bert.encoder.layer[1].output.dense.weight.is_meta
    torch.testing.assert_close(logits(loaded, batch), logits(model, batch))


@pytest.mark.parametrize("refinement", ["high:0.7", "high:learned"])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_dynamically_quantised_models(refinement):
    batch = tiny_batch()
    quantised = quantize_dynamic(tiny_model("bert"), {torch.nn.Linear})
    later = logits(saobp.apply(quantised, refinement), batch)
    earlier = logits(quantize_dynamic(saobp.apply(tiny_model("bert"), refinement), {torch.nn.Linear}), batch)
    torch.testing.assert_close(later, earlier)
    if refinement == "high:0.7":
        assert (later - logits(saobp.remove(quantised), batch)).abs().max() > 1e-3


def whisper():
    return WhisperConfig(
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        init_std=0.3,
    )


def test_the_encoder_of_an_encoder_decoder_is_refined_alone():
    torch.manual_seed(0)
    whole = WhisperForConditionalGeneration(whisper()).eval()
    sound = torch.randn(2, 8, 24)
    with pytest.raises(ValueError, match=r"cross-attention.*get_encoder\(\)"):
        saobp.apply(whole, "high:0.7")
    encoder = whole.get_encoder()
    with torch.no_grad():
        plain = encoder(sound).last_hidden_state
        refined = saobp.apply(encoder, "high:0.7")(sound).last_hidden_state
        zero = saobp.apply(encoder, "high:0")(sound).last_hidden_state
    torch.testing.assert_close(zero, plain, **ROUNDING)
    assert (refined - plain).abs().max() > 1e-3
    assert saobp.apply(WhisperForAudioClassification(whisper()), "high:0.7").config.saobp["strength"] == 0.7
    with pytest.raises(ValueError, match="cross-attention"):
        saobp.apply(whole.model.decoder, "high:0.7")


def test_generating_by_implementation_name_names_the_cure(tmp_path):
    saobp.apply(tiny_model("llama"), "high:0.7").save_pretrained(tmp_path)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path))
    batch = tiny_batch(batch=1)
    with pytest.raises(ValueError, match=r"saobp\.load\(path, AutoClass\)"):
        model.generate(**batch, max_new_tokens=3)


@pytest.mark.parametrize("refinement", ["high:0.7", "high:learned"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoding_step_is_exported(family, refinement):
    model, batch = saobp.apply(tiny_model(family), refinement), tiny_batch(batch=2, padding=0)
    for parameter in strength_parameters(model):
        torch.nn.init.constant_(parameter, 0.7)
    parts = decompose_prefill_decode(model, batch)
    for part, inputs in parts.values():
        inputs = {name: value for name, value in inputs.items() if value is not None}
        given = copy.deepcopy(inputs)
        with torch.no_grad():
            expected = part(**copy.deepcopy(inputs)).logits
        program = DynamoExporter().export(part, inputs, DynamoConfig())  # takes flags out of the inputs
        program = getattr(program, "program", program)  # Transformers 5.23 wraps it
        found = program.module()(**{name: given[name] for name in inputs}).logits
        torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.parametrize("family", DECODERS)
def test_gradients_reach_returned_maps_in_a_cached_call(family):
    model, batch = saobp.apply(tiny_model(family), "high:0.7"), tiny_batch()
    result = model(**batch, output_attentions=True, past_key_values=DynamicCache(), use_cache=True)
    for rows in result.attentions:
        rows.retain_grad()
    result.logits.sum().backward()
    assert all(rows.grad is not None and rows.grad.abs().max() > 0 for rows in result.attentions)


def test_gradients_reach_returned_maps_of_a_prompt_in_chunks(monkeypatch):
    model, batch = saobp.apply(tiny_model("llama"), "high:0.7"), tiny_batch()
    expected = model(**batch, output_attentions=True, use_cache=False)
    monkeypatch.setattr("saobp.transformers.cache.ROWS_PER_CHUNK", 4)
    result = model(**batch, output_attentions=True, past_key_values=DynamicCache(), use_cache=True)
    torch.testing.assert_close(result.logits, expected.logits, **ROUNDING)
    result.attentions[0].retain_grad()
    result.logits.sum().backward()
    assert result.attentions[0].grad.abs().max() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_through_a_model(family):
    model, batch = saobp.apply(tiny_model(family), "high:0.7"), tiny_batch()
    expected = logits(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        real = batch["attention_mask"].bool()
        difference = (logits(model, batch).float() - expected)[real].abs().mean()
    assert difference < 0.1 * expected[real].abs().mean()
