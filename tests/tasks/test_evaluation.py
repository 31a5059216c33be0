"""Perplexities and answers against slow and plain computations, and against lm-evaluation-harness."""

import json
import math
from typing import NoReturn

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from typer.testing import CliRunner

import saobp
from saobp.cli import app
from saobp.data.tasks import TASKS, load_split
from saobp.runs.folder import RunFolder
from saobp.testing.tiny_models import save_tiny_bert
from saobp.training.checkpoints import load_tokenizer_of
from saobp.training.evaluation.harness import harness_accuracy, has_harness
from saobp.training.evaluation.perplexity import (
    causal_perplexity,
    masked_perplexity,
    pseudo_perplexity,
    read_wikitext,
)
from saobp.training.evaluation.run import evaluate
from saobp.training.evaluation.zero_shot import (
    Question,
    accuracy,
    boolq_questions,
    log_likelihoods,
    race_questions,
)


@pytest.fixture(scope="module")
def decoder(gpt2):
    return saobp.load(gpt2, AutoModelForCausalLM).eval(), load_tokenizer_of(gpt2)


@pytest.fixture(scope="module")
def encoder(bert):
    return AutoModelForMaskedLM.from_pretrained(bert).eval(), load_tokenizer_of(bert)


def slow_causal(model, tokens, length, stride):
    """Each token once, from the first window that holds it."""
    losses, scored = [], 1
    for start in range(0, len(tokens), stride):
        window = torch.from_numpy(tokens[start : start + length])[None]
        with torch.no_grad():
            logs = model(input_ids=window).logits[0].log_softmax(-1)
        for place in range(scored - start, window.shape[1]):
            losses.append(-float(logs[place - 1, window[0, place]]))
        scored = start + window.shape[1]
        if scored == len(tokens):
            return math.exp(np.mean(losses)), len(losses)
    raise AssertionError("the windows end before the text")


@pytest.mark.parametrize(
    ("count", "length", "stride"), [(200, 32, 16), (200, 32, 31), (131, 48, 5), (20, 32, 16), (32, 32, 16)]
)
def test_causal_perplexity_scores_every_token_once(decoder, data_dir, count, length, stride):
    model, tokenizer = decoder
    tokens = read_wikitext(tokenizer, data_dir).row[:count]
    found = causal_perplexity(model, tokens, length=length, stride=stride)
    perplexity, scored = slow_causal(model, tokens, length, stride)
    assert found["tokens"] == scored == count - 1
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-4)


def test_one_window_is_the_models_own_loss(decoder, data_dir):
    model, tokenizer = decoder
    tokens = read_wikitext(tokenizer, data_dir).row[:50]
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert causal_perplexity(model, tokens, length=50)["perplexity"] == pytest.approx(
        math.exp(loss), rel=1e-4
    )


def test_windows_that_cannot_be_are_refused(decoder):
    with pytest.raises(ValueError, match="stride must lie from 1 to 31"):
        causal_perplexity(decoder[0], np.arange(90), length=32, stride=32)
    with pytest.raises(ValueError, match="at least two tokens"):
        causal_perplexity(decoder[0], np.arange(1), length=32)


def test_pseudo_perplexity_hides_one_token_at_a_time(encoder, data_dir):
    model, tokenizer = encoder
    blocks = read_wikitext(tokenizer, data_dir).blocks(tokenizer, 24)[:2]
    assert blocks.shape == (2, 24)
    assert (blocks[:, 0] == tokenizer.cls_token_id).all()
    losses = []
    for row in blocks:
        for place, token in enumerate(row):
            if token in tokenizer.all_special_ids:
                continue
            shown = torch.from_numpy(row.copy())[None]
            shown[0, place] = tokenizer.mask_token_id
            with torch.no_grad():
                losses.append(-float(model(input_ids=shown).logits[0, place].log_softmax(-1)[token]))
    found = pseudo_perplexity(model, tokenizer, blocks, positions=None)
    assert found["positions"] == found["of"] == len(losses)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    error = found["perplexity"] * np.std(losses, ddof=1) / math.sqrt(len(losses))
    assert found["error"] == pytest.approx(error, rel=1e-3)


def test_a_subset_of_positions_is_stated_and_the_same_each_time(encoder, data_dir):
    model, tokenizer = encoder
    blocks = read_wikitext(tokenizer, data_dir).blocks(tokenizer, 24)
    found = pseudo_perplexity(model, tokenizer, blocks, positions=30)
    assert found["positions"] == 30 < found["of"]
    assert found == pseudo_perplexity(model, tokenizer, blocks, positions=30)


