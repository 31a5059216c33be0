"""What the benchmarks do with their numbers: ratios, failing versions, files. No speed is asserted."""

from __future__ import annotations

import csv
import gc
import re
import subprocess
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from saobp.benchmarking.attention import fastest, growth
from saobp.benchmarking.table import BenchmarkTable, milliseconds, ratio, spread, text
from saobp.runs import machine as facts
from saobp.runs.machine import commit, machine
from saobp.testing.scripts import load_script
from saobp.timing import Failure, Timing, captured, in_turn, wall_clock


def small_table() -> BenchmarkTable:
    table = BenchmarkTable("speeds", "Two speeds", {"CPU": "abacus", "commit": "abc"}, notes=["A note."])
    table.rows.append({"length": 8, "kind": "plain", "ms": 1.23456, "ratio": 2.0})
    table.rows.append(
        {"length": 16, "kind": "plain", "ms": "ValueError: a | b", "ratio": None, "extra": 1234.56}
    )
    return table


def test_ratio_compares_neighbours_in_time() -> None:
    """The machine is slow in the second turn for both: the ratio does not see it."""
    base, other = Timing((1.0, 10.0, 2.0)), Timing((2.0, 20.0, 4.0))
    assert ratio(other, base) == 2.0
    assert milliseconds(other) == 4.0
    assert ratio(Failure("no"), base) is None
    assert ratio(other, None) is None
    assert milliseconds(Failure("no")) == "no"
    assert milliseconds(None) is None


def test_spread_is_half_the_quartile_distance() -> None:
    assert spread(Timing((1.0, 2.0, 3.0, 4.0, 5.0))) == pytest.approx(100 * 1.0 / 3.0)
    assert spread(Timing((2.0,))) == 0
    assert spread(Failure("no")) is None


def test_a_failing_version_does_not_stop_the_others() -> None:
    order: list[str] = []
    later = iter([None] * 4 + [RuntimeError("late\nsecond line")])

    def breaks_later() -> None:
        error = next(later)
        if error is not None:
            raise error

    def breaks() -> None:
        raise ValueError("never works")

    calls = {
        "a": lambda: order.append("a"),
        "never": breaks,
        "late": breaks_later,
        "b": lambda: order.append("b"),
    }
    found = in_turn(calls, turns=3, budget=0.0, clock=wall_clock, warm_up=1)
    assert list(found) == ["a", "never", "late", "b"]
    assert found["never"] == Failure("ValueError: never works")
    assert found["late"] == Failure("RuntimeError: late")
    assert isinstance(found["a"], Timing)
    assert len(found["a"].turns) == 3
    assert order[-6:] == ["a", "b", "b", "a", "b", "a"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_captured_call_keeps_the_tensors_that_it_reads() -> None:
    out = torch.zeros(1024, device="cuda")

    def adding(numbers: torch.Tensor) -> Callable[[], object]:
        return lambda: out.add_(numbers)

    call = captured(adding(torch.ones(1024, device="cuda")))
    gc.collect()
    others = torch.full((64, 1024), 5.0, device="cuda")  # would take the memory of the freed ones
    before = out.clone()
    call()
    assert torch.equal(out, before + 1)
    assert others.min() == 5


def test_fastest_backend() -> None:
    slow, quick, failed = Timing((3.0,)), Timing((1.0,)), Failure("not here")
    assert fastest({"x": slow, "y": quick, "z": failed}) == ("y", quick)
    assert fastest({"z": failed}) == ("none", failed)


def test_growth_finds_the_exponent() -> None:
    assert growth({n: 3.0 * n**2 for n in (2, 4, 8)}) == pytest.approx(2.0)
    assert growth({2: 1.0, 4: -1.0}) is None


def test_text_of_cells() -> None:
    assert [text(c) for c in (1.23456, 1234.56, 7, "x", None)] == ["1.23", "1235", "7", "x", "-"]


def test_markdown_has_facts_rows_and_notes() -> None:
    page = small_table().markdown()
    assert page.startswith("# Two speeds\n\n- CPU: abacus\n- commit: abc\n\n")
    assert "| length | kind | ms | ratio | extra |\n|---|---|---|---|---|\n" in page
    assert "| 8 | plain | 1.23 | 2 | - |" in page
    assert "| 16 | plain | ValueError: a \\| b | - | 1235 |" in page
    assert page.endswith("\nA note.\n")


def test_files(tmp_path: Path) -> None:
    table = small_table()
    page, data = table.write(tmp_path / "new")
    assert page.read_text() == table.markdown()
    lines = data.read_text().splitlines()
    assert lines[:2] == ["# CPU: abacus", "# commit: abc"]
    rows = list(csv.DictReader(lines[2:]))
    assert float(rows[0]["ms"]) == 1.23456
    assert rows[1]["ms"] == "ValueError: a | b"
    picture = table.draw(tmp_path / "speeds.png", "length", ["ms", "ratio"], ["kind"], "ms")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_terminal() -> None:
    console = Console(file=StringIO(), width=120)
    small_table().show(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Two speeds" in shown
    assert "1.23" in shown
    assert "A note." in shown


def test_header_names_what_was_used() -> None:
    facts = machine("cpu")
    assert facts["torch"].startswith(torch.__version__.split("+")[0])
    assert f"{torch.get_num_threads()} threads used" in facts["CPU"]
    assert all(facts[name] for name in ("CPU", "triton", "transformers", "commit", "date"))


def test_a_copy_inside_another_repository_does_not_take_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a virtual environment that lies in the folder of someone's own project."""
    monkeypatch.delenv("SAOBP_COMMIT", raising=False)
    (tmp_path / "machine.py").write_text("")

    def git(*words: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "their own")
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "machine.py"))
    assert commit() == f"saobp {facts.version('saobp')}"
    git("add", "machine.py")
    git("commit", "-m", "ours")
    assert re.fullmatch(r"[0-9a-f]{7,}", commit())
    (tmp_path / "machine.py").write_text("changed")
    assert commit().endswith("with uncommitted changes")


