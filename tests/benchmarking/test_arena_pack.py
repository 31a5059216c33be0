"""A pack of the arena's records: what is in it, and going on elsewhere."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from planned_runs import LATER, finish, plan, runs


def test_a_pack_stays_until_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = tmp_path / "out", tmp_path / "pack.tar.xz"
    (out / "runs" / "one").mkdir(parents=True)
    log = out / "runs" / "one" / "metrics.jsonl"
    log.write_text("first\n")
    runs.pack(out, file)
    before, read = file.read_bytes(), Path.read_bytes

    def killed(_: Path) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "read_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        runs.pack(out, file)
    assert read(file) == before

    def shortened(path: Path) -> bytes:  # after its size was taken
        path.write_text("new\n")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", shortened)
    runs.pack(out, file)
    monkeypatch.undo()
    with tarfile.open(file) as archive:
        (content,) = (archive.extractfile(entry) for entry in archive)
        assert content is not None
        assert content.read() == b"new\n"


def test_a_pack_taken_while_a_run_is_made_goes_on_elsewhere_with_the_same_losses(
    miniature: tuple[Path, Path], tmp_path: Path
) -> None:
    tokens, out = miniature
    first, second = plan.setting_runs()
    queue = runs.Queue(out, LATER)
    losses = [runs.train(run, queue, str(tokens)) for run in (queue.claim(), queue.claim())]
    begun = queue.folder(second)
    (begun / "result.json").rename(begun / ".unfinished-result.json")  # as it was a moment before
    (begun / "model").rename(begun / ".unfinished-model")
    (begun / "numbers.jsonl").write_text('{"step": 50}\n{"st')
    (queue.claim_of(second) / runs.LOST).write_text('{"step": 3}\n')
    runs.pack(out, tmp_path / "pack.tar.xz")
    back = tmp_path / "back"
    with tarfile.open(tmp_path / "pack.tar.xz") as archive:
        archive.extractall(back, filter="data")
    assert not list(back.rglob(".*"))
    elsewhere = runs.Queue(back, LATER)
    assert elsewhere.claim() == second
    assert elsewhere.loss(first) == losses[0]
    assert runs.train(second, elsewhere, str(tokens)) == losses[1]
    assert (elsewhere.folder(second) / "numbers.jsonl").read_text() == ""
    made = runs.Queue(tmp_path / "made", LATER, made={first.name: losses[0]})
    finish(made, second, losses[1])
    queue.held.clear()
    (begun / ".unfinished-result.json").rename(begun / "result.json")
    assert queue.claim() == elsewhere.claim() == made.claim()
