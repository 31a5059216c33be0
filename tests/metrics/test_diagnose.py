"""``saobp diagnose`` as a user meets it: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import csv
import html
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    ByT5Tokenizer,
    MambaConfig,
    MambaModel,
    MegatronBertConfig,
    MegatronBertModel,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    ViTConfig,
    ViTModel,
    XLNetConfig,
    XLNetModel,
)
from typer.testing import CliRunner, Result

import saobp
from saobp import metrics
from saobp.cli import app
from saobp.metrics.diagnosis.diagnose import diagnose
from saobp.metrics.diagnosis.head_kinds import (
    IN_TEXT,
    ON_REPETITION,
    kind_of,
    repetition_targets,
    shares,
    text_targets,
)
from saobp.metrics.diagnosis.loading import example_model, load_model, planted_model, read_texts
from saobp.refinement import Refinement
from saobp.storage.manifest import write_manifest
from saobp.testing.tiny_models import save_tiny_bert, tiny_model

PLANTED_VERDICTS = ("diffuse", "localised", "sink", "localised", "healthy")
HOSTILE = '<script>alert("x")</script> & <b>words</b> that are [red]text[/red] only {{ 7 * 7 }}'


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved models: an encoder, the same refined, a decoder; with NaN weights, no attention, no tokens."""
    root = tmp_path_factory.mktemp("models")
    broken = tiny_model("bert")
    torch.nn.init.constant_(broken.bert.encoder.layer[1].output.dense.weight, math.nan)
    small = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8,
        patch_size=4,
    )  # fmt: skip
    models = {
        "bert": tiny_model("bert"),
        "refined": saobp.apply(tiny_model("bert"), "high,strength=learned"),
        "gpt2": tiny_model("gpt2"),
        "broken": broken,
        "mamba": MambaModel(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)),
        "images": ViTModel(small),
        "convolutions": ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])),
        "no tokenizer": tiny_model("bert"),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        if name != "no tokenizer":
            example_model()[1].save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text(f"{HOSTILE}\n\nA second text, which has two lines\nand ends here.\n\n\n\nThird one.\n")
    return path


def test_without_arguments_it_explains_itself() -> None:
    shown = run()
    assert shown.exit_code == 0
    assert "saobp diagnose --example" in shown.output


def test_texts_without_a_model_are_refused(text: Path) -> None:
    shown = run("--text", text)
    assert shown.exit_code == 1
    assert shown.stderr.startswith("name a model: ")


