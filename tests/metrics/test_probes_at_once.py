"""Several probes of a model, and several threads that run it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from returned_families import tiny

import saobp
from saobp.testing.tiny_models import tiny_batch, tiny_model


def test_probes_inside_each_other() -> None:
    model, batch = tiny("deberta-v2"), tiny_batch()
    with torch.no_grad(), saobp.probe(model) as outer:
        model(**batch)
        with saobp.probe(model) as inner, saobp.probe(model.deberta) as part:
            assert list(model(**batch)) == ["logits"]
        model(**batch)
    assert (outer.forwards, inner.forwards, part.forwards) == (3, 1, 1)
    for health in (inner, part):
        found, expected = (list(one.values("gtd").values()) for one in (health, outer))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["deberta-v2", "bert"])
def test_a_forward_of_another_thread_meanwhile_is_left_alone(family: str) -> None:
    model = tiny_model("bert").eval() if family == "bert" else tiny(family)
    batch = tiny_batch()
    with torch.no_grad(), ThreadPoolExecutor(1) as pool, saobp.probe(model) as health:
        beside = []

        def start_another(*_: Any) -> None:
            if not beside:
                beside.append(pool.submit(torch.no_grad()(model), **batch))
                beside[0].result()

        handle = model.base_model.encoder.register_forward_pre_hook(start_another)
        model(**batch)
        handle.remove()
        model(**batch)
    assert list(beside[0].result()) == ["logits"]
    assert health.forwards == 2
    assert {head.texts for head in health.heads()} == {4}
