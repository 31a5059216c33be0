"""A hand-written encoder with refined attention, trained by a plain loop.

python examples/own_model.py --steps 100
"""

from __future__ import annotations

import torch
from texts import masked, rows, steps
from torch import Tensor, nn

import saobp


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = saobp.nn.SelfAttention(width, heads, "high:learned")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        states = states + self.attention(self.before_attention(states))
        return states + self.mlp(self.before_mlp(states))


class Encoder(nn.Module):
    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads=4) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Tokens ``[batch, length]`` to logits ``[batch, length, vocabulary]``."""
        states = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


def main() -> None:
    torch.manual_seed(0)
    ids, vocabulary = rows()
    model = Encoder(vocabulary)
    strengths = [parameter for name, parameter in model.named_parameters() if "strength" in name]
    others = [parameter for name, parameter in model.named_parameters() if "strength" not in name]
    groups = [{"params": others}, {"params": strengths, "lr": 1e-2, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for step in range(steps()):
        batch = masked(ids[torch.randint(len(ids), (16,))])
        logits = model(batch["input_ids"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print("strengths:", [[round(one, 3) for one in strength.tolist()] for strength in strengths])


if __name__ == "__main__":
    main()
