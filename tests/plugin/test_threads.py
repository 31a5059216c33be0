"""Threads that run one model at a time, as those of a server do."""

from threading import Thread

import pytest
import torch

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import attention_modules


def in_the_middle(model, call):
    """Run ``call`` in another thread once, between the pre-hooks of an attention layer and its attention."""
    _, module = attention_modules(model)[0]
    layer = next(child for child in module.children() if isinstance(child, torch.nn.Linear))

    def run(*_):
        handle.remove()
        thread = Thread(target=call)
        thread.start()
        thread.join()

    handle = layer.register_forward_hook(run)


@pytest.mark.parametrize("refinement", ["high:0.7", "low:0.4,steps=2", "high-key-bias:0.5"])
def test_a_decoding_step_is_not_changed_by_that_of_another_thread(refinement):
    model = saobp.apply(tiny_model("llama"), refinement)
    first, second = (tiny_batch(seed=seed, padding=0)["input_ids"] for seed in (1, 2))
    answers = {}
    with torch.no_grad():
        expected = model(first).logits[:, -1:], model(second).logits[:, -1:]
        caches = [model(ids[:, :-1], use_cache=True).past_key_values for ids in (first, second)]

        def other():
            with torch.no_grad():
                answers["other"] = model(second[:, -1:], past_key_values=caches[1]).logits

        in_the_middle(model, other)
        own = model(first[:, -1:], past_key_values=caches[0]).logits
    torch.testing.assert_close(own, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answers["other"], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("refinement", ["gate", "high:learned+message-gate"])
def test_variants_read_the_inputs_of_their_own_thread(refinement):
    model = saobp.apply(tiny_model("bert"), refinement)
    for name, parameter in model.named_parameters():
        if ".saobp." in name:
            torch.nn.init.normal_(parameter)
    first, second = tiny_batch(seed=1), tiny_batch(seed=2)
    with torch.no_grad():
        expected = model(**first).logits
        in_the_middle(model, lambda: model(**second))
        own = model(**first).logits
    assert torch.equal(own, expected)
