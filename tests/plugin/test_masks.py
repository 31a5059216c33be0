"""Masks of every kind say the same as eager attention understands by them."""

import pytest
import torch
from transformers import DogeConfig, DogeForCausalLM

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers.attention_function import saobp_attention

ROUNDING = {"rtol": 1e-4, "atol": 2e-4}


def logits(model, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits


def own_mask(length=9):
    """A causal mask that also hides one early key from everyone and one from the last row."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[3:, 2] = False
    mask[-1, 4] = False
    return mask[None, None]


@pytest.mark.parametrize("kind", ["bool", "float", "inf"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_users_own_mask_is_honoured(family, kind):
    model, ids = tiny_model(family, attn_implementation="eager"), tiny_batch(batch=1)["input_ids"]
    seen = own_mask()
    if family == "bert":
        seen = seen | seen.mT
    lowest = torch.finfo(torch.float32).min
    additive = torch.zeros(seen.shape).masked_fill(~seen, lowest)
    expected = logits(model, ids, additive)
    given = {"bool": seen, "float": additive, "inf": additive.masked_fill(~seen, -torch.inf)}[kind]
    torch.testing.assert_close(logits(saobp.apply(model, "high:0"), ids, given), expected, **ROUNDING)
    strong = logits(saobp.apply(model, "high:0.7"), ids, given)
    again = logits(saobp.apply(model, "high:0.7"), ids, seen)
    torch.testing.assert_close(strong, again, **ROUNDING)


@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_a_mask_that_hides_one_way_is_refused_without_causality(kind):
    """Messages would tell rows of tokens that are hidden from them."""
    model, ids = saobp.apply(tiny_model("bert"), "high:0.7"), tiny_batch(batch=1)["input_ids"]
    mask = own_mask()
    if kind == "numbers":
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    with pytest.raises(ValueError, match="lets one row see another's token but not the reverse"):
        logits(model, ids, mask)


def test_a_mask_of_numbers_is_added_to_the_scores():
    model, ids = tiny_model("bert", attn_implementation="eager"), tiny_batch(batch=1)["input_ids"]
    slope = -0.3 * (torch.arange(9)[:, None] - torch.arange(9)).abs().float()[None, None]
    expected = logits(model, ids, slope)
    torch.testing.assert_close(logits(saobp.apply(model, "high:0"), ids, slope), expected, **ROUNDING)


@pytest.mark.parametrize("rows", [9, 1])
@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_padding_is_seen_in_a_users_own_mask(rows, kind):
    """Square, or with one row that stands for all."""
    model, batch = saobp.apply(tiny_model("bert"), "high:0.7"), tiny_batch()
    real = batch["attention_mask"].bool()
    mask = real[:, None, None, :].expand(2, 1, rows, 9)
    if kind == "numbers":
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    expected = logits(model, batch["input_ids"], batch["attention_mask"])
    given = logits(model, batch["input_ids"], mask)
    torch.testing.assert_close(given[real], expected[real], **ROUNDING)


def call(mask=None, window=None, causal=False, factor="high:0.7", keys=7, queries=7, **options):
    torch.manual_seed(0)
    module = saobp.apply(tiny_model("bert"), factor).bert.encoder.layer[0].attention.self
    query, key = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8)
    return saobp_attention(module, query, key, key, mask, is_causal=causal, sliding_window=window, **options)[
        0
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_the_window_argument_is_honoured_when_the_mask_lacks_it(causal):
    distance = torch.arange(7)[:, None] - torch.arange(7)
    window = (distance.abs() < 3) & ((distance >= 0) | (not causal))
    expected = call(window[None, None], causal=causal)
    torch.testing.assert_close(call(window=3, causal=causal), expected)
    padding = torch.ones(2, 7, dtype=torch.bool)
    torch.testing.assert_close(call(padding, window=3, causal=causal), expected)
    assert (call(causal=causal) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 7, 7), "not \\(2, 7, 7\\)"),
        (torch.ones(2, 1, 7, 7, dtype=torch.long), "bool or floating point"),
        (torch.ones(2, 1, 7, 5, dtype=torch.bool), "does not fit"),
        ("a block mask", "not str"),
    ],
)
def test_a_mask_that_cannot_be_read_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        call(mask)


@pytest.mark.parametrize("length", [8, 10])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_mask_of_another_length_is_refused(family, length):
    model, ids = saobp.apply(tiny_model(family), "high:0.5"), tiny_batch()["input_ids"]
    assert ids.shape[1] == 9
    mask = torch.ones(2, length)
    mask[:, 0] = 0
    with pytest.raises(ValueError, match=f"attention_mask has {length} entries for 9 tokens"):
        model(ids, attention_mask=mask)


def test_output_is_laid_out_as_transformers_expects():
    output = call()
    assert output.shape == (2, 7, 4, 8)
    assert output.is_contiguous()


def test_dropout_acts_on_the_refined_rows():
    torch.manual_seed(1)
    module = saobp.apply(tiny_model("bert"), "high:0.5").bert.encoder.layer[0].attention.self
    query, ones = torch.randn(64, 4, 7, 8), torch.ones(64, 4, 7, 8)
    kept, _ = saobp_attention(module, query, query, ones, None, dropout=0.4)
    assert kept.std() > 0.1
    assert abs(kept.mean() - 1) < 0.05


@pytest.mark.parametrize("mask", [None, torch.ones(2, 1, 3, 7, dtype=torch.bool)])
def test_unequal_lengths_without_causality_are_refused(mask):
    with pytest.raises(ValueError, match="cross-attention"):
        call(mask, queries=3)


def test_unequal_lengths_with_causality_need_a_cache():
    with pytest.raises(ValueError, match="messages of the earlier rows"):
        call(torch.ones(2, 1, 3, 7, dtype=torch.bool), queries=3, causal=True)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "saobp_strength"])
def test_arguments_that_cannot_be_honoured_are_refused(name):
    with pytest.raises(ValueError, match=f"'{name}', which refined attention cannot honour"):
        call(**{name: torch.ones(4)})
    assert torch.isfinite(call(**{name: None})).all()


def test_a_position_bias_needs_its_shape():
    with pytest.raises(ValueError, match=r"position_bias must be \[1 or batch, heads, .*\], not \(4,\)"):
        call(position_bias=torch.ones(4))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_padding_does_not_change_which_rows_send(family, side):
    model = saobp.apply(tiny_model(family).double().eval(), "high-key-bias:1.5,message_stride=4")
    batch = tiny_batch(side=side)
    real = batch["attention_mask"][1].bool()
    positions = {"position_ids": (real.cumsum(0) - 1).clamp(min=0)[None].expand(2, -1)}
    with torch.no_grad():
        padded = model(**batch, **positions).logits[1, real]
        alone = model(batch["input_ids"][1:, real]).logits[0]
    torch.testing.assert_close(padded, alone, rtol=1e-9, atol=1e-9)


def test_a_model_that_changes_its_mask_sees_no_padding():
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = DogeForCausalLM(DogeConfig(**shape, **heads, initializer_range=0.3)).eval()
    ids, mask = tiny_batch(side="left").values()
    real = mask.bool()
    plain = logits(model, ids, mask)
    saobp.apply(model, "high:0")
    torch.testing.assert_close(logits(model, ids, mask)[real], plain[real], **ROUNDING)
    saobp.apply(model, "high:0.7")
    other = logits(model, ids.masked_fill(~real, 7), mask)
    torch.testing.assert_close(logits(model, ids, mask)[real], other[real], **ROUNDING)
