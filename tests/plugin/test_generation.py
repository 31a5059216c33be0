"""Generation: cached decoding is the full forward, step by step, whatever is done to the cache."""

import copy

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import saobp
from saobp.testing.tiny_models import DECODERS, WINDOW, tiny_batch, tiny_model
from saobp.transformers.cache import DynamicMessages

ROUNDING = {"rtol": 1e-4, "atol": 5e-4}
STRONG = "high:0.7"
REFINEMENTS = [STRONG, "low,strength=0.4,steps=3,damping=0.2", "high-listing:0.5", "none"]
CACHES = {
    "lazy": lambda model: DynamicCache(),  # noqa: ARG005
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=16),
}
SPLITS = [[5] + [1] * 7, [2, 3, 1, 4, 2], [12], [1] * 12]


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def whole(model, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits


def piece(model, ids, mask, cache, start, stop):
    """Logits of the tokens from start to stop, with the earlier ones in the cache."""
    with torch.no_grad():
        return model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions(mask)[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        ).logits


def pieces(model, ids, mask, cache, sizes):
    outputs, start = [], 0
    for size in sizes:
        outputs.append(piece(model, ids, mask, cache, start, start + size))
        start += size
    return torch.cat(outputs, 1)


def prompt(batch=3, length=12, padding=4):
    inputs = tiny_batch(batch, length, padding, side="left")
    return inputs["input_ids"], inputs["attention_mask"]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("family", DECODERS)
def test_cached_decoding_is_the_full_forward(family, refinement, kind):
    model, (ids, mask) = saobp.apply(tiny_model(family), refinement), prompt()
    expected, real = whole(model, ids, mask), mask.bool()
    for sizes in SPLITS:
        decoded = pieces(model, ids, mask, CACHES[kind](model), sizes)
        torch.testing.assert_close(decoded[real], expected[real], **ROUNDING, msg=f"{sizes}")


@pytest.mark.parametrize("family", DECODERS)
def test_the_messages_matter(family):
    """The comparison above would notice rows that hear nothing from the cache."""
    model, (ids, mask) = saobp.apply(tiny_model(family), STRONG), prompt()
    cache = DynamicCache(config=model.config)
    piece(model, ids, mask, cache, 0, 11)
    for layer in cache.layers:
        layer.flush()
        layer.totals.zero_()
    deaf = piece(model, ids, mask, cache, 11, 12)
    assert (deaf[:, 0] - whole(model, ids, mask)[:, -1]).abs().max() > 0.01


def generated(model, ids, mask, **options):
    torch.manual_seed(7)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **options
    )


MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "returned sequences": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", DECODERS)
def test_generate_gives_the_same_tokens_with_and_without_a_cache(family, mode, cache):
    model, (ids, mask) = saobp.apply(tiny_model(family), STRONG), prompt(length=9)
    expected = generated(model, ids, mask, use_cache=False, **MODES[mode])
    cached = generated(model, ids, mask, cache_implementation=cache, **MODES[mode])
    assert torch.equal(cached, expected)


@pytest.mark.parametrize("family", DECODERS)
def test_assisted_generation_gives_the_greedy_tokens(family, monkeypatch):
    model = saobp.apply(tiny_model(family), STRONG)
    assistant = saobp.apply(tiny_model(family, seed=1), "high:0.3")
    weights = model.state_dict()
    near = {name: torch.lerp(values, weights[name], 0.7) for name, values in assistant.state_dict().items()}
    assistant.load_state_dict(near)
    crops = []
    original = DynamicMessages.crop
    monkeypatch.setattr(DynamicMessages, "crop", lambda self, n: (crops.append(n), original(self, n))[1])
    ids, mask = (part[:1] for part in prompt(length=9))
    expected = generated(model, ids, mask, do_sample=False)
    assert torch.equal(generated(model, ids, mask, do_sample=False, assistant_model=assistant), expected)
    assert any(crops)
    lookup = generated(model, ids, mask, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(lookup, expected)


@pytest.mark.parametrize("family", DECODERS)
def test_a_recording_cache_gives_rows_back(family):
    model, (ids, mask) = saobp.apply(tiny_model(family), STRONG), prompt()
    if family == "mistral" and not hasattr(Cache, "is_recording_past"):
        pytest.skip("this version of Transformers builds a wrong mask for a recording window")
    expected = whole(model, ids, mask)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    other = torch.where(mask.bool(), (ids + 11) % 50 + 3, ids)
    pieces(model, ids, mask, cache, [6])
    with torch.no_grad():
        model(
            other[:, 6:9],
            attention_mask=mask[:, :9],
            position_ids=positions(mask)[:, 6:9],
            past_key_values=cache,
        )
    cache.crop(-3)
    for start in range(6, 12):
        step = piece(model, ids, mask, cache, start, start + 1)
        torch.testing.assert_close(step[:, 0], expected[:, start], **ROUNDING)
        cache.crop(0)


def test_rows_can_be_given_back_twice():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), REFINEMENTS[1]), prompt()
    cache = DynamicCache()
    cache.activate_past_recording()
    pieces(model, ids, mask, cache, [8, 1, 1])
    cache.crop(-1)
    cache.crop(-4)
    step = piece(model, ids, mask, cache, 5, 6)
    torch.testing.assert_close(step[:, 0], whole(model, ids, mask)[:, 5], **ROUNDING)


