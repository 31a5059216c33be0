"""Corpora: what is read, and the sentence for everything that is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from saobp.data import open_corpus, parse_mixture, readers
from saobp.data.corpora import HubCorpus


def write_parquet(file: Path, **columns: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


def documents(path: Path | str, **options: object) -> list[str]:
    return list(open_corpus(path, **options).documents())


def test_a_folder_of_parquet_parts_is_read_in_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "books" / "part01.parquet", text=["c"], title=["x"])
    write_parquet(tmp_path / "books" / "part00.parquet", text=["a", "  ", "b"])
    assert documents("books", data_dir=tmp_path) == ["a", "b", "c"]
    assert documents(tmp_path / "books") == ["a", "b", "c"]
    assert documents(tmp_path / "books" / "part01.parquet") == ["c"]


def test_dictionary_and_large_strings_are_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", text=pa.array(["x", "y", "x"]).dictionary_encode())
    write_parquet(tmp_path / "b.parquet", text=pa.array(["z"], pa.large_string()))
    assert documents(tmp_path) == ["x", "y", "x", "z"]


def test_wikitext_lines_become_articles(tmp_path: Path) -> None:
    first = [" = One = \n", "", " First . \n", " = = Part = = \n", " = Goals ; A = \n", " More . \n"]
    write_parquet(tmp_path / "train.parquet", text=["", *first, "", " = Two = \n", "", " End . \n"])
    assert documents(tmp_path) == ["".join(first), " = Two = \n End . \n"]


def test_a_split_is_train_unless_named_and_never_mixed(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write_parquet(tmp_path / f"{split}.parquet", text=[split])
    assert documents(tmp_path) == ["train"]
    assert documents(tmp_path, split="test") == ["test"]
    (tmp_path / "test.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="no file of split test, only of train, validation"):
        open_corpus(tmp_path, split="test")
    with pytest.raises(ValueError, match="train, validation, test, not 'dev'"):
        open_corpus(tmp_path, split="dev")
    write_parquet(tmp_path / "whole" / "part00.parquet", text=["a"])
    with pytest.raises(ValueError, match="not divided into splits"):
        open_corpus(tmp_path / "whole", split="validation")


def test_a_text_file_is_a_document_and_a_long_one_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne\r\ntwo\r\n\r\nthree\r\n")
    (tmp_path / "b.txt").write_text("\n \n")
    (tmp_path / "c.txt").write_text("aaaa\n\nbbbb\nbbbb\n\ncc\n")
    assert documents(tmp_path) == ["One\ntwo\n\nthree", "aaaa\n\nbbbb\nbbbb\n\ncc"]
    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 6)
    assert documents(tmp_path / "c.txt") == ["aaaa\n\nbbbb\nbbbb", "cc"]


def test_a_line_longer_than_a_document_is_cut_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a blank, or between characters; nothing of it is lost."""
    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 20)
    words = "the quick brown fox jumps over the lazy dog " * 9
    for text in (words.strip(), "äöü€" * 40, "x" * 200):
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        found = list(open_corpus(tmp_path / "text.txt").documents())
        assert len(found) >= 3
        assert max(map(len, found)) <= 80
        assert "".join(found) == text


def test_a_wrong_byte_far_in_a_long_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 20)
    (tmp_path / "text.txt").write_bytes(b"one\n" + "ä b ".encode() * 25 + b"\xff and so on\n")
    with pytest.raises(ValueError, match="line 2, column 101 holds the byte 0xff"):
        list(open_corpus(tmp_path / "text.txt").documents())


def test_a_row_that_is_too_long_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_ROW", 10)
    pq.write_table(
        pa.table({"text": ["short", "several words in one row", "y" * 25]}), tmp_path / "a.parquet"
    )
    assert list(open_corpus(tmp_path / "a.parquet").documents()) == [
        *("short", "several", " words in", " one row"),
        *("y" * 10, "y" * 10, "y" * 5),
    ]


