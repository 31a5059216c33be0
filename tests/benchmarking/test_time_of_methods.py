"""Times of training steps in turns: blocks without checks of the captured step, turns of two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from saobp.testing.scripts import ROOT, load_script
from saobp.testing.tiny_training import prose

timing = load_script("benchmarks/time_of_methods.py")


def test_no_block_has_a_check_of_the_captured_step() -> None:
    checks = [2**n + timing.WARMUP_STEPS for n in range(12)]
    for first, steps, count in ((70, 40, 8), (4, 2, 5), (1, 1, 3)):
        found = timing.blocks(first, steps, count)
        assert len(found) == count
        assert all(end - begin == steps for begin, end in found)
        assert all(one[1] <= other[0] for one, other in pairwise(found))
        assert not [step for step in checks for begin, end in found if begin < step <= end]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("none high:leaned", "leaned"),
        ("none --set optimzer=muon", "optimzer"),
        ("none --out nowhere/time.json", "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_compiled(
    options: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["time_of_methods.py", *options.split(), "--tokens", "tokens"])
    monkeypatch.setattr(timing, "measure", lambda _: pytest.fail("it was started"))
    with pytest.raises(SystemExit):
        timing.main()
    assert words in capsys.readouterr().err


def test_a_method_that_ends_has_no_time_in_that_round() -> None:
    words = "input(); print(0.5, flush=True); print('ready', flush=True)"
    child = subprocess.Popen([sys.executable, "-c", words], stdin=-1, stdout=-1, text=True)
    assert timing.block(child) == 0.5
    child.wait()
    assert timing.block(child) is None


@pytest.mark.slow
def test_methods_train_in_turns(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(prose(200))
    words = "none temperature --tokens tokens --corpus text.txt --vocabulary 60 --size tiny --rows 2"
    words += " --rounds 2 --steps 1 --first 4"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks/time_of_methods.py", *words.split()],
        cwd=tmp_path,
        check=True,
        timeout=300,
    )
    found = json.loads((tmp_path / "time.json").read_text())
    assert {method: len(seconds) for method, seconds in found["seconds"].items()} == {
        "none": 2,
        "temperature": 2,
    }
    assert all(0 < one < 60 for seconds in found["seconds"].values() for one in seconds)
