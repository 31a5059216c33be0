"""What saobp.apply says to many model families: prints the table of docs/models.md.

Not a test: it builds a tiny random model per family, by shrinking the sizes that its config happens to name.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, DynamicCache, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING
from transformers.utils import logging

import saobp
from saobp.testing.tiny_models import tiny_batch

ENCODERS = """albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra
    ernie esm eurobert funnel layoutlm longformer megatron-bert mobilebert modernbert mpnet nystromformer
    rembert roberta roberta-prelayernorm roformer squeezebert xlm-roberta"""
DECODERS = """biogpt bloom codegen cohere cohere2 ctrl falcon gemma gemma2 gemma3_text glm gpt2 gpt_neo
    gpt_neox gpt_oss gptj granite helium llama mistral mixtral mpt olmo olmo2 olmo3 opt persimmon phi phi3
    qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2 xglm"""
OTHERS = "bart dinov2 siglip_vision_model t5 vit whisper xlnet"
ENCODERS, DECODERS, OTHERS = (names.split() for names in (ENCODERS, DECODERS, OTHERS))

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
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    options: dict[str, Any] = {}
    for value, names in SMALL.items():
        options.update({name: value for name in names.split() if getattr(default, name, None) is not None})
    if kind == "funnel":
        options = {"vocab_size": 64, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
    if kind == "xlnet":
        options = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
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
    if layer_types:
        options["layer_types"] = layer_types[:2] if len(set(layer_types[:2])) > 1 else layer_types[-2:]
    if getattr(default, "sliding_window", None):
        options["sliding_window"] = 4
    config = config_class(**options)
    auto = (
        AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM if kind in DECODERS else AutoModel
    )
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


def checks(kind: str, model: PreTrainedModel) -> str:
    if kind in OTHERS:
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


def verdict(kind: str) -> str:
    try:
        model = tiny(kind)
    except Exception as error:
        return f"not built: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        return checks(kind, model)
    except ValueError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"ERROR {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for kind in (*ENCODERS, *DECODERS, *OTHERS):
        print(f"| {kind} | {verdict(kind)} |", flush=True)


if __name__ == "__main__":
    main()
