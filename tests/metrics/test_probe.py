"""The probe on every model family: equal to the recorded maps, and without a trace afterwards."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

import saobp
from saobp import metrics
from saobp.metrics.attention_inputs import inputs_of
from saobp.metrics.sampling import SAMPLED
from saobp.testing.tiny_models import DECODERS, FAMILIES, tiny_batch, tiny_model
from saobp.transformers import AttentionCall, record_attention

IMPLEMENTATIONS = ["eager", "sdpa", "saobp"]


def prepared(family: str, implementation: str = "sdpa", **options):  # type: ignore[no-untyped-def]
    if implementation == "saobp":
        return saobp.apply(tiny_model(family, **options), "high:0.5")
    return tiny_model(family, attn_implementation=implementation, **options)


def truth(model, batch: dict[str, torch.Tensor], statistic: str) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Mean over texts of a statistic of the recorded maps, one ``[heads]`` per attention call."""
    with torch.no_grad(), record_attention(model) as recorded:
        model(**batch)
    mask = batch["attention_mask"].bool()
    calls = [
        rows for i in range(9) for name in recorded if len(recorded[name]) > i for rows in [recorded[name][i]]
    ]
    return [getattr(metrics, statistic)(rows, padding_mask=mask).mean(0) for rows in calls]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_probe_equals_the_recorded_maps(family: str, implementation: str) -> None:
    model = prepared(family, implementation)
    batch = tiny_batch(side="left" if family in DECODERS else "right")
    with torch.no_grad():
        before = model(**batch).logits
        with saobp.probe(model, statistics=metrics.STATISTICS, method="exact") as health:
            watched = model(**batch).logits
    assert torch.equal(before, watched)
    assert len(health.layers) == 2
    for statistic in metrics.STATISTICS:
        values = list(health.values(statistic).values())
        for value, expected in zip(values, truth(model, batch, statistic), strict=True):
            torch.testing.assert_close(value.float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["bert", "gpt2", "mistral", "modernbert", "llama"])
def test_sampled_probe_agrees_where_all_rows_are_drawn(family: str, implementation: str) -> None:
    model = prepared(family, implementation)
    batch = tiny_batch(batch=3, length=12, side="left" if family in DECODERS else "right")
    with torch.no_grad(), saobp.probe(model, method="sampled") as sampled:
        model(**batch)
    with torch.no_grad(), saobp.probe(model, method="exact") as exact:
        model(**batch)
    for statistic in SAMPLED:
        tolerance = 0.1 if statistic == "gtd" else 1e-4
        for one, other in zip(
            sampled.values(statistic).values(), exact.values(statistic).values(), strict=True
        ):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


def test_auto_samples_long_texts_only() -> None:
    model = tiny_model("bert", max_position_embeddings=2048)
    ids = torch.randint(3, 64, (1, 1100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), saobp.probe(model) as health:
        model(ids[:, :100])
    assert all(head.errors["gtd"] == 0 for head in health.heads())
    with torch.no_grad(), saobp.probe(model) as health:
        model(ids)
    assert all(0 < head.errors["gtd"] < 0.1 for head in health.heads())


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "modernbert"])
def test_gradient_checkpointing_counts_once_and_gradients_stay(family: str) -> None:
    model, batch = tiny_model(family), tiny_batch(padding=0)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model(**batch, labels=batch["input_ids"]).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    plain = None
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with saobp.probe(model) as health:
            model(**batch, labels=batch["input_ids"]).loss.backward()
        assert [head.texts for head in health.heads()] == [2] * 8
        gtd = torch.stack(list(health.values("gtd").values()))
        plain = gtd if plain is None else plain
        torch.testing.assert_close(gtd, plain)
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, expected[name])


def test_every_and_texts_choose_what_is_measured() -> None:
    model, batch = tiny_model("bert"), tiny_batch(batch=4)
    with torch.no_grad(), saobp.probe(model, every=3, texts=2) as health:
        for _ in range(7):
            model(**batch)
    assert health.forwards == 3
    assert {head.texts for head in health.heads()} == {6}
    health.reset()
    assert not health


def snapshot(model: torch.nn.Module) -> tuple:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return (
        hooks,
        sorted(model.__dict__),
        AttentionInterface.get_interface,
        copy.deepcopy(model.config.to_dict()),
    )


