"""Modules: PyTorch's multi-head attention with refined rows, inside models that are written by hand."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import saobp

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 6, 2


def pair(refinement: str = "none", **options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """PyTorch's module and ours with the same weights, ready for inference."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(WIDTH, HEADS, **options).eval()
    ours = saobp.nn.MultiheadAttention(WIDTH, HEADS, **options, refinement=refinement).eval()
    ours.load_state_dict(plain.state_dict(), strict=not refinement.endswith("learned"))
    return plain, ours


def states(batch_first: bool = True, seed: int = 1) -> Tensor:
    shape = (BATCH, LENGTH, WIDTH) if batch_first else (LENGTH, BATCH, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * LENGTH, [False] * 4 + [True] * 2])
FLOAT_PADDING = torch.zeros(BATCH, LENGTH).masked_fill(PADDING, -math.inf)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"key_padding_mask": PADDING},
        {"key_padding_mask": FLOAT_PADDING},
        {"attn_mask": LATER},
        {"attn_mask": LATER, "is_causal": True},
        {"attn_mask": torch.zeros(LENGTH, LENGTH).masked_fill(LATER, -math.inf)},
        {"attn_mask": torch.randn(LENGTH, LENGTH)},
        {"attn_mask": torch.randn(BATCH * HEADS, LENGTH, LENGTH), "key_padding_mask": FLOAT_PADDING},
    ],
)
def test_without_refinement_it_is_pytorchs_module(masks: dict, bias: bool, batch_first: bool) -> None:
    plain, ours = pair(batch_first=batch_first, bias=bias)
    x = states(batch_first)
    for options in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        need_weights = options.get("need_weights", True)
        if masks.get("is_causal") and need_weights:
            continue
        wanted, rows = plain(x, x, x, **masks, **options)
        found, found_rows = ours(x, x, x, **masks, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert (rows is None) == (found_rows is None) == (not need_weights)
        if rows is not None:
            torch.testing.assert_close(found_rows, rows, rtol=1e-4, atol=1e-5)


def test_a_single_sequence_without_a_batch() -> None:
    plain, ours = pair()
    x = states()[0]
    for found, wanted in zip(ours(x, x, x), plain(x, x, x), strict=True):
        torch.testing.assert_close(found, wanted)
    found, _ = ours(x, x, x, key_padding_mask=PADDING[1])
    torch.testing.assert_close(found, plain(x, x, x, key_padding_mask=PADDING[1])[0])


def test_state_dicts_load_both_ways_and_seeds_give_the_same_weights() -> None:
    for refinement in ("none", "high:0.2", "elemmul"):
        torch.manual_seed(3)
        plain = nn.MultiheadAttention(WIDTH, HEADS)
        torch.manual_seed(3)
        ours = saobp.nn.MultiheadAttention(WIDTH, HEADS, refinement=refinement)
        assert list(plain.state_dict()) == list(ours.state_dict())
        for name, weight in plain.state_dict().items():
            assert torch.equal(ours.state_dict()[name], weight)
        plain.load_state_dict(ours.state_dict())
        ours.load_state_dict(plain.state_dict())
    learned = saobp.nn.MultiheadAttention(WIDTH, HEADS)
    assert set(learned.state_dict()) - set(plain.state_dict()) == {"strength_bias"}
    assert learned.strength_bias is not None
    assert learned.strength_bias.tolist() == [0.0] * HEADS


def test_it_is_the_operation_between_two_projections() -> None:
    _, ours = pair("high:0.7", batch_first=True)
    x = states()
    q, k, v = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in functional.linear(x, ours.in_proj_weight, ours.in_proj_bias).chunk(3, -1)
    )
    for masks, options in (
        ({"key_padding_mask": PADDING}, {"attention_mask": ~PADDING}),
        ({"attn_mask": LATER}, {"is_causal": True}),
    ):
        refined = saobp.attention(q, k, v, "high:0.7", **options)  # type: ignore[arg-type]
        wanted = ours.out_proj(refined.transpose(1, 2).flatten(2))
        for need_weights in (False, True):
            found, rows = ours(x, x, x, need_weights=need_weights, **masks)
            torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(rows.sum(-1), torch.ones(BATCH, LENGTH))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_encoder_layer_of_pytorch_calls_it(causal: bool, training: bool) -> None:
    """In evaluation PyTorch's layer would compute plain attention from the weights by itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    refined = copy.deepcopy(layer)
    refined.self_attn = saobp.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, refinement="high:3")
    refined.self_attn.load_state_dict(layer.self_attn.state_dict())
    layer.train(training)
    refined.train(training)
    masks = {"src_mask": LATER if causal else None, "src_key_padding_mask": PADDING}
    x = states()
    with torch.no_grad():
        plain, found = layer(x, **masks), refined(x, **masks)
        stacked = nn.TransformerEncoder(refined, 1, enable_nested_tensor=False)(x, masks["src_mask"], PADDING)
        attended = refined.self_attn(
            x, x, x, key_padding_mask=PADDING, attn_mask=LATER if causal else None, need_weights=False
        )[0]
        middle = refined.norm1(x + attended)
        wanted = refined.norm2(middle + refined.linear2(functional.relu(refined.linear1(middle))))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(stacked, wanted)
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_an_encoder_that_was_made_before_may_drop_padding_when_it_evaluates() -> None:
    """An nn.TransformerEncoder then hands its layers nested tensors."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True), 2)
    for layer in encoder.layers:
        layer.self_attn = saobp.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, refinement="high:3")
    encoder.eval()
    padding = torch.tensor([[False] * LENGTH, *[[False] * 3 + [True] * (LENGTH - 3)] * (BATCH - 1)])
    wanted = encoder(states(), src_key_padding_mask=padding)
    with torch.no_grad():
        found = encoder(states(), src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], wanted[~padding])


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 of an 8 x 8 image, two blocks, the mean of all tokens."""

    def __init__(self, refinement: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 2, 2)
        self.places = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(saobp.nn.SelfAttention(WIDTH, HEADS, refinement) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x.mean(1))


class Encoder(nn.Module):
    """Words, one block of PyTorch's module with refined rows, the first token's class."""

    def __init__(self, refinement: str) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.5)
        self.attention = saobp.nn.MultiheadAttention(
            WIDTH, HEADS, dropout=0.1, batch_first=True, refinement=refinement
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        attended, _ = self.attention(x, x, x, key_padding_mask=tokens == 0, need_weights=False)
        return self.head((x + attended)[:, 0])


def examples(kind: type[nn.Module], count: int = 64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (count,), generator=random)
    if kind is VisionTransformer:
        images = torch.randn(count, 1, 8, 8, generator=random) * 0.3
        images[:, :, :4] += labels.view(-1, 1, 1, 1).float()
        return images, labels
    tokens = torch.randint(3, 20, (count, LENGTH), generator=random)
    tokens[:, 2] = labels + 1
    tokens[::2, 4:] = 0
    return tokens, labels


@pytest.mark.parametrize("kind", [VisionTransformer, Encoder])
@pytest.mark.parametrize("refinement", ["high:learned", "high:0.2", "elemmul"])
def test_models_written_by_hand_learn_and_are_saved(
    kind: type[nn.Module], refinement: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = kind(refinement)
    inputs, labels = examples(kind)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = functional.cross_entropy(model(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    strengths = {name: p for name, p in model.named_parameters() if name.endswith("strength_bias")}
    assert len(strengths) == (0 if refinement != "high:learned" else 2 if kind is VisionTransformer else 1)
    for strength in strengths.values():
        assert strength.grad is not None
        assert (strength != 0).all()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = kind(refinement)
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))


def test_padding_changes_nothing() -> None:
    layer = saobp.nn.SelfAttention(WIDTH, HEADS, "high:0.7")
    x = states()
    wanted = layer(x[1:, :4])
    for mask in (~PADDING, (~PADDING).long()):
        torch.testing.assert_close(layer(x, mask)[1:, :4], wanted)
    causal = saobp.nn.SelfAttention(WIDTH, HEADS, "high:0.7", is_causal=True)
    torch.testing.assert_close(causal(x)[:, :3], causal(x[:, :3]))
    seen = ~PADDING[:, None, None] & ~PADDING[:, None, :, None]
    torch.testing.assert_close(layer(x, attn_mask=seen)[1:, :4], wanted)


@pytest.mark.parametrize("refinement", ["high:learned", "high:0.2"])
def test_modules_compile_without_a_graph_break(refinement: str) -> None:
    x = states()
    for module in (
        saobp.nn.SelfAttention(WIDTH, HEADS, refinement),
        saobp.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, refinement=refinement),
    ):
        if isinstance(module, nn.MultiheadAttention):

            def call(x: Tensor, module: nn.Module = module) -> Tensor:
                return module(
                    x, x, x, attn_mask=LATER, is_causal=True, key_padding_mask=PADDING, need_weights=False
                )[0]
        else:
            call = module
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), call(x), rtol=1e-4, atol=1e-5)


def test_strengths_made_on_the_meta_device_come_back_as_zeros() -> None:
    for module in (
        saobp.nn.SelfAttention(WIDTH, HEADS, device="meta"),
        saobp.nn.MultiheadAttention(WIDTH, HEADS, device="meta"),
    ):
        module.to_empty(device="cpu")
        with torch.no_grad():
            module.strength_bias.fill_(7.0)  # type: ignore[union-attr,operator]
        reset = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
        getattr(module, reset)()
        assert module.strength_bias.tolist() == [0.0] * HEADS  # type: ignore[union-attr,operator]


def test_what_cannot_be_is_said() -> None:
    x = states()
    module = saobp.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def refused(sentence: str, call: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            call(*arguments, **options)

    refused("refines self-attention: pass one tensor as query, key and value", module, x, x, x.clone())
    narrow, hidden = x[..., :-1].clone(), torch.zeros(2, 3, dtype=torch.bool)
    refused(f"query must have {WIDTH} channels, not {WIDTH - 1}", module, narrow, narrow, narrow)
    shape = f"({BATCH}, {LENGTH})"
    refused(f"key_padding_mask must have shape {shape}, not (2, 3)", module, x, x, x, key_padding_mask=hidden)
    refused("query must have 2 or 3 dimensions, not the shape (16,)", module, *[x[0, 0]] * 3)
    texts = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    refused("give a padded tensor with key_padding_mask", module, *[texts] * 3)
    refused(
        "must hold 0 and minus infinity only", module, x, x, x, key_padding_mask=torch.ones(BATCH, LENGTH)
    )
    refused(
        "key_padding_mask must be bool (True hides) or floating point, not torch.int64",
        *(module, x, x, x),
        key_padding_mask=PADDING.long(),
    )
    sentence = "attn_mask must be bool (True hides) or floating point, not torch.int64"
    square = torch.zeros(LENGTH, LENGTH)
    refused(sentence, module, x, x, x, attn_mask=square.long())
    sentence = f"attn_mask must have shape ({LENGTH}, {LENGTH}) or"
    refused(sentence, module, x, x, x, attn_mask=square[1:])
    refused(sentence, module, x, x, x, attn_mask=square.expand(BATCH + 1, -1, -1))
    refused("leave add_bias_kv, add_zero_attn", saobp.nn.MultiheadAttention, WIDTH, HEADS, add_bias_kv=True)
    refused("leave add_bias_kv, add_zero_attn", saobp.nn.MultiheadAttention, WIDTH, HEADS, kdim=8)
    for heads in (3, 0, "4"):
        words = f"embed_dim must be a multiple of num_heads, both whole numbers, not 16 and {heads!r}"
        for made in (saobp.nn.SelfAttention, saobp.nn.MultiheadAttention):
            refused(words, made, WIDTH, heads)
    refused("is_causal must be True or False, not 'no'", saobp.nn.SelfAttention, WIDTH, HEADS, is_causal="no")
    refused("strength 'auto' has no value outside a model", saobp.nn.SelfAttention, WIDTH, HEADS, "high")
    refused("strength lists 2 layers but", saobp.nn.SelfAttention, WIDTH, HEADS, "high:0.1/0.2")
    refused("states must be [batch, length, 16], not of shape", saobp.nn.SelfAttention(WIDTH, HEADS), x[0])
