"""Source trees compared in turns, each in a process of its own."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from saobp.testing.scripts import ROOT, load_script

compare = load_script("benchmarks/compare_trees.py")


def test_ratios_are_taken_within_rounds() -> None:
    times = {
        "16|forward|plain": [1.0, 2.0, 4.0],
        "16|forward|fixed": [2.0, 6.0, 8.0],
        "32|forward|plain": [9.0],
    }
    row = compare.cells(times, "16|forward|")
    assert row["plain"] == 2.0
    assert row["fixed / plain"] == 2.0
    assert "learned" not in row
    assert row["spread %"] == pytest.approx(100 * 0.75 / 2.0)


def test_a_tree_without_a_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["main=/no/such/folder"])
    assert "'main=/no/such/folder' is not NAME=SRC with a folder SRC" in capsys.readouterr().err


@pytest.mark.slow
def test_trees_are_timed_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "saobp"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken')")
    words = f"main={ROOT / 'src'} broken={broken.parent} --device cpu --lengths 16 --rows 512 --rounds 2"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/compare_trees.py", *words.split()],
        cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "broken ended by itself: see broken.log" in done.stderr
    folder = tmp_path / "compare-trees"
    assert "ImportError: broken" in (folder / "broken.log").read_text()
    assert [
        (row["pass"], row["tree"], bool(row["fixed"])) for row in rows_of(folder / "compare-trees.csv")
    ] == [
        ("forward", "main", True),
        ("forward", "broken", False),
        ("forward + backward", "main", True),
        ("forward + backward", "broken", False),
    ]
    errors = rows_of(folder / "compare-trees-errors.csv")
    assert {row["heads"] for row in errors} == set(compare.KINDS)
    assert all(float(row["output"]) == 1.0 and row["equal repeats"] == "10 of 10" for row in errors)


def rows_of(path: Path) -> list[dict[str, str]]:
    """Rows of a table's CSV, without the facts above them."""
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
