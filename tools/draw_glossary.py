"""Draw the pictures of docs/glossary.md: made-up heads of eight tokens, with their statistics.

python tools/draw_glossary.py docs/images
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from saobp import metrics

LENGTH = 8
PLACE = torch.arange(LENGTH)
SIZE = (8.4, 3.0)
plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "figure.dpi": 110})


def head(scores: Tensor) -> Tensor:
    return scores.double().softmax(-1)


def previous() -> Tensor:
    """Each token attends to the one before, the first to the last."""
    return head(40.0 * ((PLACE[:, None] - 1) % LENGTH == PLACE))


def to_first() -> Tensor:
    return head(40.0 * (PLACE == 0).expand(LENGTH, LENGTH))


def through_one() -> Tensor:
    """All to the first token, which itself attends to all alike."""
    return head(40.0 * ((PLACE == 0) & (PLACE[:, None] > 0)))


def even() -> Tensor:
    return head(torch.zeros(LENGTH, LENGTH))


def indirect(attention: Tensor, beta: float = 0.9, hops: int = 4) -> Tensor:
    """G: paths of two to four hops, longer ones weighing less."""
    return sum(
        (beta ** (t - 1) * torch.matrix_power(attention, t) for t in range(2, hops + 1)), torch.zeros(())
    )


def show(axis: Axes, shown: Tensor, title: str, high: float | None = None) -> None:
    axis.imshow(shown, cmap="Blues", vmin=0, vmax=high)
    axis.set_title(title)
    axis.set_xticks([])
    axis.set_yticks([])


def draw_gtd(folder: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(6.4, 4.6), layout="constrained")
    heads = {
        "one token, which looks at all": through_one(),
        "the token before": previous(),
        "all alike": even(),
    }
    for column, (name, attention) in zip(axes.T, heads.items(), strict=True):
        paths = indirect(attention)
        direct_share, indirect_share = attention.norm().item() ** 2, paths.norm().item() ** 2
        gtd = metrics.gtd(attention).item()
        assert math.isclose(gtd, indirect_share / (direct_share + indirect_share), rel_tol=1e-6)
        show(column[0], attention, f"{name}\nGTD {gtd:.2f}")
        show(column[1], paths, f"norm(A)² {direct_share:.1f}, norm(G)² {indirect_share:.1f}")
    axes[0, 0].set_ylabel("direct: A")
    axes[1, 0].set_ylabel("indirect: G")
    save(figure, folder, "gtd")


def draw_indirect_entropy(folder: Path) -> None:
    figure, axes = plt.subplots(1, 4, figsize=SIZE, layout="constrained")
    heads = {"all to the first token": to_first(), "the token before": previous()}
    for pair, (name, attention) in zip((axes[:2], axes[2:]), heads.items(), strict=True):
        paths = indirect(attention)
        direct = metrics.attention_entropy(attention).item()
        show(pair[0], attention, f"{name}\nattention entropy {abs(direct):.2f}", 1)
        over = metrics.indirect_entropy(attention).item()
        show(
            pair[1],
            paths / paths.sum(-1, keepdim=True),
            f"where paths end\nindirect entropy {abs(over):.2f}",
            1,
        )
    save(figure, folder, "indirect-entropy")


def draw_sink(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(LENGTH, LENGTH, generator=generator)
    figure, axes = plt.subplots(
        2, 2, figsize=(6.4, 3.9), layout="constrained", sharex="col", height_ratios=[1, 2.2]
    )
    for column, (name, scores) in zip(
        axes.T, {"a sink": noise + 3.0 * (PLACE == 0), "no sink": noise}.items(), strict=True
    ):
        attention = head(scores)
        received = attention.mean(0)
        colors = ["tab:orange" if one == received.max() else "tab:blue" for one in received]
        column[0].bar(PLACE, received, color=colors)
        column[0].set(title=f"{name}: sink mass {metrics.sink_mass(attention).item():.2f}", ylim=(0, 0.8))
        column[1].imshow(attention, cmap="Blues", vmin=0, aspect="auto")
        column[1].set(xlabel="key", yticks=[])
    axes[0, 0].set_ylabel("received")
    axes[1, 0].set_ylabel("rows")
    save(figure, folder, "sink")


def draw_factor(folder: Path, strength: float = 1.0) -> None:
    figure, (graph, high, low) = plt.subplots(
        1, 3, figsize=SIZE, layout="constrained", width_ratios=[1.5, 1, 1]
    )
    rows = {"row 1": (0.0, 0.0), "row 2": (2.0, 0.0), "row 3": (1.0, 1.6)}
    names = list(rows)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        (x, y), (u, v) = rows[names[one]], rows[names[other]]
        graph.plot([x, u], [y, v], color="grey", zorder=1)
        graph.plot((x + u) / 2, (y + v) / 2, "s", color="tab:orange", markersize=16, zorder=2)
        graph.text((x + u) / 2, (y + v) / 2, "ψ", ha="center", va="center", zorder=3)
    for name, (x, y) in rows.items():
        graph.plot(x, y, "o", color="tab:blue", markersize=34, zorder=2)
        graph.text(x, y, name, ha="center", va="center", color="white", fontsize=8, zorder=3)
    graph.set(title="a factor joins every two rows", xlim=(-0.5, 2.5), ylim=(-0.5, 2.1))
    graph.axis("off")
    for axis, name, sign in ((high, "high", -1), (low, "low", 1)):
        weight = math.exp(sign * strength)
        psi = torch.ones(4, 4) + (weight - 1) * torch.eye(4)
        axis.imshow(psi, cmap="PuOr", vmin=-0.9, vmax=2.9)
        for i in range(4):
            for k in range(4):
                axis.text(
                    k,
                    i,
                    f"{psi[i, k]:.2g}",
                    ha="center",
                    va="center",
                    color="white" if psi[i, k] > 2 else "black",
                )
        words = "repel" if sign < 0 else "attract"
        axis.set(title=f"ψ of {name}: same keys {words}", xlabel="key of one row", xticks=[], yticks=[])
    high.set_ylabel("key of the other")
    save(figure, folder, "factor")


def save(figure: plt.Figure, folder: Path, name: str) -> None:
    figure.savefig(folder / f"glossary-{name}.png", bbox_inches="tight", pad_inches=0.06)
    plt.close(figure)


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("give the folder that the pictures go to, as in: python tools/draw_glossary.py docs/images")
    plt.switch_backend("agg")
    for draw in (draw_gtd, draw_indirect_entropy, draw_sink, draw_factor):
        draw(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