def test_cropping_to_nothing_and_resetting_start_afresh():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    expected, real = whole(model, ids, mask), mask.bool()
    for cache, clear in (
        (DynamicCache(), lambda cache: cache.crop(-12)),
        (DynamicCache(), lambda cache: cache.reset()),
        (StaticCache(config=model.config, max_cache_len=16), lambda cache: cache.reset()),
    ):
        for _ in range(2):
            decoded = pieces(model, ids, mask, cache, [5, 7])
            torch.testing.assert_close(decoded[real], expected[real], **ROUNDING)
            clear(cache)


def test_a_cache_that_does_not_record_refuses_to_give_rows_back():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    cache = DynamicCache()
    pieces(model, ids, mask, cache, [6])
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="messages are unknown"):
        piece(model, ids, mask, cache, 4, 5)


def test_rows_that_came_after_recording_stopped_are_not_given_back():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    cache = DynamicCache()
    cache.activate_past_recording()
    pieces(model, ids, mask, cache, [5, 1])
    for layer in cache.layers:
        layer.record_past = False
    piece(model, ids, mask, cache, 6, 7)
    with pytest.raises(ValueError, match="cannot take back 1 rows"):
        cache.crop(-1)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_messages_follow_the_batch_of_the_cache(family):
    model, (ids, mask) = saobp.apply(tiny_model(family), STRONG), prompt()
    expected = whole(model, ids, mask)
    filled = DynamicCache(config=model.config)
    pieces(model, ids, mask, filled, [8])

    order = torch.tensor([2, 0, 1])
    cache = copy.deepcopy(filled)
    cache.reorder_cache(order)
    step = piece(model, ids[order], mask[order], cache, 8, 9)
    torch.testing.assert_close(step[:, 0], expected[order, 8], **ROUNDING)

    cache = copy.deepcopy(filled)
    cache.batch_repeat_interleave(2)
    twice = torch.tensor([0, 0, 1, 1, 2, 2])
    step = piece(model, ids[twice], mask[twice], cache, 8, 9)
    torch.testing.assert_close(step[:, 0], expected[twice, 8], **ROUNDING)

    cache.batch_select_indices(torch.tensor([5, 1]))
    some = torch.tensor([2, 0])
    step = piece(model, ids[some], mask[some], cache, 9, 10)
    torch.testing.assert_close(step[:, 0], expected[some, 9], **ROUNDING)


def test_a_sliding_window_keeps_no_more_messages_than_keys():
    model, (ids, mask) = saobp.apply(tiny_model("mistral"), STRONG), prompt()
    cache = DynamicCache(config=model.config)
    pieces(model, ids, mask, cache, SPLITS[0])
    for layer in cache.layers:
        assert layer.totals.shape == (1, 3, 4, layer.keys.shape[-2]) == (1, 3, 4, WINDOW - 1)


def test_a_compiled_step_with_a_static_cache_has_no_graph_break():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    expected = whole(model, ids, mask)
    cache = StaticCache(config=model.config, max_cache_len=16)
    piece(model, ids, mask, cache, 0, 6)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for start in range(6, 12):
        step = piece(compiled, ids, mask, cache, start, start + 1)
        torch.testing.assert_close(step[:, 0], expected[:, start], **ROUNDING)


def test_long_prompts_are_refined_in_pieces(monkeypatch):
    monkeypatch.setattr("saobp.transformers.cache.ROWS_PER_CHUNK", 3)
    model, (ids, mask) = saobp.apply(tiny_model("llama"), REFINEMENTS[1]), prompt()
    decoded = pieces(model, ids, mask, DynamicCache(), [10, 2])
    real = mask.bool()
    torch.testing.assert_close(decoded[real], whole(model, ids, mask)[real], **ROUNDING)


def test_the_papers_form_refuses_to_generate():
    with pytest.warns(UserWarning, match="future='paper'"):
        model = saobp.apply(tiny_model("llama"), "high,strength=0.5,future=paper")
    ids, mask = prompt()
    for use_cache in (True, False):
        with pytest.raises(ValueError, match="future='strict'"):
            model.generate(ids, attention_mask=mask, use_cache=use_cache)
    cache = DynamicCache()
    with pytest.warns(UserWarning, match="future='paper'"):
        piece(model, ids, mask, cache, 0, 5)
    with pytest.raises(ValueError, match="must not generate"):
        piece(model, ids, mask, cache, 5, 6)
    assert torch.is_tensor(saobp.remove(model).generate(ids, attention_mask=mask, max_new_tokens=2))