def test_masked_perplexity_hides_as_in_training(encoder, data_dir):
    model, tokenizer = encoder
    blocks = read_wikitext(tokenizer, data_dir).blocks(tokenizer, 40)
    found = masked_perplexity(model, tokenizer, blocks)
    assert found["positions"] == len(blocks) * round(0.15 * 40)
    assert found["perplexity"] == pytest.approx(len(tokenizer), rel=0.3), "random weights know nothing"


def slow_likelihood(model, tokenizer, context, continuation, room):
    kept = context.rstrip()
    before = tokenizer(kept)["input_ids"]
    after = tokenizer(context + continuation)["input_ids"][len(before) :]
    shown = torch.tensor((before + after)[-(room + 1) : -1])[None]
    with torch.no_grad():
        logs = model(input_ids=shown).logits[0].log_softmax(-1)
    return sum(float(logs[place - len(after), token]) for place, token in enumerate(after))


def test_likelihoods_do_not_depend_on_their_batch(decoder):
    model, tokenizer = decoder
    pairs = [
        ("the river finds", " stone"),
        ("the river finds ", "the stone near the garden"),
        ("good", " bad"),
        (" ".join(["the window takes the letter"] * 20), " good garden"),
    ]
    found = log_likelihoods(model, tokenizer, pairs)
    expected = [slow_likelihood(model, tokenizer, *pair, room=64) for pair in pairs]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    with pytest.raises(ValueError, match="does not fit into 64 positions"):
        log_likelihoods(model, tokenizer, [("a", " x" * 90)])


def test_the_likeliest_candidate_is_the_answer(decoder):
    model, tokenizer = decoder
    options = ("good", "bad", "the stone")
    scores = log_likelihoods(model, tokenizer, [("the river is", f" {option}") for option in options])
    best = int(np.argmax(scores))
    questions = [Question("the river is", options, answer) for answer in (best, best, (best + 1) % 3, best)]
    found = accuracy(model, tokenizer, questions)
    assert found["accuracy"] == 75
    assert found["questions"] == 4
    assert found["error"] == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 3))


def test_race_is_asked_as_the_harness_asks_it(data_dir):
    split = load_split(TASKS["race-middle"], "test", data_dir)
    first, second = split.table.to_pylist()[:2]
    asked = race_questions(split)
    assert len(asked) == 12
    answer = first["options"]["ABCD".index(first["answer"])]
    told = f"Question: What is it like?\nAnswer: {answer}\n"
    assert asked[0].prompt == f"Article: {first['article']}\n\n{told}One can say that it is   _  ."
    assert asked[0].candidates == tuple(second["options"])
    assert "ABCD"[asked[0].answer] == second["answer"]
    every = race_questions(split, every=True)
    assert len(every) == 24
    assert every[0].prompt == f"Article: {first['article']}\n\nWhat is it like?"


def test_an_earlier_sentence_with_a_gap_is_completed(data_dir):
    split = load_split(TASKS["race-middle"], "test", data_dir).take(np.array([1, 0]))
    gap, _ = split.table.to_pylist()
    answer = gap["options"]["ABCD".index(gap["answer"])]
    assert f"\n\nOne can say that it is  {answer}\nWhat is it like?" in race_questions(split)[0].prompt


def test_boolq_is_asked_as_the_harness_asks_it(data_dir):
    split = load_split(TASKS["boolq"], "validation", data_dir)
    row, question = split.table.to_pylist()[0], boolq_questions(split)[0]
    assert question.prompt == f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    assert question.candidates == ("no", "yes")
    assert question.answer == int(row["answer"])


