"""Folders that carry their code: the refined model where saobp cannot be imported, and with it."""

import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

import saobp
from saobp.portable.code import CODE, FAMILIES
from saobp.storage.atomic import ADDED
from saobp.storage.manifest import check_manifest, write_manifest
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.testing.tiny_training import small_tokenizer
from saobp.transformers import strength_parameters
from saobp.transformers.layer_refinement import named_refinements

SCRIPT = Path(__file__).with_name("without_saobp.py")


def refined(model, text):
    saobp.apply(model, text)
    for parameter in strength_parameters(model):
        torch.nn.init.uniform_(parameter, -1.0, 1.0)
    return model.eval()


def auto_of(model):
    if type(model).__name__.endswith("SequenceClassification"):
        return "AutoModelForSequenceClassification"
    return "AutoModelForCausalLM" if model.can_generate() else "AutoModelForMaskedLM"


def prepared(model, folder, tokenizer=None, **extra):
    """Save portably, with inputs for the other process; returns its folder, and what the package gives."""
    extra["options"] = {"dtype": model.dtype}
    saobp.save(model, folder, portable=True, tokenizer=tokenizer)
    batch = tiny_batch(side="left" if model.can_generate() else "right")
    torch.save({"auto": auto_of(model), "batch": batch, **extra}, folder / "inputs.pt")
    return model, batch, folder


def run_without_saobp(folders):
    command = [sys.executable, str(SCRIPT), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env={"HOME": str(folders[0])}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(folder / "answers.pt") for folder in folders]


def assert_same(model, batch, found):
    with torch.no_grad():
        expected = model(**batch)[0]
    real = batch["attention_mask"].bool() if expected.ndim == 3 else ...
    bound = 1e-9 if model.dtype == torch.float64 else 3e-6 * expected[real].abs().max()
    assert (found["output"] - expected)[real].abs().max() <= bound
    assert (found["again"] - expected)[real].abs().max() <= bound
    assert found["modules"] == []
    assert 'attn_implementation="saobp"` is not supported' in found["refusal"]
    learned = {name for name, _ in model.named_parameters() if ".saobp." in name}
    assert found["gradients"].keys() == learned
    assert all(gradient.abs().sum() > 0 for gradient in found["gradients"].values())
    if model.can_generate():
        expected = model.generate(**batch, max_new_tokens=10, do_sample=False)
        assert torch.equal(found["greedy"], expected)
        assert torch.equal(found["uncached"], expected)
        assert torch.equal(
            found["beams"], model.generate(**batch, max_new_tokens=10, do_sample=False, num_beams=3)
        )


def test_without_the_package_models_are_refined_generate_train_and_are_saved_again(tmp_path):
    """Masked LM, causal LM and sequence classification, in one process that cannot import saobp."""
    tokenizer = small_tokenizer()
    words = max(64, len(tokenizer))
    classifier = BertForSequenceClassification(tiny_model("bert").config).double()
    cases = [
        prepared(
            refined(tiny_model("bert", vocab_size=words), "high:0.5").double(),
            tmp_path / "bert",
            tokenizer,
            text=f"one {tokenizer.mask_token} three",
            task="fill-mask",
        ),
        prepared(refined(tiny_model("gpt2"), "high:learned").double(), tmp_path / "gpt2"),
        prepared(refined(classifier, "low:learned,steps=2,damping=0.3+gate"), tmp_path / "classifier"),
    ]
    answers = run_without_saobp([folder for _, _, folder in cases])
    for (model, batch, _), found in zip(cases, answers, strict=True):
        assert_same(model, batch, found)
    assert json.loads(answers[0]["pipeline"])[0]["token_str"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "text",
    [
        "low:0.7",
        "high:learned+gate",
        "high-key-bias:0.3,steps=2+temperature",
        "high-listing:0.5+qk-norm",
        "sink",
    ],
)
def test_every_family_without_the_package(text, dtype, tmp_path):
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0, "initializer_range": 0.3,
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    extra = {
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)),
        "smollm3": lambda: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**shape)),
        "xlm-roberta": lambda: transformers.XLMRobertaForMaskedLM(
            transformers.XLMRobertaConfig(**{**shape, "max_position_embeddings": 66})
        ),
    }
    cases = []
    for family in FAMILIES:
        torch.manual_seed(0)
        model = extra[family]() if family in extra else tiny_model(family)
        cases.append(prepared(refined(model, text).to(dtype), tmp_path / family))
    for (model, batch, _), found in zip(cases, run_without_saobp([c[2] for c in cases]), strict=True):
        assert_same(model, batch, found)


def alone(folder):
    """The folder with code that does not find the package, as in an environment without it."""
    code = (folder / CODE).read_text()
    (folder / CODE).write_text(code.replace("from saobp.transformers.load", "from saobp.nowhere"))
    return folder


def load_alone(folder, auto, **options):
    """The model as the code of its folder loads it, by Transformers' own ``from_pretrained``."""
    patched = PreTrainedModel.__dict__["from_pretrained"]
    PreTrainedModel.from_pretrained = classmethod(patched.__func__.__wrapped__)
    try:
        return auto.from_pretrained(alone(folder), trust_remote_code=True, **options).eval()
    finally:
        PreTrainedModel.from_pretrained = patched


