"""Loaders take the right file, say what is partial, and name what is wrong by file, row and column."""

import ast
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import saobp.data.tasks
from saobp.data.tasks import GLUE, TASKS, choose_tasks, get_task, load_split, load_task
from saobp.data.tasks.load import clean_hellaswag
from saobp.lab.synthetic_tasks import task_rows, write_rows


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_read_and_marked_as_partial(name, data_dir):
    task = load_task(name, data_dir)
    assert len(task.train) == len(task.train.labels) == 24
    assert task.partial
    assert task.describe()["rows"] == {"train": 24, "validation": 24}
    assert any(f"official {task.spec.official['train']}" in note for note in task.notes)


def test_a_set_with_the_official_name_and_count_is_not_partial(tmp_path):
    spec = get_task("wnli")
    for number, (split, count) in enumerate(spec.official.items()):
        write_rows(tmp_path / f"glue/wnli/{split}.parquet", task_rows(spec, count, seed=number))
    assert not load_task("wnli", tmp_path).partial
    assert load_task("wnli", tmp_path, limit=50).partial


def test_the_full_training_set_comes_before_a_partial_one(tmp_path):
    spec = get_task("qnli")
    write_rows(tmp_path / "glue/qnli/validation.parquet", task_rows(spec, 9, seed=0))
    write_rows(tmp_path / "glue/qnli/train_subset12k.parquet", task_rows(spec, 10, seed=1))
    write_rows(tmp_path / "glue/qnli/train_rebuilt_from_squad44.parquet", task_rows(spec, 11, seed=2))
    assert Path(load_task("qnli", tmp_path).train.source).stem == "train_subset12k"
    write_rows(tmp_path / "glue/qnli/train.parquet", task_rows(spec, 12, seed=3))
    assert len(load_task("qnli", tmp_path).train) == 12


def test_qqp_says_that_its_validation_rows_are_not_glues(data_dir):
    assert any("not the GLUE dev set" in note for note in load_task("qqp", data_dir).notes)


def test_a_limit_draws_the_same_rows_each_time_and_says_so(data_dir):
    once, again = load_task("cola", data_dir, limit=5), load_task("cola", data_dir, limit=5)
    assert once.train.column("sentence") == again.train.column("sentence")
    assert len(once.validation) == 5
    assert "only 5 examples" in once.notes[-1]
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_task("cola", data_dir, limit=0)


@pytest.fixture
def spoilt(tmp_path):
    """Writes a task whose validation rows have been changed by a function, and loads it."""

    def load(name, change):
        spec = get_task(name)
        folder = tmp_path / spec.folder
        write_rows(folder / f"{spec.train[0]}.parquet", task_rows(spec, 12, seed=0))
        rows = task_rows(spec, 12, seed=1)
        change(rows)
        write_rows(folder / f"{spec.validation[0]}.parquet", rows)
        return load_task(name, tmp_path)

    return load


WRONG_ANSWER = {"text": ["x"], "answer_start": [3]}
NO_ANSWER = {"text": [], "answer_start": []}