def test_counters_are_read_by_kernel_and_call() -> None:
    counters = load_script("benchmarks/counters.py")
    shares, stalls = len(counters.COUNTERS), len(counters.STALLS)
    measured = [counters.TIME, counters.REGISTERS, counters.BETWEEN]
    columns = ["ID", "Kernel Name", *measured, *counters.COUNTERS.values(), *counters.STALLS.values()]
    cudnn = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"
    units = ["", "", "ns", "register/thread", "inst", *["%"] * shares, *["inst"] * stalls]

    def launch(name: str, time: str, registers: int, tensor_cores: float = 0.0) -> list[object]:
        others, waiting = [10] * (shares - 1), [3, 5, *[0.5] * (stalls - 2)]
        return ["0", name, time, registers, 10, tensor_cores, *others, *waiting]

    plain = launch(cudnn, "1,500", 168, 51.5)
    mark = launch("at::cuda::spin_kernel(long)", "900", 16)
    calls = [
        [launch("row_sums", "3,000", 128, 40), launch("row_sums", "1,000", 128, 80), launch("few", "50", 21)],
        [launch("learned_sums", "4,000", 128)], [launch("key_bias", "3,500", 128)], [plain],
        [launch("causal_row_sums", "2,000", 72)], [launch("causal_learned", "2,100", 72)],
        [launch("causal_bias", "2,200", 72)],
        [launch("void cudnn::convert_dq<1>(const void *, int)", "700", 30)],
        [launch("decode", "300", 72)],
        [launch("void pytorch_flash::flash_fwd_splitkv_kernel<1>(int)", "240", 72)],
    ]  # fmt: skip

    def rows_of(calls: list[list[list[object]]], length: int | None) -> list[dict[str, Any]]:
        lines = [columns, units, *(line for call in calls for line in (*call, mark))]
        table = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
        return list(counters.kernel_rows(counters.launches(f"==PROF== Connected\n{table}\n"), length))

    rows = [*rows_of(calls[:-2], 128), *rows_of(calls[-2:], None)]
    assert [(row["attention"], row["by"], row["kernel"], row["launches"]) for row in rows] == [
        ("bidirectional", "saobp, fixed", "row_sums", 2),
        ("bidirectional", "saobp, learned", "learned_sums", 1),
        ("bidirectional", "saobp, key bias", "key_bias", 1),
        ("bidirectional", "cuDNN", "flash_fprop", 1),
        ("causal", "saobp, fixed", "causal_row_sums", 1),
        ("causal", "saobp, learned", "causal_learned", 1),
        ("causal", "saobp, key bias", "causal_bias", 1),
        ("causal", "cuDNN", "cudnn::convert_dq", 1),
        ("decoding, batch 32", "saobp, learned", "decode", 1),
        ("decoding, batch 32", "sdpa", "pytorch_flash::flash_fwd_splitkv_kernel", 1),
    ]
    assert rows[0]["microseconds"] == pytest.approx(4.0)
    assert rows[0]["tensor cores"] == pytest.approx(50.0)  # the longer launch counts more
    assert rows[0]["registers"] == 128
    assert rows[0]["waits for"] == "matrix products 50, a barrier 30"
