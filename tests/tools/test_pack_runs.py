"""Runs travel in archives: complete or left out, damaged or oversized ones refused."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from saobp.testing.fake_runs import make_run
from saobp.testing.scripts import load_script
from saobp.testing.tiny_tasks import save_tiny_bert
from saobp.training.evaluation.run import load_language_model

SCRIPT = load_script("tools/pack_runs.py")
pack, unpack = SCRIPT.pack, SCRIPT.unpack


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run with a model, another without one, and one that was begun."""
    folder = tmp_path / "runs"
    save_tiny_bert(make_run(folder / "bert-high-seed42") / "model", "high:0.2")
    make_run(folder / "bert-plain-seed42")
    (make_run(folder / "bert-begun-seed42") / "result.json").unlink()
    return folder


def test_small_files_travel_and_models_on_demand(runs: Path, tmp_path: Path) -> None:
    small = SCRIPT.small_files(runs)
    assert not any("model" in name.parts or "bert-begun-seed42" in name.parts for name in small)
    out = tmp_path / "packed"
    first = pack(runs, out, models="*-high-*,*-plain-*", part_bytes=50_000)
    assert {path.name.partition("-model-")[0] for path in first if "-model-" in path.name} == {
        "bert-high-seed42"
    }
    assert pack(runs, out, models="*-high-*", part_bytes=50_000) == []
    shutil.copytree(out, out / "a copy below")
    said: list[str] = []
    names = unpack(out, tmp_path / "home", said.append)
    assert not said
    assert {name for name in names if "/model/" not in name} == {name.as_posix() for name in small}
    assert (tmp_path / "home/bert-plain-seed42/result.json").read_bytes() == (
        runs / "bert-plain-seed42/result.json"
    ).read_bytes()
    load_language_model(tmp_path / "home/bert-high-seed42/model")


def test_a_rounded_model_is_nearly_the_same(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    assert len(pack(runs, out, models="*-high-*", rounded=True)) == 2
    assert pack(runs, out, models="*-high-*", rounded=True) == []
    unpack(out, tmp_path / "home")
    exact, _, _ = load_language_model(runs / "bert-high-seed42/model")
    rounded, _, _ = load_language_model(tmp_path / "home/bert-high-seed42/model")
    differs = False
    for (name, own), (_, other) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(own, other, rtol=0 if own.ndim < 2 else 2**-8, atol=0, msg=name)
        differs |= not torch.equal(own, other)
    assert differs


def test_an_archive_is_complete_or_left_out(runs: Path, tmp_path: Path) -> None:
    """As after a kill: a new archive of which not all parts were written lies beside the old one."""
    out = tmp_path / "packed"
    shutil.move(runs / "bert-plain-seed42", tmp_path / "later")
    old = {path: path.read_bytes() for path in pack(runs, out)}
    shutil.move(tmp_path / "later", runs / "bert-plain-seed42")
    new = pack(runs, out, part_bytes=3000)
    assert not any(path.exists() for path in old)
    for path, content in old.items():
        path.write_bytes(content)
    new[1].unlink()
    said: list[str] = []
    unpack(out, tmp_path / "home", said.append)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["bert-high-seed42"]
    assert said
    assert all("parts are there" in sentence for sentence in said)


@pytest.mark.parametrize("damage", ["cut", "changed", "no archive"])
def test_a_damaged_archive_is_named(runs: Path, tmp_path: Path, damage: str) -> None:
    (path,) = pack(runs, tmp_path / "packed")
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(
        {
            "cut": content[:middle],
            "changed": content[:middle] + bytes(16) + content[middle + 16 :],
            "no archive": b"nothing",
        }[damage]
    )
    with pytest.raises(ValueError, match=rf"{path.name} is damaged \(.*copy the archive again"):
        unpack(tmp_path / "packed", tmp_path / "home")


def test_an_archive_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "packed" / "runs-00000000.1of1.tar.xz"
    bomb.parent.mkdir()
    with tarfile.open(bomb, "w:xz", preset=0) as archive:
        zeros = tarfile.TarInfo("run/metrics.jsonl")
        zeros.size = 10_000_000
        archive.addfile(zeros, io.BytesIO(bytes(zeros.size)))
    with pytest.raises(ValueError, match="would unpack to more than"):
        unpack(tmp_path / "packed", tmp_path / "home", most_bytes=1_000_000)
    assert not list((tmp_path / "home").iterdir())


def test_a_command_is_packed_meanwhile_and_interrupted_in_time(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SCRIPT, "PACK_SECONDS", 0.1)
    out = tmp_path / "packed"
    wait = (
        "import pathlib, sys, time\n"
        f"while not list(pathlib.Path({str(out)!r}).glob('runs-*')): time.sleep(0.05)\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: sys.exit(7)"
    )
    line = ["while", str(runs), str(out), "--minutes", str((SCRIPT.GRACE_SECONDS + 4) / 60)]
    assert SCRIPT.main([*line, "--", sys.executable, "-c", wait]) == 7
    assert "bert-plain-seed42/result.json" in unpack(out, tmp_path / "home")


def test_the_script_packs_unpacks_and_says_what_is_wrong(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, home = str(tmp_path / "packed"), str(tmp_path / "home")
    assert SCRIPT.main(["unpack", str(tmp_path), home]) == 1
    assert "there is no archive" in capsys.readouterr().err
    assert SCRIPT.main(["pack", str(runs), out]) == 0
    assert SCRIPT.main(["unpack", out, home]) == 0
    assert "unpacked 10 files" in capsys.readouterr().out