def test_the_checksum_follows_the_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    first = open_corpus(tmp_path).checksum
    assert first == open_corpus(tmp_path).checksum
    (tmp_path / "a.txt").write_text("two")
    assert open_corpus(tmp_path).checksum != first


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("a.parquet", b"", "a.parquet is empty: it has 0 bytes"),
        ("a.parquet", b"PAR1 nonsense", "a.parquet is not a readable parquet file"),
        ("a.txt", b"", "a.txt is empty: it has 0 bytes"),
        ("a.txt", b"\n  \n", "holds no text"),
        ("a.txt", "fine\nd\u00e9j\u00e0 vu".encode() + b" caf\xe9", "line 2, column 12 holds the byte 0xe9"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, contents: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=said):
        documents(tmp_path)


def test_a_wrong_column_or_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, body=["x"], title=["y"])
    with pytest.raises(ValueError, match="no column 'text'; its columns are body, title"):
        documents(file)
    write_parquet(file, text=[1, 2])
    with pytest.raises(ValueError, match=r"column 'text' in .*a.parquet holds int64, not text"):
        documents(file)
    write_parquet(file, text=pa.array([], pa.string()))
    with pytest.raises(ValueError, match="its column 'text' has 0 rows"):
        documents(file)
    write_parquet(file, text=["x"] * 70 + [None])
    with pytest.raises(ValueError, match=r"row 71 of column 'text' in .*a.parquet is null"):
        documents(file)
    wrong = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\x00\x00\x00\x00\x01\x00\x00\x00\x03\x00\x00\x00"), pa.py_buffer(b"xa\xff")
    )
    write_parquet(file, text=wrong)
    with pytest.raises(ValueError, match=r"row 2 of column 'text' in .* is not UTF-8: its byte 2 is 0xff"):
        documents(file)


def test_a_parquet_file_that_is_corrupt_inside_is_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", text=[f"{n} " * 50 for n in range(2000)])
    contents = bytearray(file.read_bytes())
    contents[100:3000] = bytes(2900)
    file.write_bytes(contents)
    with pytest.raises(ValueError, match=r"a.parquet is corrupt after row \d+ of column 'text'"):
        documents(file)


def test_what_is_nowhere_is_said(tmp_path: Path) -> None:
    for name in ("books.txt", str(tmp_path / "books")):  # the hub is not asked
        with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*books"):
            open_corpus(name)
    with pytest.raises(FileNotFoundError, match=r"no file or folder, nor one in .* hub could not give it"):
        open_corpus("nowhere/at-all", data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"data folder .* does not exist"):
        open_corpus("nowhere", data_dir=tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"neither .parquet nor .txt files"):
        open_corpus(tmp_path)
    (tmp_path / "A.TXT").write_text("x")
    assert documents(tmp_path) == documents(tmp_path / "A.TXT") == ["x"]
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"neither .parquet nor .txt"):
        open_corpus(tmp_path / "a.csv")


def test_rows_of_the_hub_are_checked_too() -> None:
    corpus = HubCorpus("some/set", [{"text": "a"}, {"text": "b"}])
    assert list(corpus.documents()) == ["a", "b"]
    assert corpus.checksum != HubCorpus("some/set", [{"text": "ab"}]).checksum
    with pytest.raises(ValueError, match="row 2 of column 'text' in dataset some/set is None"):
        list(HubCorpus("some/set", [{"text": "a"}, {"text": None}]).documents())


def test_mixtures() -> None:
    assert parse_mixture("a:2, b:1,c:1") == {"a": 0.5, "b": 0.25, "c": 0.25}
    assert parse_mixture("a,some/b") == {"a": None, "some/b": None}
    assert parse_mixture("disk:/texts:1") == {"disk:/texts": 1.0}
    assert parse_mixture("disk:/texts") == {"disk:/texts": None}
    for wrong, said in {
        "a:0.5,b": "no weight for b",
        "a,a": "names 'a' twice",
        "a:0": "above 0",
        "a:nan": "above 0",
        "a,,b": "empty name",
    }.items():
        with pytest.raises(ValueError, match=said):
            parse_mixture(wrong)