def test_a_decoder_is_measured_on_everything_and_the_results_are_kept(gpt2, data_dir, tmp_path):
    line = [
        "evaluate",
        str(gpt2),
        "--data-dir",
        str(data_dir),
        "--out",
        str(tmp_path / "run"),
        "--limit",
        "5",
    ]
    answer = CliRunner().invoke(app, line, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    assert "harness" not in answer.output  # a column of its own where --harness asks for it
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["race-middle"]["questions"] == 5
    assert result["race-middle"]["every_question"]["questions"] == 10
    assert result["boolq"]["questions"] == 5
    assert result["wikitext"]["word_perplexity"] > result["wikitext"]["perplexity"]
    assert any("only 5 examples" in note for note in result["notes"])
    assert any(note.startswith("boolq: validation has ") for note in result["notes"])
    assert json.loads((tmp_path / "run/recipe.json").read_text())["refinement"]["factor"] == "high"
    again = CliRunner().invoke(app, line)
    assert again.exit_code == 1
    assert "is finished" in again.output


def test_a_measurement_that_stops_is_noted_and_goes_on_from_another_place(
    bert, data_dir, tmp_path, monkeypatch
):
    options = {"data_dir": data_dir, "folder": tmp_path / "run", "positions": 20}
    with pytest.raises(ValueError, match="length 65 does not fit"):
        evaluate(bert, length=65, **options)
    assert not (tmp_path / "run").exists()
    with monkeypatch.context() as broken:
        broken.setattr("saobp.training.evaluation.run.pseudo_perplexity", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(bert, **options)
    run = RunFolder(tmp_path / "run")
    assert run.record["status"] == "failed"
    assert sorted(run.record["data"]) == ["model", "wikitext"]

    def stop(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("saobp.training.evaluation.run.pseudo_perplexity", stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate(bert, **options)
    assert run.record["status"] == "interrupted"
    monkeypatch.chdir(bert.parent)
    evaluate(bert.name, **options)
    assert run.result["model"] == run.recipe["model"] == f"{bert.parent.name}/{bert.name}"


def test_an_encoder_is_measured_on_wikitext_alone(bert, data_dir):
    found = evaluate(bert, data_dir=data_dir, positions=20)
    assert "boolq" not in found
    assert found["wikitext"]["pseudo"]["positions"] == 20
    with pytest.raises(ValueError, match="are asked of a decoder"):
        evaluate(bert, ["boolq"], data_dir=data_dir)
    with pytest.raises(ValueError, match="unknown task 'cola'"):
        evaluate(bert, ["cola"], data_dir=data_dir)
    with pytest.raises(ValueError, match="length 65 does not fit into the model's 64 positions"):
        evaluate(bert, ["wikitext"], data_dir=data_dir, length=65)


def test_a_refinement_changes_the_measurement_and_none_takes_it_off(data_dir, tmp_path):
    def perplexity(folder, **options):
        found = evaluate(folder, ["wikitext"], data_dir=data_dir, positions=20, **options)
        return found["wikitext"]["pseudo"]["perplexity"]

    plain = save_tiny_bert(tmp_path / "plain", spread=0.3)
    refined = save_tiny_bert(tmp_path / "refined", "high:2", spread=0.3)
    assert perplexity(refined, refinement="none") == pytest.approx(perplexity(plain), rel=1e-6)
    assert perplexity(refined) != pytest.approx(perplexity(plain), rel=1e-3)
    assert perplexity(plain, refinement="high:2") == pytest.approx(perplexity(refined), rel=1e-6)


@pytest.mark.skipif(not has_harness(), reason="lm-evaluation-harness (lm_eval) is not installed")
@pytest.mark.parametrize(("task", "every"), [("race-middle", False), ("race-middle", True), ("boolq", False)])
def test_the_harness_finds_the_same_number(decoder, data_dir, task, every, capfd):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = decoder
    split = load_split(TASKS[task], "validation", data_dir)
    questions = boolq_questions(split) if task == "boolq" else race_questions(split, every=every)
    ours, theirs = (
        accuracy(model, tokenizer, questions),
        harness_accuracy(model, tokenizer, task, split, every=every),
    )
    assert "it/s" not in capfd.readouterr().err  # no progress bars but our own
    assert theirs["questions"] == ours["questions"]
    assert theirs["accuracy"] == pytest.approx(ours["accuracy"])

    pairs = [(question.prompt, f" {option}") for question in questions for option in question.candidates]
    requests = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=64)
    expected = [score for score, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    np.testing.assert_allclose(log_likelihoods(model, tokenizer, pairs), expected, rtol=1e-4)


def test_without_the_harness_a_sentence_says_what_to_install(decoder, data_dir, monkeypatch):
    monkeypatch.setattr("saobp.training.evaluation.harness.has_harness", lambda: False)
    split = load_split(TASKS["boolq"], "validation", data_dir)
    with pytest.raises(ValueError, match=r"pip install .saobp\[harness\]"):
        harness_accuracy(*decoder, "boolq", split)
