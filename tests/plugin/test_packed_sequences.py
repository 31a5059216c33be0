"""Packed sequences: the result of each text alone, whoever packed them."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import saobp
from saobp.metrics.attention_inputs import inputs_of
from saobp.propagation.reference import reference_attention
from saobp.testing.tiny_models import DECODERS, FAMILIES, VOCABULARY, tiny_batch, tiny_model
from saobp.transformers import record_attention, strength_parameters, watch

ROUNDING = {"rtol": 1e-4, "atol": 2e-4}
LENGTHS = (5, 3, 7)
FIRST_POSITION = {"roberta": 1}
"""RoBERTa numbers positions from after its padding token; DistilBERT takes no position ids."""


def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def collated(family, **options):
    collate = DataCollatorWithFlattening(position_ids_start=FIRST_POSITION.get(family, 0), **options)
    return collate([{"input_ids": text} for text in texts()])


def alone(model):
    with torch.no_grad():
        return torch.cat([model(torch.tensor([text])).logits for text in texts()], 1)


@pytest.mark.parametrize("refinement", ["high:0.7", "low,strength=0.4,steps=2", "elemmul", "none"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"distilbert"}))
def test_flattened_texts_give_the_result_of_each_alone(family, refinement):
    model = saobp.apply(tiny_model(family), refinement)
    batch = collated(family, return_flash_attn_kwargs=True, return_seq_idx=True)
    expected = alone(model)
    for use_cache in (False, True) if family in DECODERS else (None,):
        options = {} if use_cache is None else {"use_cache": use_cache}
        with torch.no_grad():
            packed = model(**batch, **options).logits
        torch.testing.assert_close(packed, expected, **ROUNDING)


@pytest.mark.parametrize("family", DECODERS)
def test_position_ids_alone_part_the_texts(family):
    """As in TRL's padding-free training: no lengths, positions that start again, several rows."""
    model = saobp.apply(tiny_model(family), "high:0.7")
    batch = collated(family)
    ids, places = (batch[name].expand(2, -1) for name in ("input_ids", "position_ids"))
    masks = []
    with torch.no_grad(), watch(model, masks.append):
        packed = model(ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(packed, alone(model).expand(2, -1, -1), **ROUNDING)
    if family != "mistral":
        assert all(call.mask is None and call.sequences.shape == (2, sum(LENGTHS)) for call in masks)


def test_no_map_of_all_tokens_is_built(monkeypatch):
    """The packed operation does the work, not the reference over a map of all tokens."""

    whole_maps = []
    reference = reference_attention

    def noted(*args, **options):
        whole_maps.append(args)
        return reference(*args, **options)

    monkeypatch.setattr("saobp.transformers.attention_function.reference_attention", noted)
    model = saobp.apply(tiny_model("llama"), "high:0.7")
    with torch.no_grad():
        model(**collated("llama"), use_cache=False)
        model(**collated("llama", return_flash_attn_kwargs=True), use_cache=True)
    assert not whole_maps


@pytest.mark.parametrize("family", ["bert", "llama", "mistral"])
def test_maps_of_packed_texts_are_blocks(family):
    model = saobp.apply(tiny_model(family), "high:0.7")
    batch = collated(family, return_flash_attn_kwargs=True)
    with torch.no_grad():
        returned = model(**batch, output_attentions=True, use_cache=False).attentions
    with torch.no_grad(), record_attention(model) as recorded:
        model(**batch, use_cache=False)
    with torch.no_grad(), record_attention(model) as separate:
        for text in texts():
            model(torch.tensor([text]), use_cache=False)
    for rows, (name, (own,)) in zip(returned, recorded.items(), strict=True):
        torch.testing.assert_close(rows, own)
        blocks = torch.block_diag(*(row[0, 0] for row in separate[name]))
        torch.testing.assert_close(rows[0, 0], blocks, **ROUNDING)


def test_statistics_of_packed_texts_see_their_borders():
    model, found = saobp.apply(tiny_model("llama"), "high:0.7"), []
    with torch.no_grad(), watch(model, lambda call: found.append(inputs_of(call))):
        model(**collated("llama"), use_cache=False)
    expected = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS)).bool()
    assert len(found) == 2
    assert all(torch.equal(heads.visible[0, 0], expected) and heads.padding_mask is None for heads in found)


def test_what_lengths_cannot_mean_is_refused():
    model = saobp.apply(tiny_model("bert"), "high:0.7")
    batch = collated("bert", return_flash_attn_kwargs=True)
    padding = torch.ones_like(batch["input_ids"])
    padding[:, -1] = 0
    with pytest.raises(ValueError, match="contradict each other"):
        model(**batch, attention_mask=padding)
    batch["input_ids"] = batch["input_ids"].expand(2, -1)
    with pytest.raises(ValueError, match="not a batch of 2"):
        model(**batch)


@pytest.mark.parametrize("name", ["shift_labels", "ignore_index", "seq_idx"])
def test_arguments_of_the_loss_are_ignored(name):
    model, batch = saobp.apply(tiny_model("llama"), "high:0.7"), tiny_batch()
    value = -100 if name == "ignore_index" else torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        assert torch.equal(model(**batch, **{name: value}).logits, model(**batch).logits)


@pytest.mark.parametrize("refinement", ["high:0.7", "high:learned"])
def test_trainer_gives_packed_texts_the_gradients_of_separate_ones(refinement, tmp_path):
    def gradients(model):
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model = saobp.apply(tiny_model("llama"), refinement).train()
    total = sum(LENGTHS) - len(LENGTHS)
    for text in texts():
        ids = torch.tensor([text])
        model(ids, labels=ids, num_items_in_batch=total).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=3, max_steps=1, report_to=[], use_cpu=True, learning_rate=0.0
    )
    seen = {}

    class Kept(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            seen.update(gradients(self.model))
            return loss

    data = [{"input_ids": text} for text in texts()]
    Kept(model, arguments, DataCollatorWithFlattening(return_flash_attn_kwargs=True), data).train()
    assert len(strength_parameters(model)) == 2 * (refinement == "high:learned")
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-3, atol=1e-5)
