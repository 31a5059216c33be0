"""Files and folders are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from saobp.data import writing
from saobp.data.writing import clear_unfinished, replacing, write_atomically


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

    monkeypatch.setattr(writing, "to_disk", force)
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
    monkeypatch.setattr(writing, "to_disk", full)
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
