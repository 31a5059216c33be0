"""What saobp.apply and saobp.probe say to many model families: prints what docs/models.md sums up.

Not a test: it builds a tiny random model per family, by shrinking the sizes that its config happens to name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTextEncoding,
    DynamicCache,
    PreTrainedModel,
)
from transformers.models.auto import CONFIG_MAPPING
from transformers.utils import logging

import saobp
from saobp import metrics
from saobp.testing.tiny_models import tiny_batch

ENCODERS = """albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra
    ernie esm eurobert funnel layoutlm longformer megatron-bert mobilebert modernbert mpnet nystromformer
    rembert roberta roberta-prelayernorm roformer squeezebert xlm-roberta"""
DECODERS = """biogpt bloom codegen cohere cohere2 ctrl falcon gemma gemma2 gemma3_text glm gpt2 gpt_neo
    gpt_neox gpt_oss gptj granite helium llama mistral mixtral mpt olmo olmo2 olmo3 opt persimmon phi phi3
    qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2 xglm"""
ENCODERS_ALONE = "mt5 t5 umt5"
IMAGES = "dinov2 siglip_vision_model vit"
WITH_DECODER = "bart bigbird_pegasus fsmt led longt5 mt5 prophetnet t5 umt5 whisper"
OTHERS = """canine flaubert gpt_neox_japanese ibert mamba minimax openai-gpt reformer rwkv tapas visual_bert
    xlm xlnet yoso"""
ENCODERS, DECODERS, ENCODERS_ALONE, IMAGES, WITH_DECODER, OTHERS = (
    names.split() for names in (ENCODERS, DECODERS, ENCODERS_ALONE, IMAGES, WITH_DECODER, OTHERS)
)
ALONE = " (encoder)"
"""Suffix of kinds of which the encoder alone is built."""

SMALL = {
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads",
    2: """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_key_value_heads
        num_local_experts num_experts num_experts_per_tok num_decoder_layers type_vocab_size""",
    8: "patch_size head_dim d_kv attention_window block_size embedding_per_head rotary_dim",
    32: """image_size hidden_size n_embd d_model dim embedding_size intra_bottleneck_size true_hidden_size
        n_embed moe_intermediate_size shared_expert_intermediate_size hidden_size_per_layer_input""",
    64: """vocab_size intermediate_size n_inner ffn_dim d_ff hidden_dim d_inner encoder_ffn_dim
        decoder_ffn_dim max_position_embeddings n_positions n_ctx dff""",
}
LENGTH = 9


def tiny(kind: str) -> PreTrainedModel:
    alone, kind = kind.endswith(ALONE), kind.removesuffix(ALONE)
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    options: dict[str, Any] = {}
    for value, names in SMALL.items():
        options.update({name: value for name in names.split() if getattr(default, name, None) is not None})
    if kind == "funnel":
        options = {"vocab_size": 64, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
    if kind == "xlnet":
        options = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    if kind == "reformer":
        options = {"attn_layers": ["local"], "vocab_size": 64, "hidden_size": 32, "feed_forward_size": 32}
        options.update(axial_pos_embds=False, num_attention_heads=4, attention_head_size=8)
        options.update(max_position_embeddings=64)
    if kind == "prophetnet":
        options = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2)
        options.update(vocab_size=64, hidden_size=32, encoder_ffn_dim=32, decoder_ffn_dim=32)
        options.update(num_encoder_attention_heads=4, num_decoder_attention_heads=4)
    if kind == "whisper":
        options["max_source_positions"] = 16
    if kind == "falcon":
        options.pop("head_dim")
    if kind == "gpt_neo":
        options["attention_types"] = [[["global"], 2]]
    if kind in (
        "roberta",
        "camembert",
        "xlm-roberta",
        "data2vec-text",
        "roberta-prelayernorm",
        "esm",
        "mpnet",
    ):
        options["max_position_embeddings"] = 80
    if kind == "esm":
        options.update(vocab_size=64, mask_token_id=3)
    options.update(pad_token_id=0, initializer_range=0.2)
    layer_types = getattr(default, "layer_types", None)
    if layer_types and kind != "mamba":
        options["layer_types"] = layer_types[:2] if len(set(layer_types[:2])) > 1 else layer_types[-2:]
    if getattr(default, "sliding_window", None):
        options["sliding_window"] = 4
    config = config_class(**options)
    auto = AutoModelForTextEncoding if alone else AutoModel
    if kind in (*ENCODERS, *DECODERS):
        auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device("meta"):
        size = auto.from_config(config).num_parameters()
    if size > 5e6:
        raise RuntimeError(f"too large to build here ({size / 1e6:.0f} M)")
    config = config_class(**options)
    return auto.from_config(config).eval()


def logits(model: PreTrainedModel, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch, **options)[0]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-3 * (1 + b.abs().max()))


def refines(kind: str, model: PreTrainedModel) -> str:
    saobp.remove(saobp.apply(model, "high:0"))
    if kind in IMAGES:
        images = {"pixel_values": torch.rand(2, 3, 32, 32)}
        plain = logits(saobp.apply(model, "high:0"), images)
        saobp.remove(model).set_attn_implementation("eager")
        eager = logits(model, images)
        changed = bool((logits(saobp.apply(model, "high:0.7"), images) - plain).abs().max() > 1e-6)
        return "works (softmax at 0)" if close(plain, eager) and changed else "FAILS"
    batch = tiny_batch(length=LENGTH)
    real = batch["attention_mask"].bool()
    model.set_attn_implementation("eager")
    eager = logits(model, batch)
    plain = logits(saobp.apply(model, "high:0"), batch)
    failed = [] if close(plain[real], eager[real]) else ["strength 0 differs from eager"]
    saobp.apply(model, "high:0.7")
    strong = logits(model, batch)
    if not (strong - plain).abs().max() > 1e-6:
        failed.append("a strength changes nothing")
    short = {name: values[1:, :-3] for name, values in batch.items()}
    if not close(strong[1:, :-3], logits(model, short)):
        failed.append("padding changes the result")
    done = "softmax at 0, padding"
    if kind in DECODERS:
        one = {"input_ids": batch["input_ids"][:1]}
        changed = {"input_ids": one["input_ids"].clone()}
        changed["input_ids"][:, 5:] = 7
        if not close(logits(model, changed)[:, :5], logits(model, one)[:, :5]):
            failed.append("later tokens change earlier rows")
        cache = DynamicCache(config=model.config)
        whole = logits(model, one, use_cache=False)
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            step = {"input_ids": one["input_ids"][:, start:stop]}
            if not close(logits(model, step, past_key_values=cache), whole[:, start:stop]):
                failed.append("cached decoding differs")
                break
        done += ", causality, cache"
    return f"works ({done})" if not failed else f"FAILS: {'; '.join(failed)}"


def measures(kind: str, model: PreTrainedModel) -> str:
    """Also checks that a measured forward gives the same result, and the first layer's GTD, with padding."""
    batch = tiny_batch(length=LENGTH)
    if kind in WITH_DECODER:
        batch["decoder_input_ids"] = batch["input_ids"].clamp(min=3)
        batch["decoder_attention_mask"] = batch["attention_mask"]
    if kind in IMAGES:
        batch = {"pixel_values": torch.rand(2, 3, 32, 32)}
    if kind == "fsmt":
        batch["use_cache"] = False  # with a cache its decoder sees later tokens, and padding
    if kind == "whisper":
        ids = batch["decoder_input_ids"]
        batch = {"input_features": torch.rand(2, model.config.num_mel_bins, 32), "decoder_input_ids": ids}
    plain = logits(model, batch)
    with saobp.probe(model) as health:
        measured = logits(model, batch)
    failed = [] if close(measured, plain) else ["measuring changes the result"]
    alone = {name: one if name == "use_cache" else one[:1] for name, one in batch.items()}
    with torch.no_grad(), saobp.probe(model) as first:
        model(**alone)
    name = next(iter(first.layers))
    if health.measured_from != "queries and keys":
        model.config._attn_implementation_internal = "eager"
        found = model(**alone, output_attentions=True)
        rows = (found.get("attentions") or found.get("encoder_attentions"))[0].detach()
        rows = rows.softmax(-1) if (rows < 0).any() else rows
        if not close(first.values("gtd")[name].float(), metrics.gtd(rows).mean(0)):
            failed.append("other numbers than those of the returned maps")
    if kind not in (*IMAGES, "whisper") and not failed:
        short = {part: one if part == "use_cache" else one[1:, :-3] for part, one in batch.items()}
        with torch.no_grad(), saobp.probe(model) as second:
            model(**short)
        together = (first.values("gtd")[name] + second.values("gtd")[name]) / 2
        if not close(health.values("gtd")[name], together):
            failed.append("padding changes the numbers")
    left_out = f", left out: {', '.join(sorted(health.skipped))}" if health.skipped else ""
    done = f"from {health.measured_from}, {len(health.layers)} layers{left_out}"
    return f"FAILS: {'; '.join(failed)}" if failed else f"measured ({done})"


def outcome(check: Callable[[str, PreTrainedModel], str], kind: str) -> str:
    try:
        model = tiny(kind)
    except Exception as error:
        return f"not built: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        return check(kind, model)
    except ValueError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"ERROR {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    alone = [kind + ALONE for kind in ENCODERS_ALONE]
    for kind in sys.argv[1:] or (*ENCODERS, *DECODERS, *alone, *IMAGES, *WITH_DECODER, *OTHERS):
        print(f"| {kind} | {outcome(refines, kind)} | {outcome(measures, kind)} |", flush=True)


if __name__ == "__main__":
    main()