def put(row, column, value):
    def change(rows):
        rows[row][column] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("cola", put(6, "label", 2), "row 7, column 'label' of .*parquet is 2, but a label is 0 to 1"),
        ("cola", put(0, "label", -1), "row 1, column 'label'.* is -1"),
        ("cola", put(3, "sentence", None), "row 4, column 'sentence' of .* is empty"),
        ("stsb", put(2, "label", 5.5), "row 3, column 'label' of .* is 5.5, but a score of stsb is 0 to 5"),
        ("race-middle", put(1, "answer", "E"), "row 2, column 'answer' of .* is 'E', but a label is A, B, C"),
        ("race-middle", put(4, "options", ["a", "b"]), "row 5, column 'options' of .* not a list of 4 texts"),
        ("squad", put(5, "answers", WRONG_ANSWER), "row 6, column 'answers' of .* says that 'x'"),
        ("squad", put(5, "answers", NO_ANSWER), "row 6, column 'answers' of .* has 0 texts"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_by_file_row_and_column(spoilt, name, change, words):
    with pytest.raises(ValueError, match=words):
        spoilt(name, change)


def test_a_missing_column_and_a_column_of_the_wrong_kind_are_named(spoilt):
    def drop(rows):
        for row in rows:
            del row["label"]

    def number(rows):
        for row in rows:
            row["sentence"] = 3

    with pytest.raises(ValueError, match="has no column 'label': cola needs sentence, label"):
        spoilt("cola", drop)
    with pytest.raises(ValueError, match=r"column 'sentence' of .* holds int64, not text"):
        spoilt("cola", number)


def test_labels_that_are_all_alike_are_missing_labels(tmp_path):
    spec = get_task("sst2")
    rows = [{**row, "label": 0} for row in task_rows(spec, 101, seed=0)]
    write_rows(tmp_path / "glue/sst2/validation.parquet", rows)
    with pytest.raises(ValueError, match=r"every row of .* the labels are missing"):
        load_split(spec, "validation", tmp_path)


def test_the_training_file_in_the_place_of_the_validation_file_is_found_out(spoilt):
    def copy(rows):
        rows[:] = task_rows(get_task("mrpc"), 12, seed=0)

    with pytest.raises(
        ValueError, match=r"12 of 12 rows of .*validation.parquet are also in .*train.parquet"
    ):
        spoilt("mrpc", copy)


def test_a_few_shared_rows_are_stated(tmp_path):
    spec = get_task("cola")
    train, validation = task_rows(spec, 60, seed=0), task_rows(spec, 60, seed=1)
    for place, row in enumerate([*train, *validation]):
        row["sentence"] += f" {place}"
    validation[7] = train[3]
    write_rows(tmp_path / "glue/cola/train.parquet", train)
    write_rows(tmp_path / "glue/cola/validation.parquet", validation)
    assert "1 of 60 validation rows have the sentence of a training row" in load_task("cola", tmp_path).notes


def test_files_that_are_absent_or_no_parquet_are_named(tmp_path, data_dir):
    with pytest.raises(FileNotFoundError, match=r"cola needs train\.parquet or train_subset"):
        load_task("cola", tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no data folder"):
        load_task("cola", tmp_path / "nowhere")
    (tmp_path / "glue/cola").mkdir(parents=True)
    (tmp_path / "glue/cola/train.parquet").write_text("sentence,label\n")
    with pytest.raises(ValueError, match=r"train\.parquet cannot be read as a parquet file"):
        load_task("cola", tmp_path)
    with pytest.raises(ValueError, match="cola has no split 'test'"):
        load_split(get_task("cola"), "test", data_dir)


def test_tasks_are_chosen_by_name_or_group():
    assert [spec.name for spec in choose_tasks("glue")] == list(GLUE)
    assert len(GLUE) == 9
    assert len(choose_tasks("all")) == 12
    assert [spec.name for spec in choose_tasks("RACE_Middle, cola,cola")] == ["race-middle", "cola"]
    with pytest.raises(ValueError, match="unknown task 'colla'"):
        choose_tasks("colla")


def test_hub_rows_of_hellaswag_lose_their_marks():
    raw = {
        "ctx_a": ["[header] How to bake [title] Mix the flour. [step] Stir."],
        "ctx_b": ["she"],
        "endings": [["[substeps] eats it.", "b", "c", "d"]],
        "label": ["2"],
    }
    row = clean_hellaswag(pa.table(raw)).to_pylist()[0]
    assert row == {
        "ctx": "How to bake. Mix the flour. Stir. She",
        "endings": ["eats it.", "b", "c", "d"],
        "label": 2,
    }


def test_the_loaders_do_not_import_datasets():
    for file in Path(saobp.data.tasks.__file__).parent.glob("*.py"):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                assert "datasets" not in ast.unparse(statement), file.name


def test_checksums_follow_the_contents(tmp_path):
    spec = get_task("cola")
    path = write_rows(tmp_path / "glue/cola/validation.parquet", task_rows(spec, 5, seed=0))
    first = load_split(spec, "validation", tmp_path)
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 4), path)
    second = load_split(spec, "validation", tmp_path)
    assert first.checksum != second.checksum
    assert np.array_equal(first.labels[:4], second.labels)


def test_without_a_folder_the_rows_come_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list(task_rows(get_task("mnli"), 8, seed=len(asked)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task("mnli")
    assert asked == [("nyu-mll/glue", "mnli", "train"), ("nyu-mll/glue", "mnli", "validation_matched")]
    assert len(task.train) == 8
    assert task.partial
    assert load_split(task.spec, "train").checksum != task.train.checksum


def test_a_hub_out_of_reach_is_one_sentence():
    with pytest.raises(FileNotFoundError, match=r"hub could not give mnli \(Couldn't reach .*by --data-dir"):
        load_task("mnli")
