"""Does a method still gain beside another, or do both gain the same? Differences of paired differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from saobp.lab.statistics import Gain, paired_gain

Losses = Mapping[str, Mapping[int, float]]
HEADERS = ("method", "beside", "alone", "beside it", "difference of the two [95 % interval]", "together")


def combinations(losses: Losses, original: str) -> Iterator[tuple[str, str, str]]:
    """``(first, second, both)``: methods trained alone and together, as in ``a``, ``b``, ``a+b``.

    A sum of three is divided at either plus sign.
    """
    for both in losses:
        parts = both.split("+")
        for count in range(1, len(parts)):
            first, second = "+".join(parts[:count]), "+".join(parts[count:])
            if first in losses and second in losses and original in losses:
                yield first, second, both


def two_by_two(
    losses: Losses, original: str, names: tuple[str, str, str]
) -> tuple[Gain | None, Gain | None, Gain | None, Gain | None]:
    """Gains of the first method alone and beside the second, their difference, and that of both together.

    Only seeds that all four methods have, so that the four numbers fit together.
    """
    first, second, both = (losses[name] for name in names)
    plain = losses[original]
    seeds = [seed for seed in both if seed in first and seed in second and seed in plain]
    alone = {seed: first[seed] - plain[seed] for seed in seeds}
    beside = {seed: both[seed] - second[seed] for seed in seeds}
    together = {seed: both[seed] - plain[seed] for seed in seeds}
    nothing = dict.fromkeys(seeds, 0.0)
    pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]] = (
        (alone, nothing),
        (beside, nothing),
        (beside, alone),
        (together, nothing),
    )
    found = [paired_gain(own, base, higher_is_better=False) for own, base in pairs]
    return found[0], found[1], found[2], found[3]