def test_the_example_runs_offline_and_names_the_planted_heads(tmp_path: Path) -> None:
    shown = run("--example", "--full", "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "2 localised ▼, 1 diffuse ▲, 1 sink ●, 1 healthy" in shown.output
    (record,) = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert tuple(head["verdict"] for head in record["heads"]) == PLANTED_VERDICTS
    assert record["heads"][4]["clustering"] >= 0


def test_an_earlier_diagnosis_is_replaced_only_where_asked(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    earlier = tmp_path / "out" / "diagnosis.json"
    earlier.parent.mkdir()
    earlier.write_text("[]")
    refused = run(folders["bert"], "--text", text, "--out", tmp_path / "out")
    assert refused.exit_code == 1
    assert "holds a diagnosis: name another by --out, or add --overwrite to replace it" in refused.stderr
    assert earlier.read_text() == "[]"
    stale = earlier.with_name("betweenness.png")
    stale.write_text("of --full, which is not asked for now")
    run(folders["bert"], "--text", text, "--out", tmp_path / "out", "--overwrite")
    assert json.loads(earlier.read_text())
    assert not stale.exists()
    assert earlier.with_name("gtd.png").exists()


def test_results_are_complete_and_hostile_text_stays_text(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shown = run(folders["bert"], "--text", text, "--out", out, "--compare", "high:0.5")
    assert shown.exit_code == 0, shown.output
    assert "".join(shown.output.split()).count("withhigh:0.5") == 2  # above its table, and in the last lines
    names = {"gtd", "indirect_entropy", "attention_entropy", "sink_mass", "layers"}
    assert {path.name for path in out.glob("*.png")} == {f"{name}.png" for name in names}
    plain, refined = json.loads((out / "diagnosis.json").read_text())
    assert plain["texts"] == refined["texts"] == 3
    assert refined["subject"].endswith("with high:0.5")
    assert list(plain["cross_layer_gtd"]) == ["1"]
    rows = list(csv.DictReader((out / "heads.csv").open()))
    assert len(rows) == 16
    assert float(rows[3]["gtd"]) == plain["heads"][3]["gtd"]
    assert rows[8]["gtd"] != rows[0]["gtd"]
    page = (out / "report.html").read_text()
    assert page.count("<script") == page.count("</script>") == 3
    assert 'alert("x")' not in page
    assert HOSTILE in html.unescape(page)
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    runs = data["heads"]["runs"]
    assert [one["name"] for one in runs] == [plain["subject"], refined["subject"]]
    shown_gtd = runs[1]["moments"][0]["values"]["gtd"]
    assert shown_gtd[0][3] == pytest.approx(refined["heads"][3]["gtd"], abs=1e-4)
    (explorer,) = data["explorers"]
    assert explorer["sentences"][0]["text"] == HOSTILE
    assert [len(heads) for heads in explorer["sentences"][0]["scores"]] == [4, 4]


def test_a_report_can_be_made_again_from_the_folder(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(folders["bert"], "--text", text, "--out", out)
    again = CliRunner().invoke(app, ["report", str(out), "--out", str(tmp_path / "again.html")])
    assert again.exit_code == 0, again.output
    first, second = (
        json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
        for page in (out / "report.html", tmp_path / "again.html")
    )
    assert first["heads"] == second["heads"]
    assert first["explorers"] == second["explorers"]


def test_numbers_are_those_of_the_probe(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    run(folders["gpt2"], "--text", text, "--limit", 1, "--out", tmp_path / "out")
    (record,) = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    tokenizer = example_model()[1]
    model = tiny_model("gpt2")
    with torch.no_grad(), saobp.probe(model) as health:
        model(**tokenizer(HOSTILE, return_tensors="pt", return_token_type_ids=False))
    for head, expected in zip(record["heads"], health.heads(), strict=True):
        assert head["gtd"] == pytest.approx(expected.values["gtd"], rel=1e-5)


def test_a_refined_model_is_loaded_with_its_refinement(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    shown = run(folders["bert"], "--text", text, "--out", tmp_path / "out", "--compare", folders["refined"])
    assert shown.exit_code == 0, shown.output
    assert "refined: 8 heads" in shown.output


def test_a_model_compared_with_its_own_refinement_is_said_to_be(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    given = (folders["refined"], "--text", text, "--overwrite", "--out", tmp_path / "out", "--compare")
    assert "has high:learned already" in run(*given, "high:learned").output
    assert "already" not in run(*given, "high:0.2").output


def test_a_refinement_is_not_taken_for_that_of_another_model_beside_it(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    others = ("--compare", folders["refined"], "--compare", "high:learned")
    shown = run(folders["bert"], "--text", text, "--out", tmp_path / "out", *others)
    assert shown.exit_code == 0, shown.output
    assert "already" not in shown.stderr
    assert "learned strengths start at 0" in shown.stderr


def test_several_are_compared_and_untrained_strengths_are_said_to_change_nothing(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    others = ("--compare", "low:0.2", "--compare", "high:learned", "--compare", folders["refined"])
    shown = run(folders["bert"], "--text", text, "--out", out, *others)
    assert shown.exit_code == 0, shown.output
    subjects = [one["subject"] for one in json.loads((out / "diagnosis.json").read_text())]
    assert [name.rsplit("/", 1)[-1] for name in subjects] == [
        *("bert", "bert with low:0.2", "bert with high:learned", "refined"),
    ]
    assert "learned strengths start at 0" in shown.stderr
    assert "is the plain model: name a strength, as in high:1" in shown.stderr


def test_results_are_kept_where_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``saobp diagnose ... | head``."""

    def unread(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("saobp.commands.diagnose.show", unread)
    assert run("--example", "--out", tmp_path / "out").exit_code == 1
    assert json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_missing_model_is_named_first(text: Path, tmp_path: Path) -> None:
    (tmp_path / "diagnosis.json").write_text("{}")
    assert "there is no model" in run(tmp_path / "none", "--text", text, "--out", tmp_path).output


def test_a_tokenizer_of_bytes_needs_no_files(text: Path, tmp_path: Path) -> None:
    tiny_model("bert", vocab_size=400).save_pretrained(tmp_path / "bytes")
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    shown = run(tmp_path / "bytes", "--text", text, "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "bytes: 8 heads" in shown.output


def test_the_folder_of_a_run_stands_for_its_model(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    shutil.copytree(folders["refined"], tmp_path / "run" / "model")
    shown = run(tmp_path / "run", "--text", text, "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output


def test_texts_of_a_dataset(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(
        '{"id": 1, "body": "some words here"}\n{"id": 2, "body": "other words"}\n'
    )
    shown = run(folders["bert"], "--dataset", data, "--out", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert json.loads((tmp_path / "out" / "diagnosis.json").read_text())[0]["texts"] == 2
    refused = run(folders["bert"], "--dataset", data, "--column", "title")
    assert refused.exit_code == 1
    assert "has no column of text called 'title': it has body" in refused.output


def test_wrong_input_gets_one_clear_sentence(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    empty, long, binary = tmp_path / "empty.txt", tmp_path / "long.txt", tmp_path / "binary.txt"
    empty.write_text("\n \n")
    long.write_text("word " * 90)
    binary.write_bytes(b"\xff\xfe\x00")
    bert = folders["bert"]
    cases = [
        ((folders["mamba"], "--text", text), "attention registry"),
        ((folders["images"], "--text", text), "reads no tokens: its inputs go to ViTPatchEmbeddings"),
        ((folders["convolutions"], "--text", text), "reads no tokens: ResNetModel embeds none"),
        ((folders["no tokenizer"], "--text", text), "holds no tokenizer: copy the one that the model was"),
        ((bert, "--text", empty), "holds no text"),
        ((bert, "--text", binary), "is not text in UTF-8"),
        ((bert, "--text", tmp_path / "none.txt"), "there is no file"),
        ((folders["broken"], "--text", text), "hold NaN or infinite values, first in encoder.layer.1.output"),
        ((tmp_path / "nowhere", "--text", text), "there is no model folder"),
        ((tmp_path, "--text", text), "holds no model (it has no config.json)"),
        ((bert,), "there is nothing to read"),
        ((bert, "--text", text, "--dataset", "x"), "not by both"),
        ((bert, "--text", text, "--length", 99), "at most 64"),
        ((bert, "--text", text, "--method", "guess"), "method must be"),
        ((bert, "--text", text, "--method", "guess", "--full"), "method must be"),
        ((bert, "--text", text, "--method", "sampled", "--full"), "--full needs whole maps"),
        ((bert, "--text", text, "--compare", tmp_path / "nowhere"), "there is no model folder"),
        ((bert, "--text", text, "--compare", "hgih:0.2"), "unknown factor 'hgih'"),
    ]
    for arguments, words in cases:
        shown = run(*arguments, "--out", tmp_path / "out")
        assert shown.exit_code == 1, arguments
        assert words in shown.output, shown.output
        assert "Traceback" not in shown.output
        assert len(shown.output.strip().splitlines()) == 1, shown.output
    assert not (tmp_path / "out").exists()


def test_wrong_places_are_refused_before_anything_is_measured(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saobp.metrics.diagnosis.diagnose.diagnose", lambda *_, **__: pytest.fail("measured"))
    text = tmp_path / "texts.txt"
    text.write_text("some words")
    for arguments, words in (
        (("--text", tmp_path, "--out", tmp_path / "out"), "is a folder: name a file in it"),
        (("--text", text, "--out", text), "is a file: name another folder by --out"),
        (
            ("--text", text, "--out", text / "a" / "b"),
            f"{str(text)!r} is a file: name another folder by --out",
        ),
        (("--text", text, "--out", tmp_path / "out", "--compare", tmp_path / "none"), "there is no model"),
    ):
        shown = run(folders["bert"], *arguments)
        assert shown.exit_code == 1, shown.output
        assert words in shown.output


def test_texts_of_a_file(tmp_path: Path) -> None:
    """A byte order mark is no part of a text, and a line of blanks is a blank line."""
    file = tmp_path / "texts.txt"
    for content, texts in (
        ("one text\nof two lines\n \t\nanother\n", ["one text\nof two lines", "another"]),
        ("\ufeffone text\r\nof two lines\r\n\r\nanother", ["one text\nof two lines", "another"]),
        ("one\ntwo\n", ["one", "two"]),
    ):
        file.write_bytes(content.encode())
        assert read_texts(file, 8) == texts


def test_a_tokenizer_without_padding_token_changes_nothing() -> None:
    model, tokenizer = tiny_model("gpt2"), example_model()[1]
    texts, notes = ["one text of words", "two words"], []
    records = []
    for token in ("[PAD]", None):
        tokenizer.pad_token = token
        records.append(diagnose(model, tokenizer, texts, statistics=["gtd"], note=notes.append).to_dict())
    padded, filled = ([head["gtd"] for head in one["heads"]] for one in records)
    assert padded == filled
    assert sum("the tokenizer has no padding token" in one for one in notes) == 1


def test_a_model_without_a_limit_of_length() -> None:
    config = XLNetConfig(vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=16)
    assert config.max_position_embeddings == -1
    found = diagnose(XLNetModel(config), example_model()[1], ["some words of a text"], statistics=["gtd"])
    assert len(found.heads) == 2


def test_a_model_and_a_tokenizer_that_do_not_belong_together() -> None:
    tokenizer = example_model()[1]
    tokenizer.add_tokens([f"word{number}" for number in range(400)])
    with pytest.raises(ValueError, match=r"the tokenizer gives token \d+, but model knows \d+"):
        diagnose(tiny_model("bert"), tokenizer, ["word399 word3"], statistics=["gtd"])
    for nothing in ([], [""], ["one"]):
        with pytest.raises(ValueError, match="no more than a token each"):
            diagnose(tiny_model("bert"), example_model()[1], nothing, statistics=["gtd"])


def test_planted_heads_get_their_kinds(tmp_path: Path) -> None:
    shown = run("--example", "--out", tmp_path / "out")
    assert "1 first token 0.2; 1 previous token 0.3; 1 self 0.1" in shown.output, shown.output
    (record,) = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    kinds = [head["kind"] for head in record["heads"]]
    assert kinds == [None, "self", "first token", "previous token", None]
    assert record["heads"][3]["share_previous_token"] > 0.95


@pytest.mark.parametrize("causal", [False, True])
def test_planted_maps_get_their_kinds(causal: bool) -> None:
    ids = torch.tensor([9, 5, 3, 7, 4, 3, 8, 6, 2, 5, 4, 3])
    places = torch.arange(12)
    looks_at = {
        "first token": torch.zeros(12, dtype=torch.long),
        "previous token": (places - 1).clamp(min=0),
        "self": places,
        "delimiter": torch.tensor([0, 0, 1, 2, 2, 2, 5, 5, 5, 5, 5, 5] if causal else [2] * 12),
    }
    if not causal:
        looks_at["next token"] = (places + 1).clamp(max=11)
    targets = text_targets(ids, torch.tensor([3]), causal=causal)
    for kind, columns in looks_at.items():
        rows = torch.nn.functional.one_hot(columns, 12).float()
        found = dict(zip(IN_TEXT, shares(rows, targets, causal=causal).tolist(), strict=True))
        assert kind_of(found) == kind, found
    even = torch.ones(12, 12).tril() if causal else torch.ones(12, 12)
    found = shares(even / even.sum(-1, keepdim=True), targets, causal=causal)
    assert found.max() < 1e-6
    twice = repetition_targets(13, 6)
    for kind, back in (("duplicate token", 6), ("induction", 5)):
        rows = torch.nn.functional.one_hot((torch.arange(13) - back).clamp(min=0), 13).float()
        found = dict(zip(ON_REPETITION, shares(rows, twice, causal=causal).tolist(), strict=True))
        assert kind_of({"first token": 0.99, **found}) == kind


def test_a_model_outside_the_registry_is_measured_by_the_maps_it_returns() -> None:
    config = MegatronBertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    torch.manual_seed(0)
    model, tokenizer = MegatronBertModel(config).eval(), example_model()[1]
    texts = ["some words of a text", "a second text"]
    names = ["gtd", "attention_entropy", "sink_mass", "cross_layer_gtd"]
    notes: list[str] = []
    found = diagnose(model, tokenizer, texts, statistics=names, note=notes.append)
    assert any("measured from the maps that the model returns" in note for note in notes)
    assert found.settings["measured_from"] == "the maps that the model returns"
    with torch.no_grad():
        maps = [
            model(
                **tokenizer(text, return_tensors="pt", return_token_type_ids=False), output_attentions=True
            ).attentions
            for text in texts
        ]
    for head in found.heads:
        expected = [float(metrics.gtd(own[head.layer])[0, head.head]) for own in maps]
        assert head.values["gtd"] == pytest.approx(sum(expected) / 2, abs=1e-6)
    across = [float(metrics.cross_layer_gtd(own)) for own in maps]
    assert found.across_layers == {1: pytest.approx(sum(across) / 2, abs=1e-6)}
    with pytest.raises(ValueError, match=r"attention registry.*not sampled"):
        diagnose(model, tokenizer, texts, statistics=["gtd"], method="sampled")


def test_of_t5_the_encoder_is_loaded(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    T5Model(config).save_pretrained(tmp_path)
    example_model()[1].save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path), Refinement.of("high:0.2"))
    assert isinstance(model, T5EncoderModel)
    found = diagnose(model, tokenizer, ["some words of a text", "a second text"], statistics=["gtd"])
    assert len(found.heads) == 2


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_planted_heads_get_the_verdict_they_must(method: str) -> None:
    model = planted_model()
    with torch.no_grad(), saobp.probe(model, method=method) as health:  # type: ignore[arg-type]
        model(input_ids=torch.ones(1, 48, dtype=torch.long))
    assert tuple(head.verdict for head in health.heads()) == PLANTED_VERDICTS
    gtd = [head.values["gtd"] for head in health.heads()]
    paths = 0.9 + 0.81 + 0.729
    assert gtd[:3] == pytest.approx([paths**2 / (1 + paths**2)] * 3, abs=2e-3)
    assert gtd[4] == pytest.approx(2 / 3, abs=0.06)


def test_a_refined_model_of_the_hub_is_measured_as_refined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache, as after a download."""
    cached, revision = tmp_path / "models--someone--refined", "a" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision)
    save_tiny_bert(cached / "snapshots" / revision, "high:2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, _ = load_model("someone/refined")
    assert model.config._attn_implementation == "saobp"


def test_a_damaged_model_of_a_run_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folders["bert"], model)
    write_manifest(model)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-02'))
    shown = run(model, "--text", folders["bert"] / "config.json", "--out", tmp_path / "out")
    assert shown.exit_code == 1
    assert "config.json is not what was written" in " ".join(shown.output.split())
