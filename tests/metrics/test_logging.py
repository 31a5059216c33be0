"""Health in training logs, and correlations over checkpoints."""

from __future__ import annotations

import logging
import math

import numpy
import pytest
import torch
from returned_families import tiny
from scipy import stats
from transformers import Trainer, TrainingArguments

import saobp
from saobp import metrics
from saobp.metrics import HealthCallback, HealthLog
from saobp.metrics.health.head_health import RunningSums
from saobp.metrics.health.verdicts import uniform_map, verdict
from saobp.testing.tiny_models import tiny_batch, tiny_model


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tiny_batch(batch=1, length=10, seed=index)["input_ids"][0]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def trainer(tmp_path, model=None, **options) -> Trainer:  # type: ignore[no-untyped-def]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        logging_steps=2,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model or tiny_model("bert"), args=arguments, train_dataset=Texts())


def test_a_model_outside_the_registry_in_a_trainer(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = trainer(tmp_path, tiny("deberta-v2"), report_to="none")
    run.add_callback(HealthCallback(run, every=3))
    run.train()
    entries = [entry for entry in run.state.log_history if "health/gtd" in entry]
    assert [entry["step"] for entry in entries] == [1, 4]
    assert not any(part._forward_hooks for part in run.model.modules())


def test_trainer_logs_health_where_the_loss_goes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run = trainer(tmp_path, report_to="tensorboard", gradient_accumulation_steps=2)
    run.add_callback(
        HealthCallback(run, every=3, texts=2, statistics=("gtd", "sink_mass", "attention_entropy"))
    )
    run.train()
    entries = [entry for entry in run.state.log_history if "health/gtd" in entry]
    assert [entry["step"] for entry in entries] == [1, 4]
    for entry in entries:
        assert 0 < entry["health/layer_01/gtd"] < 1
        assert 0 < entry["health/layer_00/sink_mass"] < 1
        layers = [entry[f"health/layer_0{layer}/gtd"] for layer in range(2)]
        assert entry["health/gtd"] == pytest.approx(sum(layers) / 2)
    assert "training_step" not in run.__dict__

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents.*")).parent))
    events.Reload()
    assert [event.step for event in events.Scalars("train/health/layer_01/gtd")] == [1, 4]


def test_health_does_not_change_training(tmp_path) -> None:  # type: ignore[no-untyped-def]
    weights = []
    for watched in (False, True):
        run = trainer(tmp_path, tiny_model("gpt2"))
        if watched:
            run.add_callback(HealthCallback(run, every=2, method="sampled"))
        run.train()
        weights.append(run.model.state_dict())
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name]), name


