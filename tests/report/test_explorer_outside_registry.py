"""The explorer of a model outside the attention registry, from the maps that it returns."""

from __future__ import annotations

import numpy
import torch
from transformers import MegatronBertConfig, MegatronBertModel

from saobp.metrics.diagnosis.loading import example_model
from saobp.report.explorer import decode_head, explorer_data, is_explorer


def test_its_maps_are_stored_as_scores() -> None:
    torch.manual_seed(0)
    config = MegatronBertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        initializer_range=0.5,
    )  # fmt: skip
    model, tokenizer = MegatronBertModel(config).eval(), example_model()[1]
    sentence = "one two three four"
    data = explorer_data(model, tokenizer, [sentence])
    assert is_explorer(data)
    assert data["layers"] == ["layer.0", "layer.1"]
    assert data["in_order"] == [False, False]
    with torch.no_grad():
        maps = model(tokenizer(sentence, return_tensors="pt")["input_ids"], output_attentions=True).attentions
    for layer, heads in enumerate(data["sentences"][0]["scores"]):
        for head, stored in enumerate(heads):
            rows = numpy.exp(decode_head(stored, 4))
            numpy.testing.assert_allclose(rows, maps[layer][0, head].numpy(), atol=1e-4)
