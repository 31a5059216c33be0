"""A factor of one's own: rows that look at the same key repel, but a row that is sure is not heard more.

python examples/new_factor.py --steps 50
"""

from __future__ import annotations

import torch
from texts import masked, rows, steps
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import saobp


class Capped(saobp.Factor):
    """Potts repulsion of at most half of a row's weight: a row that is sure is not heard more than twice."""

    def log_messages(self, beliefs: Tensor, strength: Tensor) -> Tensor:
        """What each row tells the others about each key, ``[..., rows, keys]``, as a logarithm."""
        return torch.log1p(torch.expm1(-strength) * beliefs.clamp(max=0.5))


saobp.register_factor("capped", Capped())


def main() -> None:
    torch.manual_seed(0)
    ids, vocabulary = rows()
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(vocab_size=vocabulary, **shape))
    saobp.apply(model, "capped:learned")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps()):
        loss = model(**masked(ids[torch.randint(len(ids), (16,))])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    learned = [p for name, p in model.named_parameters() if "saobp" in name]
    print("strengths:", [[round(one, 4) for one in strength.tolist()] for strength in learned])


if __name__ == "__main__":
    main()
