"""Files and folders are complete or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from saobp.data import open_corpus, prepare_tokens, train_vocabulary
from saobp.storage import atomic
from saobp.storage.atomic import clear_unfinished, reason, replacing, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_takes_its_place_whole(tmp_path: Path) -> None:
    place = tmp_path / "place"
    for text in ("first", "second"):
        with replacing(place) as new:
            assert names(new) == []
            (new / "deep").mkdir()
            (new / "deep" / "file").write_text(text)
            assert not place.exists() or (place / "deep" / "file").read_text() == "first"
        assert (place / "deep" / "file").read_text() == text
        assert names(tmp_path) == ["place"]


def test_everything_is_on_the_disk_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, forced = tmp_path / "place", []

    def force(path: Path) -> None:
        forced.append((path.relative_to(tmp_path).as_posix(), place.exists()))

    monkeypatch.setattr(atomic, "fsync", force)
    with replacing(place) as new:
        (new / "deep").mkdir()
        (new / "deep" / "file").write_text("text")
    assert {path for path, named in forced if not named} == {
        ".unfinished-place",
        ".unfinished-place/deep",
        ".unfinished-place/deep/file",
    }
    assert forced[-1] == (".", True)


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, file = tmp_path / "place", tmp_path / "file"
    with replacing(place) as new:
        (new / "file").write_text("good")
    write_atomically(file, "good")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with pytest.raises(TypeError), replacing(place) as new:
        (new / "file").write_text(b"bytes")  # type: ignore[arg-type]
    monkeypatch.setattr(atomic, "fsync", full)
    with pytest.raises(OSError, match="No space"), replacing(place) as new:
        (new / "file").write_text("half")
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "half")
    assert (place / "file").read_text() == file.read_text() == "good"
    assert names(tmp_path) == ["file", "place"]


def test_leftovers_of_a_kill_go(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-folder").mkdir()
    (tmp_path / ".unfinished-folder" / "file").write_text("half")
    (tmp_path / ".unfinished-file").write_text("half")
    (tmp_path / "kept").write_text("whole")
    clear_unfinished(tmp_path)
    clear_unfinished(tmp_path / "nowhere")
    assert names(tmp_path) == ["kept"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be larger than 4 KiB, as after ``ulimit -f 4``."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LIMIT = "a file would be larger than the limit that is set for files (ulimit -f)"


@pytest.mark.usefixtures("small_files")
def test_a_limit_for_files_is_told_from_a_full_disk(tmp_path: Path) -> None:
    """Whichever library writes: torch does not say why it could not."""
    state = {"weight": torch.zeros(10_000)}
    for save in (torch.save, save_file, lambda what, path: path.write_text(str(what) * 1000)):
        with pytest.raises((OSError, RuntimeError, SafetensorError)) as raised:
            save(state, tmp_path / "file")
        assert reason(raised.value) == LIMIT
    assert reason(OSError(28, "No space left on device")) == "the disk is full"
    assert reason(OSError("something else")) == "something else"


@pytest.mark.usefixtures("small_files")
def test_tokens_that_do_not_fit_are_one_sentence_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A fox sees a dog. " * 150)
    corpus, words = open_corpus(tmp_path / "text.txt"), train_vocabulary(["A fox sees a dog."], 40)
    with pytest.raises(OSError) as raised:
        prepare_tokens(replace(corpus, files=corpus.files * 9), words, tmp_path / "store")
    assert str(raised.value).endswith(f"could not be written to {tmp_path / 'store'}, because {LIMIT}")
    assert names(tmp_path) == [".store.lock", "text.txt"]


def test_tokens_in_a_folder_that_may_only_be_read_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of someone else, or on a disk that is mounted so."""
    (tmp_path / "text.txt").write_text("A fox sees a dog. " * 9)
    corpus, words = open_corpus(tmp_path / "text.txt"), train_vocabulary(["A fox sees a dog."], 40)
    made = prepare_tokens(corpus, words, tmp_path / "store")
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert prepare_tokens(corpus, words, tmp_path / "store") == made
    with pytest.raises(OSError, match="Read-only file system"):
        prepare_tokens(corpus, words, tmp_path / "other")


def test_a_folder_that_was_being_replaced_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two renames, a process leaves nothing under the name."""
    folder = tmp_path / "kept"

    def fill(text: str) -> None:
        with replacing(folder) as new:
            (new / "text").write_text(text)

    fill("first")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target == folder:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        fill("second")
    monkeypatch.undo()
    assert not folder.exists()
    clear_unfinished(tmp_path)
    assert (folder / "text").read_text() == "first"
    fill("third")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (folder / "text").read_text() == "third"
