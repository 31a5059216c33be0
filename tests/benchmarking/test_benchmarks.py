"""Each benchmark at a tiny size on a CPU, and the command around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import saobp
from saobp.benchmarking import model as model_benchmark
from saobp.benchmarking.attention import attention_speed, flash_versions
from saobp.benchmarking.decoding import Shape, decoding_speed, make_step, step_call
from saobp.benchmarking.model import cpu_inference, masked_batch, model_speed
from saobp.benchmarking.table import BenchmarkTable
from saobp.cli import app
from saobp.sizes import PAPER_SIZES, Size
from saobp.testing.scripts import load_script

TINY = Size(1, 16, 2, 16)


@pytest.fixture
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in PAPER_SIZES:
        monkeypatch.setitem(PAPER_SIZES, size, TINY)


def test_attention_on_a_cpu_records_that_the_kernels_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.kernels.dispatch.INTERPRETED", False)
    saved: list[int] = []
    table = attention_speed(
        device="cpu",
        lengths=(8, 16),
        compiled=(),
        rows=32,
        heads=2,
        turns=2,
        budget=0.0,
        notify=lambda _: None,
        save=lambda table: saved.append(len(table.rows)),
    )
    assert saved == list(range(1, 9))
    assert [(row["attention"], row["pass"], row["length"]) for row in table.rows][:3] == [
        ("bidirectional", "forward", 8),
        ("bidirectional", "forward + backward", 8),
        ("bidirectional", "forward", 16),
    ]
    for row in table.rows:
        assert "because" in str(row["fused"])
        assert row["fused / sdpa"] is None
        assert isinstance(row["sdpa"], float)
        assert isinstance(row["eager"], float)
        assert row["backend"] == "default"


def test_flash_attention_is_a_rival_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saobp.kernels.dispatch.INTERPRETED", False)

    def flash_attn_func(q, k, v, causal):  # type: ignore[no-untyped-def]
        states = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=causal).transpose(1, 2)
        return out, None

    stand_in = ModuleType("flash_attn_interface")
    stand_in.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in)
    monkeypatch.setitem(
        sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute")
    )  # too old: no such function
    table = attention_speed(
        device="cpu", lengths=(8,), compiled=(), rows=32, heads=2, turns=2, budget=0.0, notify=lambda _: None
    )
    for row in table.rows:
        assert isinstance(row["flash 3"], float)
        assert isinstance(row["flash 3 / sdpa"], float)
        assert "flash 4" not in row
    states = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    plain = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True)
    torch.testing.assert_close(flash_versions(True)["flash 3"](*states), plain)


def test_a_decoding_step_is_timed_over_sdpa() -> None:
    table = decoding_speed(
        device="cpu", batches=(2,), keys=9, shape=Shape(4, 2, 16), turns=2, budget=0.0, notify=lambda _: None
    )
    assert [row["part"] for row in table.rows] == ["attention", "attention and cache update"]
    for row in table.rows:
        assert all(
            isinstance(row[name], float) for name in ("sdpa", "fixed", "learned", "learned / sdpa", "again")
        )


@pytest.mark.parametrize("part", ["attention", "attention and cache update"])
def test_the_timed_step_is_refined_and_repeats(part: str) -> None:
    """Every call starts from the same cache; without messages and strength it is sdpa."""
    shape = Shape(4, 2, 16)
    step = make_step(2, 9, shape, torch.float32, "cpu")
    call = step_call("learned", step, shape, part)
    first, second = call()[0], call()[0]
    assert torch.equal(first, second)
    plain = step_call("sdpa", step, shape, part)()[0]
    assert first.shape == plain.shape
    assert (first - plain).abs().max() > 1e-3
    silent = step._replace(totals=torch.zeros_like(step.totals))
    torch.testing.assert_close(step_call("learned", silent, shape, part)()[0], plain)


@pytest.mark.usefixtures("tiny_sizes")
def test_model_rows_and_ratios() -> None:
    table = model_speed(
        device="cpu",
        sizes=("mini", "small"),
        training=(2, 8),
        inference=(1, 8),
        vocabulary=40,
        compiled=False,
        turns=2,
        budget=0.0,
        notify=lambda _: None,
    )
    kinds = [(row["stage"], row["size"]) for row in table.rows]
    assert kinds == [(stage, size) for stage in model_benchmark.STAGES for size in ("mini", "small")]
    for row in table.rows:
        assert all(isinstance(row[version], float) for version in model_benchmark.REFINEMENTS)
        assert isinstance(row["high / original"], float)
        assert isinstance(row["again"], float)


@pytest.mark.usefixtures("tiny_sizes")
def test_a_model_that_fails_leaves_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model_benchmark.bert

    def broken(kind, size, version, **options):  # type: ignore[no-untyped-def]
        if version == "high":
            raise RuntimeError("out of luck")
        return plain(kind, size, version, **options)

    monkeypatch.setattr(model_benchmark, "bert", broken)
    options = {"device": "cpu", "sizes": ("mini",), "stages": ("inference",), "inference": (1, 8)}
    table = model_speed(
        **options, vocabulary=40, compiled=False, turns=1, budget=0.0, notify=lambda _: None  # type: ignore[arg-type]
    )  # fmt: skip
    assert table.rows[0]["high"] == "RuntimeError: out of luck"
    assert isinstance(table.rows[0]["learned / original"], float)


def test_no_row_begins_after_the_limit() -> None:
    table = model_speed(device="cpu", limit=-1.0, notify=lambda _: None)
    assert not table.rows
    assert any("training step, mini: left out" in note for note in table.notes)


def test_masked_batch_counts_masked_places_alone() -> None:
    ids, labels = masked_batch((64, 32), 200, "cpu")
    counted = labels != -100
    assert (ids[counted] == model_benchmark.MASK).all()
    assert 0.1 < counted.float().mean() < 0.25


def test_versions_are_what_their_names_say() -> None:
    from transformers import BertModel

    original, high, learned, key_bias = (
        model_benchmark.bert(BertModel, TINY, version, vocabulary=40)
        for version in model_benchmark.REFINEMENTS
    )
    assert original.config._attn_implementation == "sdpa"
    assert high.config.saobp["factor"] == "high"
    assert high.config.saobp["strength"] > 0
    assert learned.config.saobp["strength"] == "learned"
    assert key_bias.config.saobp == {**learned.config.saobp, "factor": "high-key-bias"}
    for own, other in zip(original.parameters(), high.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.usefixtures("tiny_sizes")
def test_cpu_rows_and_threads() -> None:
    threads = torch.get_num_threads()
    table = cpu_inference(batches=(1, 2), length=8, turns=2, budget=0.0, vocabulary=40, notify=lambda _: None)
    assert torch.get_num_threads() == threads
    assert "2 threads used" in table.facts["CPU"]
    assert [row["batch"] for row in table.rows] == [1] * 5 + [2] * 5
    assert table.rows[0]["over original"] == 1.0
    busy = cpu_inference(
        batches=(1,), length=8, turns=2, budget=0.0, vocabulary=40, busy=True, notify=lambda _: None
    )
    assert "1 threads used" in busy.facts["CPU"]
    assert any("Processor time" in note for note in busy.notes)


def test_the_command_tells_its_version() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert said.exit_code == 0
    assert said.stdout == f"saobp {saobp.__version__}\n"


def test_commands_need_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = {"pretraining": "saobp bench pretraining --models bert-tiny"}
    for command in ("attention", "decoding", "model", "pretraining"):
        said = CliRunner().invoke(app, ["bench", command, "--out", str(tmp_path)])
        assert said.exit_code == 1
        assert said.stdout == ""
        assert said.stderr.strip() == (
            "this benchmark needs a CUDA GPU and PyTorch finds none on this machine: try "
            + small.get(command, "saobp bench cpu")
        )
    assert not list(tmp_path.iterdir())


def test_cpu_command_writes_page_data_and_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tiny(**options):  # type: ignore[no-untyped-def]
        table = BenchmarkTable("cpu", f"{options['threads']} threads", {"CPU": "abacus"})
        table.rows.append({"batch": 1, "version": "high", "over original": 1.1})
        return table

    monkeypatch.setattr("saobp.benchmarking.model.cpu_inference", tiny)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, ["bench", "cpu", "--threads", "3"])
    assert said.exit_code == 0
    assert "3 threads" in said.stdout
    assert not list(tmp_path.iterdir())  # without --out
    said = CliRunner().invoke(app, ["bench", "cpu", "--threads", "3", "--out", str(tmp_path)])
    assert said.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.csv", "cpu.md", "cpu.png"]


@pytest.mark.parametrize("command", ["attention", "decoding", "model", "pretraining"])
def test_files_are_written_only_where_asked(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tiny(*_: object, save: Callable[[BenchmarkTable], object] = id, **__: object) -> BenchmarkTable:
        table = BenchmarkTable(command, "tiny", {"GPU": "abacus"}, rows=[{"length": 128, "size": "mini"}])
        save(table)
        return table

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(f"saobp.benchmarking.{command}.{command}_speed", tiny)
    monkeypatch.setattr("saobp.benchmarking.attention.training_memory", tiny)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["bench", command]).exit_code == 0
    assert not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["bench", command, "--out", "asked"]).exit_code == 0
    assert {f"{command}.csv", f"{command}.md"} <= {path.name for path in (tmp_path / "asked").iterdir()}


def test_no_threads_are_refused() -> None:
    said = CliRunner().invoke(app, ["bench", "cpu", "--threads", "0"])
    assert said.exit_code == 2
    assert "threads" in said.output


def test_unknown_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = CliRunner().invoke(app, ["bench", "model", "--sizes", "mini,huge"])
    assert said.exit_code == 2
    assert "huge" in said.output


def test_counters_say_what_they_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="NVIDIA's profiler ncu, which is not on the path"):
        load_script("benchmarks/counters.py").read_counters(128)


def test_lengths_that_are_no_numbers_are_refused() -> None:
    said = CliRunner().invoke(app, ["bench", "attention", "--lengths", "128,long"])
    assert said.exit_code == 2
    assert "'long' is no whole number" in said.output