def sent_alone(model, tmp_path, auto):
    """The model saved as a portable folder and loaded by ``load_alone``, in double precision."""
    folder = saobp.save(model, tmp_path / "model", portable=True)
    return load_alone(folder, auto, dtype=torch.float64)


@pytest.mark.parametrize(
    "text",
    ["elemmul", "elemmul-prior+qk-norm", "low-key-bias:learned,steps=2,message_stride=3", "softmax-plus-one"],
)
def test_factors_and_variants_of_the_folder_equal_those_of_the_package(text, tmp_path):
    model, batch = refined(tiny_model("modernbert").double(), text), tiny_batch()
    loaded = sent_alone(model, tmp_path, AutoModelForMaskedLM)
    assert type(loaded).__module__.startswith("transformers_modules")
    with torch.no_grad():
        got, expected = loaded(**batch).logits, model(**batch).logits
    assert (got - expected)[batch["attention_mask"].bool()].abs().max() < 1e-12


def test_the_folder_alone_decodes_in_chunks_like_the_package(tmp_path):
    model = refined(tiny_model("mistral").double(), "high:learned,steps=2")
    loaded = sent_alone(model, tmp_path, transformers.AutoModelForCausalLM)
    ids = tiny_batch(batch=2, length=14, padding=0)["input_ids"]
    with torch.no_grad():
        whole, cache, parts = model(ids).logits, None, []
        for start, stop in ((0, 5), (5, 6), (6, 10), (10, 14)):
            out = loaded(ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-12
    with pytest.raises(ValueError, match="taking rows back"):
        cache.crop(3)
    with pytest.raises(ValueError, match="DynamicCache"):
        loaded.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="is refined"):
        loaded.set_attn_implementation("sdpa")


