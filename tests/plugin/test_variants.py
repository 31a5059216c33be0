"""Variants of attention against their definitions, written out as loops, inside models with padding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

import saobp
from saobp.refinement import STRENGTH_VARIANTS, VARIANTS, Refinement
from saobp.testing.oracles import high, low, masked_softmax
from saobp.testing.tiny_models import VOCABULARY, tiny_model
from saobp.transformers import record_attention, strength_parameters
from saobp.transformers.capture import AttentionCall, watch
from saobp.transformers.layer_refinement import named_refinements
from saobp.transformers.projections import projection_weights
from saobp.variants import KINDS

LENGTH = 6
ON_PLAIN = [name for name in VARIANTS if name not in STRENGTH_VARIANTS]
OF_MESSAGES = [
    "high:learned+alternating",
    "high-key-bias:learned+by-distance",
    "low:learned,steps=3+later-steps",
    "high:learned+message-gate",
    "high:learned,steps=2+by-distance+later-steps+message-gate",
]


def tiny(family: str) -> PreTrainedModel:
    return tiny_model(family).double()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def scatter_parameters(model: nn.Module) -> None:
    """Values that are not those of the start, different for every head."""
    random = torch.Generator().manual_seed(2)
    for _, own in named_refinements(model):
        for parameter in own.parameters():
            parameter.data += torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)


def definition(
    name: str, parameters: dict[str, Tensor], inputs: Tensor, states: list[Tensor], mask: Tensor, scale: float
) -> Tensor:
    """One head of one text: states ``[length, dim]``, mask added to scores; the output ``[length, dim]``."""
    query, key, value = states
    length, output = len(query), torch.zeros_like(query)
    query = query + parameters.get("query_bias", 0)
    bias = float(parameters.get("head_bias", torch.zeros(())))
    for j in range(length):
        scores = []
        for k in range(length):
            q, kk = query[j], key[k]
            if name == "qk-norm":
                q = q / math.sqrt(float(q.square().mean()) + 1e-6)
                kk = kk / math.sqrt(float(kk.square().mean()) + 1e-6)
            score = sum(float(a) * float(b) for a, b in zip(q, kk, strict=True)) * scale
            score *= math.exp(bias) if name in ("temperature", "qk-norm") else 1.0
            scores.append(score + float(mask[j, k]))
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + {"sink": math.exp(bias), "softmax-plus-one": 1.0}.get(name, 0.0)
        for k in range(length):
            output[j] += weights[k] / total * value[k]
        if name == "gate":
            opening = float(parameters["gate_weight"] @ inputs[j] + parameters["gate_bias"])
            output[j] /= 1 + math.exp(-opening)
    return output


@pytest.fixture
def by_definition() -> dict[str, Any]:
    """An attention implementation that loops, for the variant and parameters written to what is given."""
    given: dict[str, Any] = {}

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = torch.zeros_like(query)
        for text in range(len(query)):
            for head in range(query.shape[1]):
                own = {name: values[head] for name, values in given["parameters"][module.place].items()}
                states = [x[text, head] for x in (query, key, value)]
                mask = attention_mask[text, 0]
                output[text, head] = definition(given["name"], own, module.inputs[text], states, mask, scale)
        return output.transpose(1, 2), None

    AttentionInterface.register("loops", attention)
    AttentionMaskInterface.register("loops", eager_mask)
    return given


def looping(model: PreTrainedModel, modules: list[str]) -> PreTrainedModel:
    """A plain model that asks the loops, each attention module knowing its place and its inputs."""
    model.set_attn_implementation("loops")

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        module.inputs = args[0] if args else kwargs["hidden_states"]

    for place, name in enumerate(modules):
        module = model.get_submodule(name)
        module.place = place  # type: ignore[assignment]
        module.register_forward_pre_hook(note, with_kwargs=True)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", ["modernbert", "llama", "bert"])
@pytest.mark.parametrize("name", [name for name in ON_PLAIN if name != "sigma-reparam"])
def test_variant_is_its_definition(name: str, family: str, by_definition: dict[str, Any]) -> None:
    refined = saobp.apply(tiny(family), name)
    scatter_parameters(refined)
    by_definition["name"] = name
    by_definition["parameters"] = [
        {key.rpartition(".")[2]: value.detach() for key, value in own.named_parameters()}
        for _, own in named_refinements(refined)
    ]
    plain = looping(tiny(family), [module for module, _ in named_refinements(refined)])
    inputs, real = batch(), batch()["attention_mask"].bool()
    found, expected = refined(**inputs).logits[real], plain(**inputs).logits[real]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(found, tiny(family)(**inputs).logits[real], atol=1e-3)


def strength_by_definition(text: str, own: dict[str, Tensor], head: int, place: tuple, step: int) -> float:
    """Of the message of row i about key k in a step; place is (i, k, input of row i)."""
    i, k, inputs = place
    strength = float(own["strength_bias"][head])
    if "alternating" in text:
        strength += 1 if head % 2 == 0 else -1
    if "by-distance" in text:
        largest = (0, 1, 2, 4, 8, 16, 32, math.inf)
        bucket = next(number for number, edge in enumerate(largest) if abs(i - k) <= edge)
        strength += float(own["by-distance"][head, bucket])
    if "later-steps" in text and step:
        strength += float(own["later-steps"][head])
    if "message-gate" in text:
        strength *= 2 / (1 + math.exp(-float(own["message-gate"][head] @ inputs)))
    return strength


@torch.no_grad()
@pytest.mark.parametrize("family", ["modernbert", "llama"])
@pytest.mark.parametrize("text", OF_MESSAGES)
def test_strengths_of_messages_are_their_definition(text: str, family: str) -> None:
    model, refinement = saobp.apply(tiny(family), text), Refinement.parse(text)
    scatter_parameters(model)
    seen: list[Tensor] = []
    layer = dict(named_refinements(model))
    (name, own), *_ = layer.items()
    module, (ids, mask) = model.get_submodule(name), batch().values()
    module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    plain = saobp.remove(tiny(family))
    scores: list[Tensor] = []
    with watch(plain, lambda call: scores.append(scores_of(call))):
        plain(input_ids=ids, attention_mask=mask)
    with record_attention(model) as recorded:
        model(input_ids=ids, attention_mask=mask)
    values = {key.removeprefix("variants.").split(".")[0]: value for key, value in own.named_parameters()}
    order = "strict" if family == "llama" else "bidirectional"
    psi = low if refinement.factor == "low" else high
    for item, head in ((0, 0), (1, 1)):
        real = mask[item].bool().tolist()
        prior = masked_softmax(scores[0][item, head], order, real)
        rows = prior
        for step in range(refinement.steps):
            rows = paper_product_by(
                prior,
                rows,
                lambda i, k, step=step, head=head, item=item: psi(
                    strength_by_definition(text, values, head, (i, k, seen[0][item, i]), step)
                ),
                order,
                real,
                own="key-bias" in text,
            )
        found = recorded[name][0][item, head]
        kept = torch.tensor(real)
        torch.testing.assert_close(found[kept], torch.tensor(rows, dtype=found.dtype)[kept])


@torch.no_grad()
def test_strengths_by_step_need_no_whole_map() -> None:
    """They go the way of all calls, to the kernels where there are some; by row they do not."""
    inputs = batch()
    model = saobp.apply(tiny("bert"), "high:learned,steps=2+later-steps")
    scatter_parameters(model)
    assert all("whole map" not in str(layer) for layer in saobp.explain(model, inputs))
    whole = model(**inputs, output_attentions=True).logits
    torch.testing.assert_close(model(**inputs).logits, whole, rtol=1e-12, atol=1e-12)
    model = saobp.apply(tiny("bert"), "high:learned,steps=2+message-gate")
    assert "not one per head and step" in str(saobp.explain(model, inputs))


def scores_of(call: AttentionCall) -> Tensor:
    key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
    return call.query @ key.mT * call.scaling


def paper_product_by(prior: Any, rows: Any, psi: Any, order: str, real: list[bool], *, own: bool) -> Any:
    """Prior times messages whose potential depends on the row that sends them and on the key."""
    length, beliefs = len(rows), []
    for j in range(length):
        belief = []
        for k in range(length):
            product = prior[j][k]
            for i in range(length):
                silent = (i == j and not own) or not real[i] or (order == "strict" and (i > j or k > i))
                if not silent:
                    product *= sum(psi(i, k)(r, k) * rows[i][r] for r in range(length)) / psi(i, k)(-1, k)
            belief.append(product)
        total = sum(belief)
        beliefs.append([value / total if total else 0.0 for value in belief])
    return beliefs


@torch.no_grad()
def test_measured_statistics_are_those_of_strengths_by_row() -> None:
    model = saobp.apply(tiny("modernbert"), OF_MESSAGES[-1])
    scatter_parameters(model)
    measured = saobp.metrics.probe(model, statistics=["attention_entropy"], method="exact")
    with measured as health, record_attention(model) as recorded:
        model(**batch())
    for name, found in health.values("attention_entropy").items():
        rows = recorded[name][0][0]
        entropy = -(rows * rows.clamp(min=1e-300).log()).sum(-1).mean(-1)
        other = recorded[name][0][1, :, :4, :4]
        entropies = torch.stack([entropy, -(other * other.clamp(min=1e-300).log()).sum(-1).mean(-1)])
        torch.testing.assert_close(found.double(), entropies.mean(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="use method 'exact'"), saobp.metrics.probe(model, method="sampled"):
        model(**batch())


@torch.no_grad()
def test_strengths_by_distance_refuse_a_cache_without_positions() -> None:
    model = saobp.apply(tiny("llama"), "high:learned+by-distance")
    with pytest.raises(ValueError, match="a static cache does not tell"):
        model.generate(
            batch()["input_ids"][:1], max_new_tokens=2, cache_implementation="static", pad_token_id=0
        )


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "gate", "query-bias", "high:learned+temperature", "high:learned+gate"),
        "high:learned,steps=2+by-distance+later-steps+message-gate",
    ],
)
def test_variants_start_at_or_near_plain_attention(name: str) -> None:
    plain, varied = tiny("modernbert"), saobp.apply(tiny("modernbert"), name)
    for _, own in named_refinements(varied):
        for key, value in own.named_parameters():
            if key.endswith("gate_bias"):
                assert value.sigmoid().min() > 0.95
                value += 50
    inputs, real = batch(), batch()["attention_mask"].bool()
    torch.testing.assert_close(varied(**inputs).logits[real], plain(**inputs).logits[real])


@pytest.mark.parametrize("name", [*ON_PLAIN, "high:learned+qk-norm+gate", *OF_MESSAGES])
def test_every_parameter_of_a_variant_learns(name: str) -> None:
    model = saobp.apply(tiny("modernbert").train(), name)
    for _, own in named_refinements(model):
        if own.refinement.is_learned:
            own.strength_bias.data += 0.5  # a gate on messages has a gradient once there are messages
    model(**batch()).logits.square().sum().backward()
    for _, own in named_refinements(model):
        for key, parameter in own.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.abs().max() > 0, key


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [*ON_PLAIN, "high-key-bias:learned", "high:learned+gate+temperature", OF_MESSAGES[-1]]
)
def test_saved_variants_load_with_their_parameters(name: str, tmp_path: Path) -> None:
    for family, kind in (("modernbert", AutoModelForMaskedLM), ("llama", AutoModelForCausalLM)):
        model = saobp.apply(tiny(family), name)
        scatter_parameters(model)
        model.save_pretrained(tmp_path / family)
        loaded = saobp.load(tmp_path / family, kind, dtype=torch.float64).eval()
        assert loaded.config.saobp == model.config.saobp
        torch.testing.assert_close(loaded(**batch()).logits, model(**batch()).logits)


@torch.no_grad()
def test_removing_a_variant_leaves_the_plain_model() -> None:
    model, inputs = tiny("llama"), batch()
    before = model(**inputs).logits
    saobp.remove(saobp.apply(model, "high:0.3+gate+temperature"))
    assert torch.equal(model(**inputs).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("name", [*ON_PLAIN, "high-key-bias:learned", *OF_MESSAGES])
def test_decoders_generate_the_same_with_and_without_a_cache(name: str) -> None:
    model = saobp.apply(tiny("llama"), name)
    scatter_parameters(model)
    ids = batch()["input_ids"][:1]
    texts = [
        model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cached, pad_token_id=0)
        for cached in (True, False)
    ]
    assert torch.equal(*texts)


@torch.no_grad()
def test_measured_rows_are_those_of_the_changed_scores() -> None:
    model = saobp.apply(tiny("bert"), "temperature")
    for parameter in strength_parameters(model):
        parameter.fill_(-50.0)  # so hot that every row is uniform
    with record_attention(model) as recorded:
        model(batch()["input_ids"])
    for (rows,) in recorded.values():
        torch.testing.assert_close(rows, torch.full_like(rows, 1 / LENGTH))


@torch.no_grad()
@pytest.mark.parametrize("family", ["modernbert", "llama"])
def test_sigma_reparam_divides_projections_by_their_largest_singular_value(family: str) -> None:
    varied, plain = saobp.apply(tiny(family), "sigma-reparam"), tiny(family)
    varied.train()
    for _ in range(200):
        varied(**batch())  # an iteration each
    varied.eval()
    gains = torch.tensor([0.7, 1.3, 2.0], dtype=torch.float64)
    for name, own in named_refinements(varied):
        own.variants["sigma-reparam"].gain_bias.copy_(gains)  # type: ignore[union-attr, operator]
        module = plain.get_submodule(name)
        for gain, weight in zip(gains, projection_weights(module), strict=True):
            weight.mul_(gain / torch.linalg.matrix_norm(weight, 2))
    inputs, real = batch(), batch()["attention_mask"].bool()
    torch.testing.assert_close(
        varied(**inputs).logits[real], plain(**inputs).logits[real], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("by", ["watch", "checkpointing"])
def test_sigma_reparam_makes_one_iteration_per_training_step(by: str) -> None:
    def directions(model: Any) -> list[Tensor]:
        return [own.variants["sigma-reparam"].directions for _, own in named_refinements(model)]

    plain, other = (saobp.apply(tiny("llama"), "sigma-reparam").train() for _ in range(2))
    plain(**batch()).logits.sum().backward()
    if by == "watch":
        with saobp.watch(other):
            other(**batch()).logits.sum().backward()
    else:
        other.gradient_checkpointing_enable({"use_reentrant": False})
        other(**batch()).logits.sum().backward()
    torch.testing.assert_close(directions(other), directions(plain))
    gradients = [parameter.grad for parameter in plain.parameters()]
    torch.testing.assert_close([parameter.grad for parameter in other.parameters()], gradients)


def test_sigma_reparam_refuses_projections_with_biases() -> None:
    with pytest.raises(ValueError, match="without biases"):
        saobp.apply(tiny("bert"), "sigma-reparam")(**batch())


def test_numbers_per_head_are_learned_like_strengths() -> None:
    model = saobp.apply(tiny("modernbert"), "high:learned+temperature+gate")
    assert len(strength_parameters(model)) == 2 * len(list(named_refinements(model)))


def test_refinements_name_all_variants_that_exist() -> None:
    assert set(VARIANTS) == set(KINDS)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("high:0.2+sink", "takes the place of softmax"),
        ("sink+softmax-plus-one", "takes the place of softmax"),
        ("gate+gate", "named twice"),
        ("high:0.2+by-distance", "learned strengths alone, as in high:learned"),
        ("message-gate", "learned strengths alone"),
        ("high:learned+later-steps", "steps after the first"),
        ("high+gait", "unknown variant of attention 'gait'"),
    ],
)
def test_variants_that_do_not_fit_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        saobp.Refinement.parse(text)


@pytest.mark.parametrize("text", ["gate", "temperature+gate", "high:learned+gate", "low:0.1,steps=2+qk-norm"])
def test_the_text_form_of_variants_is_read_and_written(text: str) -> None:
    refinement = saobp.Refinement.parse(text)
    assert str(refinement) == text
    assert saobp.Refinement.from_dict(refinement.to_dict()) == refinement


def test_functions_without_a_model_refuse_variants() -> None:
    states = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match=r"saobp\.apply"):
        saobp.attention(states, states, states, "gate")
