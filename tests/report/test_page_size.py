"""Pages of long and many runs: thinned, under their limit, and what was left out is said."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from written_page import figure, page_of, words_of

from saobp.metrics.diagnosis.loading import example_model
from saobp.report import PAGE_BYTES, explorer_data, read_runs, write_explorer, write_report
from saobp.report.curves import read_curves
from saobp.report.page import POINTS, SNAPSHOTS, fitted, thinned
from saobp.testing.fake_runs import make_run
from saobp.testing.tiny_models import tiny_model


def test_long_curves_are_thinned_and_keep_their_extremes() -> None:
    lines = [{"step": step, "loss": math.sin(step / 50)} for step in range(20_000)]
    lines[7_777]["loss"] = 9.0
    (whole,) = read_curves(lines)["loss"]
    assert len(whole.values) == 20_000
    series = whole.thin(POINTS)
    assert len(series.values) <= POINTS
    assert max(value for value in series.values if value is not None) == 9.0
    assert series.thinned == 20_000
    assert (series.axes["step"][0], series.axes["step"][-1]) == (0, 19_999)


def test_a_page_stays_under_its_limit_and_says_what_was_left_out(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("bert", num_hidden_layers=4), example_model()[1]
    sentences = [f"{'word ' * 40} {place}" for place in range(8)]
    explorer = explorer_data(model, tokenizer, sentences)
    folder = make_run(tmp_path / "run", steps=100)
    write_explorer(explorer, folder)
    whole = write_report([folder], tmp_path / "whole.html")
    assert whole.stat().st_size < PAGE_BYTES
    assert len(page_of(whole)["explorers"][0]["sentences"]) == 8
    limit = whole.stat().st_size - 150_000
    cut = write_report([folder], tmp_path / "cut.html", max_bytes=limit)
    (kept,) = page_of(cut)["explorers"]
    assert cut.stat().st_size <= limit
    assert f"Of 8 sentences the first {len(kept['sentences'])} are here" in kept["left_out"][-1]
    one = fitted({**explorer, "sentences": explorer["sentences"][:1]}, 30_000)
    held = [head for heads in one["sentences"][0]["scores"] for head in heads if head is not None]
    assert 0 < sum(len(head["codes"]) for head in held) <= 30_000
    assert "of 16 heads on one sentence are here" in one["left_out"][-1]


def test_many_long_runs_share_the_room(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=7_000, layers=12, heads=12, measured=80)
    (run,) = read_runs([folder])
    (alone,) = thinned([run])
    assert len(alone.health) == SNAPSHOTS
    assert (alone.health[0], alone.health[-1]) == (run.health[0], run.health[-1])
    assert len(alone.curves["loss"][0].values) <= POINTS
    page = write_report([folder] * 16, tmp_path / "page.html")
    assert page.stat().st_size < PAGE_BYTES
    drawn = page_of(page)["heads"]["runs"]
    assert len(drawn) == 16
    assert drawn[0]["moments"][-1]["step"] == 7_000
    with pytest.raises(ValueError, match="report fewer at a time"):
        write_report([folder] * 3, tmp_path / "page.html", max_bytes=2_100_000)


def test_numbers_too_large_to_draw_are_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    (run / "result.json").write_text(json.dumps({"eval_perplexity": 10**400, "deep": [[[1]]]}))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1e308}\n{"step": 2, "loss": 2.0}\n')
    path = write_report([run], tmp_path / "page.html")
    assert figure(path, "curve-loss")["data"][0]["y"] == [None, 2.0]
    assert "It ended at a validation perplexity" not in words_of(path)