def test_elemmul_generates_only_without_a_cache():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), "elemmul"), prompt()
    with pytest.raises(ValueError, match="use_cache=False"):
        generated(model, ids, mask)
    assert generated(model, ids, mask, use_cache=False).shape == (3, 20)


def test_a_bidirectional_model_does_not_decode_from_a_cache():
    model, (ids, mask) = saobp.apply(tiny_model("llama", is_causal=False), STRONG), prompt()
    cache = DynamicCache()
    piece(model, ids, mask, cache, 0, 5)
    with pytest.raises(ValueError, match=r"not causal .* use_cache=False"):
        piece(model, ids, mask, cache, 5, 6)


def test_a_quantised_cache_is_refused():
    class Quantised(QuantizedLayer):
        def _quantize(self, tensor, axis):  # noqa: ARG002
            return tensor

        def _dequantize(self, tensor):
            return tensor

    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    cache = DynamicCache()
    cache.layers = [Quantised() for _ in range(2)]
    with pytest.raises(ValueError, match=r"Quantised .* use_cache=False"):
        piece(model, ids, mask, cache, 0, 5)


def test_a_cache_filled_by_another_attention_is_refused():
    model, (ids, mask) = tiny_model("llama"), prompt()
    cache = DynamicCache()
    piece(model, ids, mask, cache, 0, 5)
    saobp.apply(model, STRONG)
    with pytest.raises(ValueError, match="filled by another attention"):
        piece(model, ids, mask, cache, 5, 6)


@pytest.mark.parametrize("other", ["high:0.1", "high:0.7,steps=2"])
def test_a_cache_filled_under_another_refinement_is_refused(other):
    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    cache = DynamicCache()
    piece(model, ids, mask, cache, 0, 5)
    saobp.apply(model, other)
    with pytest.raises(ValueError, match="under another refinement"):
        piece(model, ids, mask, cache, 5, 6)
    cache.reset()
    piece(model, ids, mask, cache, 0, 5)
    piece(model, ids, mask, copy.deepcopy(cache), 5, 6)


def test_messages_of_a_first_call_wait_until_they_are_needed():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG).train(), prompt()
    cache = model(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions(mask)[:, :8]).past_key_values
    assert all(layer.totals is None for layer in cache.layers)
    step = piece(model, ids, mask, cache, 8, 9)
    assert all(layer.totals.shape[-1] == 9 for layer in cache.layers)
    torch.testing.assert_close(step[:, 0], whole(model, ids, mask)[:, 8], **ROUNDING)


def test_a_cache_that_another_attention_went_on_with_is_refused():
    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    cache = DynamicCache()
    piece(model, ids, mask, cache, 0, 5)
    model.set_attn_implementation("eager")
    piece(model, ids, mask, cache, 5, 6)
    piece(model, ids, mask, cache, 6, 7)
    model.set_attn_implementation("saobp")
    with pytest.raises(ValueError, match="messages are unknown"):
        piece(model, ids, mask, cache, 7, 8)


class ShiftedCache(DynamicCache):
    """Keys go to another layer than the module's, as in models that repeat or share their layers."""

    def update(self, keys, values, layer_idx, *args, **kwargs):
        return super().update(keys, values, layer_idx + 2, *args, **kwargs)


@pytest.mark.parametrize("refinement", [STRONG, "low,strength=0.4,steps=3"])
def test_keys_in_another_layer_of_the_cache_are_refused(refinement):
    model, (ids, mask) = saobp.apply(tiny_model("llama"), refinement), prompt()
    cache = ShiftedCache()
    first = piece(model, ids, mask, cache, 0, 5)
    torch.testing.assert_close(first, whole(model, ids, mask)[:, :5], **ROUNDING)
    with pytest.raises(ValueError, match=r"no keys of its own .* use_cache=False"):
        piece(model, ids, mask, cache, 5, 6)


def test_layers_that_read_the_keys_of_others_are_refused():
    class FirstLayerOnly(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            if layer_idx == 0:
                return super().update(keys, values, 0, *args, **kwargs)
            return self.layers[0].keys, self.layers[0].values

    model, (ids, mask) = saobp.apply(tiny_model("llama"), STRONG), prompt()
    cache = FirstLayerOnly(config=model.config)
    del cache.layers[1]
    piece(model, ids, mask, cache, 0, 5)
    with pytest.raises(ValueError, match=r"no keys of its own .* use_cache=False"):
        piece(model, ids, mask, cache, 5, 6)


def test_another_attention_may_generate_while_a_refinement_is_attached():
    model, (ids, mask) = tiny_model("llama"), prompt()
    expected = generated(model, ids, mask, do_sample=False)
    saobp.apply(model, STRONG).set_attn_implementation("eager")
    assert torch.equal(generated(model, ids, mask, do_sample=False), expected)
