"""Where saved models lie, and what is said where none is."""

from __future__ import annotations

from pathlib import Path

import pytest

from saobp.storage.model_folders import checked_folder, has_tokenizer


def test_a_folder_has_a_tokenizer_if_it_holds_a_vocabulary_and_the_hub_is_trusted(tmp_path: Path) -> None:
    assert not has_tokenizer(str(tmp_path))
    (tmp_path / "vocab.json").touch()
    assert has_tokenizer(str(tmp_path))
    assert has_tokenizer("someone/model")


def test_a_run_gives_its_model_once_it_has_finished(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no model \(it has no config\.json\)"):
        checked_folder(tmp_path)
    (tmp_path / "recipe.json").touch()
    with pytest.raises(FileNotFoundError, match="its run has not finished: go on with it first"):
        checked_folder(tmp_path)
    (tmp_path / "result.json").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert checked_folder(tmp_path) == str(tmp_path / "model")
