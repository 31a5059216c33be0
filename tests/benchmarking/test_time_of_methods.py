"""Times of training steps in turns: blocks without checks of the captured step, turns of two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from saobp.testing.scripts import ROOT, load_script
from saobp.testing.tiny_training import prose
from saobp.training.graphed_step import WARMUP_STEPS, GraphedStep

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


CHILD = """
import sys
method = sys.argv[1]
if method == "sink":
    sys.exit(1)
print("ready", flush=True)
for number in range(2):
    input()
    print(0.5, flush=True)
    print("note: wrong gradients" if method == "high:learned" and number else "ready", flush=True)
"""


def test_a_method_that_falls_back_or_ends_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "child.py", tmp_path / "time.json"
    script.write_text(CHILD)
    line = ["none", "high:learned", "sink", "--tokens", "tokens", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["time_of_methods.py", *line])
    monkeypatch.setattr(timing, "__file__", str(script))
    with pytest.raises(SystemExit, match=r"time\.json lacks sink, high:learned: the reasons are above"):
        timing.main()
    assert json.loads(out.read_text())["seconds"] == {"none": [0.5, 0.5]}
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "sink is left out: its process has ended, the error is above",
        "ready: none high:learned",
        "round 1 {'none': '500.000 ms', 'high:learned': '500.000 ms'}",
        "high:learned is left out: wrong gradients",
    ]


@pytest.mark.parametrize(
    ("captured", "eager", "words"),
    [
        (RuntimeError("no room"), 1.0, "note: The step cannot be captured as a CUDA graph (no room)"),
        (2.0, 1.0, "note: Gradients of the captured step are wrong (apart by 1"),
        (1.0, RuntimeError("out of memory"), None),
        (1.0, 1.0, None),
    ],
)
def test_a_step_that_loses_its_graph_ends_the_process_with_its_note(
    captured: float | RuntimeError, eager: float | RuntimeError, words: str | None
) -> None:
    said: list[object] = []
    turns = timing.Turns([(4, 5)], said.append)
    weight = torch.nn.Parameter(torch.ones(2))

    def backward(slope: float | RuntimeError) -> torch.Tensor:
        if isinstance(slope, RuntimeError):
            raise slope
        loss = slope * weight.sum()
        loss.backward()
        return loss.detach()

    step = GraphedStep(
        lambda _: backward(1.0),
        [weight],
        turns.notify,
        lambda _: (backward(captured), lambda: None),
        eager=lambda _: backward(eager),
    )
    with pytest.raises(SystemExit) if words else nullcontext():
        for _ in range(WARMUP_STEPS + 1):
            weight.grad = None
            step({"input_ids": torch.zeros(1)})
    assert bool(said) is bool(words)
    assert not words or str(said[0]).startswith(words)


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