def test_threads_may_share_the_folder_alone(tmp_path):
    model = refined(tiny_model("llama").double(), "high:learned+gate")
    loaded = sent_alone(model, tmp_path, transformers.AutoModelForCausalLM)
    loaded = copy.deepcopy(loaded)
    ids = tiny_batch(batch=2, padding=0)["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        cache = loaded(ids[:, :-1], use_cache=True).past_key_values

        def run(*_):
            handle.remove()
            thread = Thread(target=lambda: loaded(ids[:, :3]))
            thread.start()
            thread.join()

        handle = loaded.model.layers[0].self_attn.q_proj.register_forward_hook(run)
        got = loaded(ids[:, -1:], past_key_values=cache).logits
    assert (got - expected).abs().max() < 1e-12


def test_with_the_package_the_folder_runs_by_it(tmp_path):
    model = refined(tiny_model("bert"), "high:learned")
    saobp.save(model, tmp_path / "model", portable=True)
    by_code = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    by_name = AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    by_load = saobp.load(tmp_path / "model", AutoModelForMaskedLM)
    for loaded in (by_code, by_name, by_load):
        assert loaded.config._attn_implementation == "saobp"
        assert len(list(named_refinements(loaded))) == 2
        with torch.no_grad():
            assert torch.equal(loaded(**tiny_batch()).logits, model(**tiny_batch()).logits)
    by_code.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / CODE).read_text() == (tmp_path / "model" / CODE).read_text()
    fixed = refined(tiny_model("gpt2"), "high:0.5")
    saobp.save(fixed, tmp_path / "fixed", portable=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fixed", trust_remote_code=True)
    assert [own().tolist() for _, own in named_refinements(loaded)] == [[0.5] * 4] * 2


def test_another_head_of_the_family_loads_from_the_folder(tmp_path):
    model = refined(tiny_model("roberta"), "high:learned")
    loaded = load_alone(
        saobp.save(model, tmp_path / "model", portable=True), AutoModelForSequenceClassification, num_labels=3
    )
    found = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        if ".saobp." in name:
            assert torch.equal(found[name], parameter)


def test_a_folder_without_its_learned_strengths_is_refused(tmp_path):
    model = refined(tiny_model("bert"), "high:learned")
    saobp.save(model, tmp_path / "model", portable=True)
    file = tmp_path / "model" / "model.safetensors"
    kept = {name: values for name, values in load_file(file).items() if ".saobp." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks its learned strengths"):
        load_alone(tmp_path / "model", AutoModelForMaskedLM)


class OwnFactor(saobp.Factor):
    def log_messages(self, beliefs, strength):
        return -strength * beliefs


class OwnBert(BertForMaskedLM):
    pass


def refusals():
    saobp.register_factor("own-portable", OwnFactor())
    opt = OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
                    word_embed_proj_dim=32, max_position_embeddings=32)  # fmt: skip
    bert = tiny_model("bert").config
    yield "no portable code for 'opt'", refined(OPTForCausalLM(opt), "high:0.5")
    yield "no portable code for OwnBert", refined(OwnBert(bert), "high:0.5")
    yield "factor 'own-portable'", refined(tiny_model("bert"), "own-portable:0.5")
    yield "factor 'sinkhorn'", refined(tiny_model("bert"), "sinkhorn")
    yield "variant 'sigma-reparam'", refined(tiny_model("modernbert"), "high:0.5+sigma-reparam")
    yield "not refined", tiny_model("bert")


def test_what_has_no_portable_code_is_refused_and_nothing_is_written(tmp_path):
    for words, model in refusals():
        with pytest.raises(ValueError, match=words) as caught:
            saobp.save(model, tmp_path / "model", portable=True)
        assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match="messages of later rows"):
        leaking = saobp.apply(tiny_model("gpt2"), "high:0.5,future=paper")
    with pytest.raises(ValueError, match="must not travel"):
        saobp.save(leaking, tmp_path / "model", portable=True)
    with pytest.raises(TypeError, match="not Linear"):
        saobp.save(torch.nn.Linear(2, 2), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("portable", [False, True])
def test_a_model_of_which_a_part_is_refined_is_refused(portable, tmp_path):
    model = tiny_model("bert")
    saobp.apply(model.bert, "high:0.5")
    with pytest.raises(ValueError, match="only a part of the model is refined"):
        saobp.save(model, tmp_path / "model", portable=portable)
    saobp.save(model.bert, tmp_path / "part")
    assert saobp.load(tmp_path / "part").config.saobp["strength"] == 0.5


@pytest.mark.parametrize("portable", [False, True])
def test_a_second_save_replaces_the_model_and_leaves_other_files(portable, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    saobp.save(refined(tiny_model("bert"), "high:0.5"), tmp_path, portable=portable)
    write_manifest(tmp_path)
    parts = [tmp_path / name for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json")]
    for part in parts:
        part.write_text("of an earlier, larger model")
    saobp.save(refined(tiny_model("bert"), "high:0.25"), tmp_path, portable=portable)
    assert not any(part.exists() for part in parts)
    assert saobp.load(tmp_path).config.saobp["strength"] == 0.25
    assert "`high:0.25`" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    check_manifest(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_readme_that_somebody_wrote_or_edited_stays(tmp_path):
    model = refined(tiny_model("bert"), "high:0.5")
    card = saobp.save(model, tmp_path / "model") / "README.md"
    card.write_text(card.read_text().replace("# model", "# My model"))
    with pytest.warns(UserWarning, match=r"so it stays, and the new model card is README-new\.md"):
        saobp.save(refined(tiny_model("bert"), "high:0.25"), tmp_path / "model")
    assert "# My model" in card.read_text()
    assert "`high:0.25`" in card.with_name("README-new.md").read_text()


def test_a_save_that_fails_leaves_the_earlier_model_whole(tmp_path, monkeypatch):
    folder = saobp.save(refined(tiny_model("bert"), "high:0.5"), tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("saobp.portable.save.finish_folder", full)
    with pytest.raises(OSError, match="No space left"):
        saobp.save(refined(tiny_model("bert"), "high:0.25"), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: name another folder"):
        saobp.save(refined(tiny_model("bert"), "high:0.25"), tmp_path / "file")


def test_saves_at_once_take_turns_and_leave_one_model(tmp_path):
    """As when every process of a training saves to one folder, which need not exist."""
    models = [refined(tiny_model("bert"), name) for name in ("high:0.5", "high:0.25")]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda turn: saobp.save(models[turn % 2], tmp_path / "model"), range(12)))
    assert saobp.load(tmp_path / "model").config.saobp["strength"] in (0.5, 0.25)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_link_to_no_folder_yet(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "model")
    saobp.save(refined(tiny_model("bert"), "high:0.5"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert saobp.load(tmp_path / "link").config.saobp["strength"] == 0.5


def test_a_folder_with_an_adapter_is_refused(tmp_path):
    """Transformers would load the model and add the adapter, which is merged in it, once more."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds an adapter .*: name another folder"):
        saobp.save(refined(tiny_model("bert"), "high:0.5"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]


def test_a_save_that_stops_between_two_files_leaves_no_mixture(tmp_path, monkeypatch):
    """Without its config a folder does not load; weights of another model beside it would."""
    folder = saobp.save(refined(tiny_model("bert"), "high:0.5"), tmp_path / "model")

    def stopped_at(name):
        def replace(source, place):
            if place.name == name:
                raise KeyboardInterrupt
            source.rename(place)

        return replace

    for name in ("README.md", "model.safetensors", "config.json"):
        monkeypatch.setattr(Path, "replace", stopped_at(name))
        with pytest.raises(KeyboardInterrupt):
            saobp.save(refined(tiny_model("bert"), "high:0.25"), folder)
        assert not (folder / "config.json").exists()
    monkeypatch.undo()
    (folder / ADDED).mkdir()  # a killed process leaves it
    with pytest.raises(ValueError, match="was interrupted between two files: save the model again"):
        saobp.load(folder)
    saobp.save(refined(tiny_model("bert"), "high:0.25"), folder)
    assert saobp.load(folder).config.saobp["strength"] == 0.25
