"""A factor registered by a user works in a model, in training and in the metrics."""

from __future__ import annotations

import torch
from torch import Tensor

import saobp
from saobp import Refinement
from saobp.metrics import gtd
from saobp.testing.tiny_models import tiny_batch, tiny_model
from saobp.transformers import record_attention, strength_parameters


class NearPotts(saobp.Factor):
    """The example of docs/factors.md: keys close to each other count as partly the same."""

    def log_messages(self, beliefs: Tensor, strength: Tensor) -> Tensor:
        place = torch.arange(beliefs.shape[-1], device=beliefs.device)
        closeness = torch.exp(-(place[:, None] - place).abs().to(beliefs) / 2.0)
        least = torch.finfo(beliefs.dtype).eps - 1
        return torch.log1p((beliefs @ torch.expm1(-strength * closeness)).clamp(min=least))


saobp.register_factor("near-potts-in-models", NearPotts())


def test_in_training_its_strengths_learn() -> None:
    model = saobp.apply(tiny_model("bert"), Refinement("near-potts-in-models", "learned")).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = tiny_batch()
    model(**batch).logits.square().sum().backward()
    optimiser.step()
    assert all((strength != 0).any() for strength in strength_parameters(model))


def test_in_the_metrics_its_rows_are_measured() -> None:
    model = saobp.apply(tiny_model("bert"), Refinement("near-potts-in-models", 1.5)).eval()
    batch = tiny_batch(padding=0)
    with torch.no_grad(), record_attention(model) as rows, saobp.probe(model) as health:
        model(**batch)
    plain = saobp.remove(model)
    with torch.no_grad(), record_attention(plain) as before:
        plain(**batch)
    measured = health.values("gtd")
    for name, (refined,) in rows.items():
        assert not torch.allclose(refined, before[name][0], atol=1e-4)
        torch.testing.assert_close(
            measured[name], gtd(refined).mean(0), atol=1e-5, rtol=1e-4, check_dtype=False
        )