def test_a_new_model_need_not_be_warned_of(tmp_path, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    flat = tiny_model("bert")
    for layer in flat.bert.encoder.layer:
        torch.nn.init.zeros_(layer.attention.self.query.weight)
    for untrained in (True, False):
        run = trainer(tmp_path, flat)
        run.add_callback(HealthCallback(run, untrained=untrained))
        with caplog.at_level(logging.WARNING, "saobp"):
            run.train()
        assert any("diffuse" in record.message for record in caplog.records) == (not untrained)


def test_whether_a_model_is_new_is_found(tmp_path, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    flat = tiny_model("bert")
    for layer in flat.bert.encoder.layer:
        torch.nn.init.zeros_(layer.attention.self.query.weight)
    assert metrics.is_untrained(flat)
    for again in (False, True):
        run = trainer(tmp_path, flat)
        run.add_callback(HealthCallback(run))
        with caplog.at_level(logging.WARNING, "saobp"):
            run.train()
        assert any("diffuse" in record.message for record in caplog.records) == again
    assert not metrics.is_untrained(flat)
    assert not metrics.is_untrained(torch.nn.Linear(2, 2, bias=False))


def test_the_fast_tier_reaches_the_tracker_and_alerts(tmp_path, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    run, alerts = trainer(tmp_path, tiny_model("llama")), []
    ranges = {"max_logit": (None, 0.01), "attention_entropy": (0.0, 10.0)}
    fast = HealthCallback(
        run, every=2, statistics=metrics.FAST, ranges=ranges, untrained=False, on_alert=alerts.append
    )
    run.add_callback(fast)
    run.add_callback(HealthCallback(run, every=3, statistics=["gtd"], prefix="thorough"))
    with caplog.at_level(logging.WARNING, "saobp"):
        run.train()
    entries = [entry for entry in run.state.log_history if "health/max_logit" in entry]
    assert [entry["step"] for entry in entries] == [1, 3, 5]
    for entry in entries:
        layers = [entry[f"health/layer_0{layer}/max_logit"] for layer in range(2)]
        assert entry["health/max_logit"] == max(layers)
        assert 0 < entry["health/sink_share_by_norm"] < 1
    assert entries[0]["health/alerts"] == len([alert for alert in alerts if alert.step == 1]) > 0
    assert entries[1]["health/alerts"] == 0
    assert "above 0.01" in alerts[0].reason
    lines = [record.message for record in caplog.records if "max_logit" in record.message]
    assert len(lines) == 1
    assert "at step 1: newly outside the healthy range are" in lines[0]
    assert [entry["step"] for entry in run.state.log_history if "thorough/gtd" in entry] == [1, 4]
    assert "training_step" not in run.__dict__


def test_heads_alert_each_time_that_they_leave_their_range(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny_model("bert"), tiny_batch()
    query = model.bert.encoder.layer[1].attention.self.query.weight
    usual, alerts = query.detach().clone(), []
    send = HealthLog(lambda *_: None, untrained=True, ranges={"max_logit": (-50, 50)}, on_alert=alerts.append)
    with caplog.at_level(logging.WARNING, "saobp"), torch.no_grad(), saobp.watch(model) as heads:
        for step, size in enumerate((1.0, 1e3, 1e3, 1.0, 1e3, float("nan"))):
            query.copy_(size * usual)
            model(**batch)
            send(heads, step)
    assert sorted({alert.step for alert in alerts}) == [1, 4, 5]
    assert {alert.layer for alert in alerts} == {1}
    assert alerts[-1].reason == "undefined (entropy nan)"
    assert len(caplog.records) == 3


def test_ranges_without_meaning_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="ends at 1, below its start 2"):
        HealthLog(print, ranges={"max_logit": (2, 1)})
    model = tiny_model("bert")
    with torch.no_grad(), saobp.watch(model) as heads:
        model(**tiny_batch())
    with pytest.raises(ValueError, match="a range for gtd, but measured are max_logit"):
        HealthLog(print, ranges={"gtd": (0.5, None)})(heads, 0)
    with pytest.raises(ValueError, match="max_logit belong to the fast tier"):
        HealthCallback(trainer(tmp_path), statistics=("gtd", "max_logit"))
    for ends in (1, (None,), ("a", None), (None, math.nan), "ab"):
        with pytest.raises(ValueError, match="range of gtd must be its lowest and highest value"):
            HealthLog(print, ranges={"gtd": ends})
    with pytest.raises(TypeError, match="ranges must be a dict"):
        HealthLog(print, ranges=[("gtd", (0, 1))])


def test_a_range_that_is_never_measured_is_refused_before_training(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Also one for max_logit, which has a range by default: it would never alert."""
    run = trainer(tmp_path)
    for name in ("max_logit", "gdt"):
        with pytest.raises(ValueError, match=f"a range for {name}, but measured are gtd"):
            HealthCallback(run, ranges={name: (None, 50)})
    HealthCallback(run)
    HealthCallback(run, statistics=metrics.FAST, ranges={"max_logit": (None, 50)})


def test_the_loss_is_logged_beside_health_and_clipping(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Trainer.log takes back the flag by which the Trainer logs the loss at the end of the step."""
    run = trainer(tmp_path, report_to="none")
    run.add_callback(HealthCallback(run, every=2))
    run.add_callback(HealthCallback(run, every=1, statistics=metrics.FAST, prefix="fast"))
    run.add_callback(metrics.QKClip(run, threshold=1e6))
    run.args.logging_steps = 3
    run.train()
    steps = {
        name: [entry["step"] for entry in run.state.log_history if name in entry]
        for name in ("loss", "health/gtd", "fast/max_logit", "qk_clip/heads")
    }
    assert steps["loss"] == steps["qk_clip/heads"] == [3, 6]
    assert steps["health/gtd"] == [1, 3, 5]
    assert steps["fast/max_logit"] == [1, 2, 3, 4, 5, 6]


def test_callbacks_refuse_what_they_cannot_use(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = trainer(tmp_path)
    for callback in (HealthCallback, metrics.QKClip):
        with pytest.raises(TypeError, match="takes the Trainer that it is added to, not Bert"):
            callback(run.model)
        for every in (0, "a", 1.5):
            with pytest.raises(ValueError, match="every must be a whole number of at least 1"):
                callback(run, every=every)
    with pytest.raises(ValueError, match="threshold must be above 0, not 'a'"):
        metrics.QKClip(run, threshold="a")
    with pytest.raises(ValueError, match=r"a list of names, as in \['gtd'\]"):
        HealthCallback(run, statistics="gtd")
    with pytest.raises(TypeError, match="on_alert must be a function, not int"):
        HealthCallback(run, on_alert=3)
    with pytest.raises(TypeError, match="log must be a function, not int"):
        HealthLog(3)


def test_a_failing_step_leaves_nothing_switched_on(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from transformers.modeling_utils import AttentionInterface

    before = AttentionInterface.get_interface
    run = trainer(tmp_path)
    run.add_callback(HealthCallback(run))
    run.train_dataset = [{"input_ids": torch.full((4,), 9999), "labels": torch.zeros(4).long()}] * 8
    with pytest.raises(IndexError):
        run.train()
    assert AttentionInterface.get_interface is before


def test_plain_loop_logs_and_warns_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    model, batch, logged = tiny_model("bert"), tiny_batch(), []
    send = HealthLog(lambda numbers, step: logged.append((step, numbers)))
    with caplog.at_level(logging.WARNING, "saobp"), torch.no_grad(), saobp.probe(model) as health:
        for step in range(2):
            model(**batch)
            send(health, step)
        torch.nn.init.zeros_(model.bert.encoder.layer[0].attention.self.query.weight)
        torch.nn.init.zeros_(model.bert.encoder.layer[0].attention.self.query.bias)
        model(**batch)
        send(health, 2)
        send(health, 3)
    assert [step for step, _ in logged] == [0, 1, 2]
    assert logged[2][1]["health/layer_00/gtd"] == pytest.approx(0.856, abs=1e-3)
    lines = [record.message for record in caplog.records]
    assert "at step 2: newly outside the healthy range are" in lines[-1]
    assert "layer 0 head 3 diffuse (GTD 0.86, entropy " in lines[-1]
    assert not any("at step 1:" in line for line in lines)


@pytest.mark.parametrize(
    ("word", "shown"),
    [("sink", "sink (sink mass 0.62)"), ("localised", "localised (GTD 0.69, entropy 0.31)")],
)
def test_a_warning_has_the_numbers_that_a_verdict_looks_at(word, shown) -> None:  # type: ignore[no-untyped-def]
    values = {"gtd": 0.69, "attention_entropy": 0.31, "sink_mass": 0.62}
    health, reasons = metrics.Health(tuple(values)), []
    health.layers["a"] = RunningSums(len(values), 1, torch.device("cpu"))
    health.heads = lambda: [metrics.HeadHealth(0, "a", 2, values, {}, word, 1)]  # type: ignore[method-assign]
    HealthLog(lambda *_: None, on_alert=lambda alert: reasons.append(alert.reason))(health, 7)
    assert reasons == [shown]


def test_heads_that_cannot_be_judged_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model, batch, logged = tiny_model("bert"), tiny_batch(), []
    send = HealthLog(lambda numbers, _: logged.append(numbers))
    with (
        caplog.at_level(logging.WARNING, "saobp"),
        torch.no_grad(),
        saobp.probe(model, statistics=["sink_mass"]) as health,
    ):
        model(**batch)
        send(health, 0)
        assert not caplog.records
        torch.nn.init.constant_(model.bert.encoder.layer[1].attention.self.query.weight, float("nan"))
        model(**batch)
        send(health, 1)
    assert "4 of 8 heads: layer 1 head 0 undefined" in caplog.text
    measured = {"health/sink_mass", "health/layer_00/sink_mass", "health/layer_01/sink_mass"}
    assert set(logged[0]) == {*measured, "health/alerts"}


def test_heads_of_an_untrained_model_are_warned_of_once_they_were_healthy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model("bert"), tiny_batch()
    send = HealthLog(lambda *_: None, untrained=True)
    verdicts = iter(["diffuse", "localised", "healthy", "borderline", "localised", "localised", "undefined"])
    with caplog.at_level(logging.WARNING, "saobp"), torch.no_grad(), saobp.probe(model) as health:
        for step, word in enumerate(verdicts):
            monkeypatch.setattr("saobp.metrics.health.verdicts.verdict", lambda *_, word=word, **__: word)
            model(**batch)
            send(health, step)
    assert [record.message.split(":")[0][-1] for record in caplog.records] == ["4", "6"]


def test_verdicts_follow_the_ranges() -> None:
    words = {0.3: "localised", 0.55: "borderline", 0.7: "healthy", 0.82: "borderline", 0.9: "diffuse"}
    for value, word in words.items():
        assert verdict(value) == word
    assert verdict(0.7, sink_mass=0.6) == "sink"
    assert verdict(0.7, entropy_share=0.05) == "localised"
    assert verdict(0.7, entropy_share=0.95) == "diffuse"
    assert verdict(0.9, entropy_share=0.75) == "diffuse"
    assert verdict(0.9, entropy_share=0.5) == "borderline"  # paths meet in a few tokens
    assert verdict(float("nan")) == "undefined"


@pytest.mark.parametrize("length", [2, 3, 8, 100, 1024, 1500])
@pytest.mark.parametrize("causal", [False, True])
def test_numbers_of_the_uniform_map_are_those_of_its_map(length: int, causal: bool) -> None:
    rows = torch.ones(length, length, dtype=torch.float64)
    rows = rows.tril() if causal else rows
    rows /= rows.sum(-1, keepdim=True)
    found = uniform_map(torch.tensor([length]), causal=causal)
    statistics = (metrics.gtd, metrics.attention_entropy, metrics.sink_mass)
    for value, statistic in zip(found, statistics, strict=True):
        tolerance = 1e-9 if length <= 1024 else 1e-4
        assert float(value) == pytest.approx(float(statistic(rows)), abs=tolerance)


@pytest.mark.parametrize("length", [4, 16, 128, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_one_habit_gets_one_verdict_under_every_mask(length: int, causal: bool) -> None:
    """Maps: uniform rows, one token, the token itself, in long texts an eighth around the token."""
    gtd, entropy, sink = (float(part) for part in uniform_map(torch.tensor([length]), causal=causal))
    seen = torch.ones(length, length).tril() if causal else torch.ones(length, length)
    places = torch.arange(length)
    near = (places[:, None] - places).abs() <= length / (8 if causal else 16)
    planted = {"diffuse": seen, "sink": torch.eye(length)[[0] * length], "localised": torch.eye(length)}
    if length >= 128:
        planted["healthy"] = seen * near
    for word, weights in planted.items():
        rows = (weights / weights.sum(-1, keepdim=True)).double()
        found = verdict(
            float(metrics.gtd(rows)),
            entropy_share=float(metrics.attention_entropy(rows)) / entropy,
            sink_mass=float(metrics.sink_mass(rows)),
            uniform_gtd=gtd,
            uniform_sink=sink,
        )
        assert found == word, (found, word)


def test_correlations_equal_scipy() -> None:
    noise = numpy.random.default_rng(0).normal(size=(3, 12))
    records = [
        {"gtd": a, "cross_layer_gtd": b, "accuracy": a + 0.1 * c}
        for a, b, c in zip(*noise.tolist(), strict=True)
    ]
    found = metrics.correlations(records, "accuracy")
    truth = stats.pearsonr(noise[0], noise[0] + 0.1 * noise[2])
    assert found["gtd"] == (pytest.approx(truth.statistic), pytest.approx(truth.pvalue), 12)
    assert abs(found["cross_layer_gtd"].r) < found["gtd"].r


@pytest.mark.parametrize(
    ("values", "scores", "words"),
    [
        ([1, 2], [1, 2], "three checkpoints"),
        ([1, 2, 3], [1, 2], "3 values but 2 scores"),
        ([1, 1, 1], [1, 2, 3], "same at every"),
        ([1, 2, float("nan")], [1, 2, 3], "NaN"),
    ],
)
def test_correlations_without_meaning_are_refused(values: list, scores: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        metrics.pearson(values, scores)
    with pytest.raises(ValueError, match="checkpoint 0 has no accuracy"):
        metrics.correlations([{"gtd": 1.0}], "accuracy")