def test_model_is_as_before_also_after_an_exception() -> None:
    model, batch = tiny_model("bert"), tiny_batch()
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    with saobp.probe(model):
        model(**batch)
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), saobp.probe(model):
        model(**batch).logits.sum() / (1 // 0)
    assert snapshot(model) == before
    with pytest.raises(IndexError), saobp.probe(model):
        model(input_ids=torch.full((1, 4), 9999))
    assert snapshot(model) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with saobp.probe(model) as health:
        model(**batch)
    assert health.forwards == 1


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_models_are_measured_eagerly_and_stay_compiled(how: str) -> None:
    model, batch = tiny_model("bert"), tiny_batch(padding=0)
    with torch.no_grad(), saobp.probe(model) as expected:
        plain = model(**batch).logits
    runs = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def run(*args):  # type: ignore[no-untyped-def]
            runs.append(1)
            return graph.forward(*args)

        return run

    if how == "wrapped":
        model = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
    with torch.no_grad():
        model(**batch)
        graphs = len(runs)
        assert graphs
        with saobp.probe(model, every=2) as health:
            outputs = []
            for _ in range(4):
                runs.clear()
                outputs.append((model(**batch).logits, len(runs)))
        model(**batch)
    assert [count for _, count in outputs] == [0, graphs, 0, graphs]
    for logits, _ in outputs:
        torch.testing.assert_close(logits, plain)
    for one, other in zip(health.values("gtd").values(), expected.values("gtd").values(), strict=True):
        torch.testing.assert_close(one, other)


def test_wrappers_do_not_show_in_the_names_of_layers() -> None:
    model, batch = tiny_model("bert"), tiny_batch()
    compiled = torch.compile(model, backend="eager")
    names = []
    for form in (model, compiled, torch.nn.DataParallel(model), torch.nn.DataParallel(compiled)):
        with torch.no_grad(), saobp.probe(form) as health:  # type: ignore[arg-type]
            form(**batch)
        names.append(list(health.layers))
    assert names == [names[0]] * 4


def test_a_probe_that_sees_nothing_says_so() -> None:
    with pytest.warns(UserWarning, match="saw no forward"), saobp.probe(tiny_model("bert")):
        pass


def test_mixed_precision_is_measured_in_single_precision() -> None:
    model, batch = tiny_model("bert"), tiny_batch()
    with torch.no_grad(), saobp.probe(model) as single:
        model(**batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), saobp.probe(model) as mixed:
        model(**batch)
    for statistic in SAMPLED:
        for one, other in zip(
            single.values(statistic).values(), mixed.values(statistic).values(), strict=True
        ):
            torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_inference_mode(method: str) -> None:
    model = saobp.apply(tiny_model("bert"), "high:0.5")
    with torch.inference_mode(), saobp.probe(model, method=method) as health:  # type: ignore[arg-type]
        model(**tiny_batch())
    assert {head.texts for head in health.heads()} == {2}


def test_generation_measures_the_prompt_and_skips_single_rows() -> None:
    model = tiny_model("gpt2")
    with saobp.probe(model) as health:
        model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert {head.texts for head in health.heads()} == {1}
    assert len(health.skipped) == 2


def test_cross_layer_gtd_equals_that_of_the_recorded_maps() -> None:
    model, batch = tiny_model("bert", num_hidden_layers=5), tiny_batch()
    with torch.no_grad(), saobp.probe(model, statistics=["gtd", "cross_layer_gtd"]) as health:
        model(**batch)
        with record_attention(model) as recorded:
            model(**batch)
    maps = [rows[0] for rows in recorded.values()]
    expected = metrics.cross_layer_gtd(maps, padding_mask=batch["attention_mask"].bool()).mean(1)
    assert list(health.cross_layer_gtd().values()) == pytest.approx(expected.tolist(), rel=1e-4)


def test_wrong_input_gets_a_clear_sentence() -> None:
    with pytest.raises(ValueError, match="attention registry"), saobp.probe(torch.nn.Linear(2, 2)):
        pass
    model = tiny_model("bert")
    for options, words in (
        ({"every": 0}, "at least 1"),
        ({"texts": 0}, "at least 1"),
        ({"texts": 2.5}, "whole number"),
        ({"statistics": ["nonsense"]}, "unknown statistic"),
        ({"statistics": ["clustering"]}, "clustering: method 'auto' has gtd, .*; method 'exact' has it"),
        ({"statistics": "gtd"}, r"a list of names, as in \['gtd'\]"),
        ({"method": "guess"}, "'auto' or 'exact' or 'sampled', not 'guess'"),
        ({"beta": "a"}, "beta must be a number above 0"),
        ({"statistics": ["gtd", "cross_layer_gtd"], "method": "sampled"}, "no sampled form"),
        ({"statistics": ["cross_layer_gtd"]}, "cross_layer_gtd is measured beside others"),
    ):
        with pytest.raises(ValueError, match=words), saobp.probe(model, **options):
            pass
    with pytest.raises(TypeError, match=r"a saobp\.metrics\.Sampling"), saobp.probe(model, sampling=3):
        pass


def test_broken_weights_are_called_undefined() -> None:
    model = tiny_model("bert")
    torch.nn.init.constant_(model.bert.encoder.layer[1].attention.self.query.weight, math.nan)
    with torch.no_grad(), saobp.probe(model) as health:
        model(**tiny_batch())
    verdicts = [head.verdict for head in health.heads()]
    assert "undefined" not in verdicts[:4]
    assert verdicts[4:] == ["undefined"] * 4


def _reduced(rank: int, path: str) -> list[list[float]]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model, batch = tiny_model("bert"), tiny_batch(batch=4, seed=3)
    share = {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}
    with torch.no_grad(), saobp.probe(model) as health:
        model(**share)
    total = health.reduced()
    torch.distributed.destroy_process_group()
    assert {head.texts for head in health.heads()} == {2}
    assert {head.texts for head in total.heads()} == {4}
    return [value.tolist() for value in total.values("gtd").values()]


def test_data_parallel_takes_one_all_reduce(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    meet = str(tmp_path / "meet")
    other = torch.multiprocessing.get_context("spawn").Process(target=_reduced, args=(1, meet))
    other.start()
    calls, original = [], torch.distributed.all_reduce
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *a, **k: calls.append(1) or original(*a, **k))
    values = _reduced(0, meet)
    other.join()
    assert other.exitcode == 0
    assert len(calls) == 1
    model, batch = tiny_model("bert"), tiny_batch(batch=4, seed=3)
    with torch.no_grad(), saobp.probe(model) as health:
        model(**batch)
    for one, expected in zip(values, health.values("gtd").values(), strict=True):
        assert one == pytest.approx(expected.tolist(), rel=1e-5)


MASKS = {
    "eager": ("none", "padding", "4-D", "window", "holes"),
    "sdpa": ("none", "padding", "4-D", "window", "holes"),
    "flash_attention_2": ("none", "padding", "window"),
}
MASKED_CALLS = [
    (mask, implementation, causal)
    for implementation, masks in MASKS.items()
    for mask in masks
    for causal in (False, True)
    if (mask, implementation, causal) != ("none", "eager", True)  # eager is causal by its mask alone
]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("mask", "implementation", "causal"), MASKED_CALLS)
def test_every_kind_of_mask_is_read_as_the_model_means_it(
    mask: str, implementation: str, causal: bool, linear: bool
) -> None:
    """What is measured are the rows that the call itself would give, for each form that a mask comes in."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 7, 8, generator=generator)
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[1, 5:] = False
    given, window = None, None
    if implementation.startswith("flash"):
        given = None if mask == "none" else padding
        window = 3 if mask == "window" else None
    elif mask != "none":
        given = padding[:, None, None, :].expand(2, 1, 7, 7).clone()
        if causal:
            given &= torch.ones(7, 7, dtype=torch.bool).tril()
        if mask == "window":
            given &= torch.ones(7, 7, dtype=torch.bool).triu(-2)
        if mask == "holes":
            given[:, :, 3, 2] = False
        if implementation == "eager":
            given = torch.zeros(2, 1, 7, 7).masked_fill(~given, torch.finfo(torch.float32).min)
    call = AttentionCall(
        "layer", 0, torch.nn.Identity(), implementation, query, key, value, given, 0.4, 0.0, causal, window
    )
    heads = inputs_of(call, linear=linear)
    assert heads is not None
    real = padding if given is not None else torch.ones_like(padding)
    expected = call.rows()
    found = heads.maps().rows
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][:, real[1]], expected[1][:, real[1]])
    if linear and mask in ("none", "padding", "4-D"):
        assert heads.mask().is_plain


def test_cross_attention_and_unknown_arguments() -> None:
    states = torch.randn(3, 1, 2, 5, 4)
    options = (torch.nn.Identity(), "sdpa", *states, None, 0.5, 0.0, False, None)
    assert inputs_of(AttentionCall("decoder.layers.0.encoder_attn", 0, *options)) is None
    assert inputs_of(AttentionCall("encoder.layer.0.crossattention.self", 0, *options)) is None
    with pytest.raises(ValueError, match="passes 'block_indices' to its attention"):
        inputs_of(AttentionCall("layer", 0, *options, {"block_indices": 30.0}))
