"""Do two methods give the same heads the same strengths? Rank correlations over heads of recorded runs.

    python benchmarks/compare_strengths.py results/arena/runs.json --seeds 11,12,13,14,15,16

Within a seed (the same initial weights) and, to compare, between different seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from saobp.lab.arena_records import method_of, title_of
from saobp.lab.cells import markdown_table
from saobp.storage.json_files import read_json

HEADERS = ("methods", "seeds", "mean strengths", "correlation, same seed", "different seeds, mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--seeds", help="of these alone: 11,12,13")
    given = parser.parse_args()
    seeds = {int(seed) for seed in given.seeds.split(",")} if given.seeds else None
    records = [one for one in read_json(given.records) if seeds is None or one["recipe"]["seed"] in seeds]
    print(markdown_table(HEADERS, list(rows(strengths_of(records)))))


def strengths_of(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, np.ndarray]]:
    """Final strengths of all heads by method and seed, of runs that have some."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for record in records:
        values = np.array(record["result"].get("strengths") or [0.0]).ravel()
        if values.any():
            found.setdefault(method_of(record["recipe"]), {})[record["recipe"]["seed"]] = values
    return found


def rows(strengths: Mapping[str, Mapping[int, np.ndarray]]) -> Iterator[list[str]]:
    """A row for each pair of methods that have two seeds or more in common."""
    for one, other in combinations(strengths, 2):
        first, second = strengths[one], strengths[other]
        seeds = [seed for seed in first if seed in second]
        if len(seeds) < 2:
            continue
        own = [correlation(first[seed], second[seed]) for seed in seeds]
        apart = [correlation(first[a], second[b]) for a in seeds for b in seeds if a != b]
        means = " and ".join(f"{np.mean([runs[seed] for seed in seeds]):.2f}" for runs in (first, second))
        yield [
            f"{title_of(one)}; {title_of(other)}",
            str(len(seeds)),
            means,
            f"{min(own):.2f} to {max(own):.2f}",
            f"{np.mean(apart):.2f}",
        ]


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's, over heads ``[heads of all layers]``."""
    return float(stats.spearmanr(first, second).statistic)


if __name__ == "__main__":
    main()
