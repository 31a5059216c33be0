"""How far the dense form of several steps is from exact loopy belief propagation.

    python -m saobp.testing.dense_gap

prints the table of ``docs/operation.md`` in some seconds on one core.
"""

from __future__ import annotations

import torch

from saobp.functional import refine
from saobp.refinement import Refinement
from saobp.testing.oracles import high, loopy_propagation, potential_matrix

LENGTHS = (4, 8, 16, 32)
STRENGTHS = (0.05, 0.2, 1.0, 2.0)
SEEDS = 4


def dense_gap(length: int, strength: float, steps: int) -> tuple[float, float]:
    """Mean total variation between dense and exact beliefs, and between exact beliefs and the prior.

    Rows are softmaxes of normal scores with standard deviation 2, bidirectional, factor ``high``.
    """
    apart, moved = 0.0, 0.0
    for seed in range(SEEDS):
        scores = 2 * torch.randn(
            length, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        prior = scores.softmax(-1)
        exact, _ = loopy_propagation(prior, potential_matrix(high(strength), length), steps)
        dense = refine(prior, Refinement("high", strength, steps=steps))
        apart += float((dense - exact).abs().sum(-1).mean()) / 2
        moved += float((exact - prior).abs().sum(-1).mean()) / 2
    return apart / SEEDS, moved / SEEDS


def main() -> None:
    """Print the table in Markdown."""
    print("| steps | strength | " + " | ".join(f"length {length}" for length in LENGTHS) + " |")
    print("|---|---|" + "---|" * len(LENGTHS))
    for steps in (1, 2, 3):
        for strength in STRENGTHS:
            cells = [dense_gap(length, strength, steps) for length in LENGTHS]
            print(
                f"| {steps} | {strength} | "
                + " | ".join(f"{gap:.1e} of {moved:.1e}" for gap, moved in cells)
                + " |"
            )


if __name__ == "__main__":
    main()
