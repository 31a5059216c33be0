"""apply and remove: what they change, and that they leave nothing behind."""

import copy
import pickle

import pytest
import torch
from transformers import BertModel

import saobp
from saobp.testing.tiny_models import FAMILIES, tiny_batch, tiny_model
from saobp.transformers import attention_modules, strength_parameters
from saobp.transformers.layer_refinement import named_refinements


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def fingerprint(model):
    hooks = {name: list(module._forward_pre_hooks) for name, module in model.named_modules()}
    own = {key for key in vars(model) if not key.startswith("_output_capturing")}
    implementation = model.config._attn_implementation
    return list(model.state_dict()), model.config.to_dict(), implementation, hooks, own, repr(model)


@pytest.mark.parametrize("refinement", ["high:0.5", "high:learned", "high,strength=0.5,future=paper"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:future='paper'")
def test_remove_restores_the_model(family, refinement):
    model, batch = tiny_model(family, attn_implementation="eager"), tiny_batch()
    expected, before = logits(model, batch), fingerprint(model)
    assert saobp.apply(model, refinement) is model
    logits(model, batch)
    assert saobp.remove(model) is model
    assert fingerprint(model) == before
    torch.testing.assert_close(logits(model, batch), expected, rtol=0, atol=0)


def test_remove_of_a_plain_model_does_nothing():
    model = tiny_model("bert")
    before = fingerprint(model)
    assert fingerprint(saobp.remove(model)) == before


@pytest.mark.parametrize("applied", [["part", "whole"], ["whole", "part"], ["whole"], ["part"]])
@pytest.mark.parametrize("removed", ["part", "whole"])
def test_whatever_of_whole_and_part_is_refined_is_removed_with_either(applied, removed):
    model, batch = tiny_model("bert"), tiny_batch()
    before = model(**batch).logits
    chosen = {"whole": model, "part": model.bert}
    for name in applied:
        saobp.apply(chosen[name], "high:0.5")
    assert not torch.equal(model(**batch).logits, before)
    saobp.remove(chosen[removed])
    assert torch.equal(model(**batch).logits, before)


def test_applying_twice_replaces():
    model, batch = tiny_model("bert"), tiny_batch()
    expected = logits(saobp.apply(model, "low:0.4"), batch)
    earlier = saobp.remove(model).config._attn_implementation
    saobp.apply(model, "high:learned")
    saobp.apply(model, "low:0.4")
    torch.testing.assert_close(logits(model, batch), expected, rtol=0, atol=0)
    assert saobp.remove(model).config._attn_implementation == earlier


def test_a_failed_apply_changes_nothing():
    model = saobp.apply(tiny_model("bert"), "high:0.5")
    before = fingerprint(model)
    for wrong in ("high:0.1/0.2/0.3", "elemmul:learned", "nonsense"):
        with pytest.raises(ValueError):
            saobp.apply(model, wrong)
    assert fingerprint(model) == before


def test_auto_follows_the_number_of_parameters():
    model = tiny_model("bert", hidden_size=256, intermediate_size=512)
    parameters = model.num_parameters()
    assert parameters > 1e6
    saobp.apply(model, "high:learned")
    saobp.apply(model, saobp.Refinement("high", "auto"))
    assert model.config.saobp["strength"] == pytest.approx(0.2 * 11.2e6 / parameters)


def test_strengths_per_layer_and_head_reach_their_heads():
    per_head = [[0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.6, 0.7]]
    model = saobp.apply(tiny_model("distilbert"), saobp.Refinement("high", per_head))
    values = [own() for _, own in named_refinements(model)]
    torch.testing.assert_close(torch.stack(values), torch.tensor(per_head))
    assert model.config.saobp["strength"] == per_head


def test_albert_shares_one_attention_module():
    model = tiny_model("albert")
    assert len(attention_modules(model)) == 1
    saobp.apply(model, "high:learned")
    assert len(strength_parameters(model)) == 1


def test_modules_come_in_layer_order():
    names = [name for name, _ in attention_modules(tiny_model("bert", num_hidden_layers=12))]
    assert names == [f"bert.encoder.layer.{layer}.attention.self" for layer in range(12)]


def test_learned_strengths_are_signed_parameters_that_start_as_softmax():
    model, batch = tiny_model("llama"), tiny_batch()
    expected = logits(saobp.apply(model, "none"), batch)
    saobp.apply(model, "high:learned")
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-4)
    strengths = strength_parameters(model)
    assert [tuple(p.shape) for p in strengths] == [(4,), (4,)]
    assert all(isinstance(p, torch.nn.Parameter) and not p.any() for p in strengths)
    for sign in (1, -1):
        for parameter in strengths:
            torch.nn.init.constant_(parameter, sign * 0.6)
        moved = logits(model, batch)
        torch.testing.assert_close(
            moved, logits(saobp.apply(copy.deepcopy(model), "high:0.6" if sign > 0 else "low:0.6"), batch)
        )
    assert len([name for name in model.state_dict() if name.endswith("saobp.strength_bias")]) == 2


def test_fixed_strengths_are_not_saved_and_keep_their_precision():
    model = saobp.apply(tiny_model("bert"), "high:0.2").to(torch.bfloat16)
    assert not any("saobp" in name for name in model.state_dict())
    (_, first), _ = named_refinements(model)
    assert first().dtype == torch.float32
    assert first()[0] == torch.tensor(0.2)
    assert logits(model, tiny_batch()).dtype == torch.bfloat16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_refined_and_can_be_restored(copied):
    """GPT-2, because Transformers' Llama itself cannot be pickled where the kernels library is installed."""
    model, batch = tiny_model("gpt2"), tiny_batch()
    plain = logits(model, batch)
    refined = logits(saobp.apply(model, "high:0.5"), batch)
    twin = copied(model)
    torch.testing.assert_close(logits(twin, batch), refined)
    torch.testing.assert_close(logits(saobp.remove(twin), batch), plain)
    torch.testing.assert_close(logits(model, batch), refined)


def test_a_model_inside_another_class_is_found():
    model = saobp.apply(BertModel(tiny_model("bert").config), "high:0.5")
    assert [name for name, _ in named_refinements(model)] == [
        f"encoder.layer.{layer}.attention.self" for layer in (0, 1)
    ]


def test_the_implementation_alone_reads_numbers_from_the_config():
    model, batch = tiny_model("bert"), tiny_batch()
    expected = logits(saobp.apply(model, "high:0.5"), batch)
    bare = tiny_model("bert", attn_implementation="saobp")
    with pytest.raises(ValueError, match=r"saobp\.apply"):
        bare(**batch)
    bare.config.saobp = model.config.saobp
    torch.testing.assert_close(logits(bare, batch), expected)
    for strength in ("auto", "learned", [0.1, 0.2]):
        bare.config.saobp = {"factor": "high", "strength": strength}
        with pytest.raises(ValueError, match=r"config\.saobp"):
            bare(**batch)


def test_a_new_factor_works_in_a_model():
    class Doubled(saobp.Factor):
        def log_messages(self, beliefs, strength):
            return torch.log1p(beliefs * torch.expm1(-2 * strength))

    saobp.register_factor("doubled", Doubled())
    batch = tiny_batch()
    twice = logits(saobp.apply(tiny_model("gpt2"), "doubled:0.2"), batch)
    torch.testing.assert_close(twice, logits(saobp.apply(tiny_model("gpt2"), "high:0.4"), batch))


def test_a_single_token_passes():
    for family in ("bert", "gpt2"):
        model = saobp.apply(tiny_model(family), "high:0.5")
        assert torch.isfinite(logits(model, {"input_ids": torch.ones(2, 1, dtype=torch.long)})).all()


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_model_of_the_same_config_stays_plain(family):
    """As in a script that builds the refined model and the one to compare it with from one config."""
    refined, batch = tiny_model(family), tiny_batch()
    plain = type(refined)(refined.config).eval()
    expected = logits(plain, batch)
    saobp.apply(refined, "high:0.7")
    assert torch.equal(logits(plain, batch), expected)
    assert not hasattr(plain.config, "saobp")
    saobp.remove(saobp.apply(plain, "low:0.1"))
    assert refined.config.saobp["strength"] == 0.7
    assert refined.config is refined.base_model.config


def test_the_same_refinement_again_keeps_what_was_learned() -> None:
    model = saobp.apply(tiny_model("bert"), "high:learned+temperature")
    with torch.no_grad():
        for number, one in enumerate(strength_parameters(model)):
            one.fill_(0.1 + number)
    learned = strength_parameters(model)
    saobp.apply(model, "high:learned+temperature")
    assert len(learned) == 4
    assert all(one is other for one, other in zip(strength_parameters(model), learned, strict=True))
    saobp.apply(model, "low:learned+temperature")
    assert not any(one.any() for one in strength_parameters(model))
