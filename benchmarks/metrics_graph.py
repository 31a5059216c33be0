"""Clustering and betweenness of many token graphs against networkx.

python benchmarks/metrics_graph.py                      65,536 graphs of 40 nodes
python benchmarks/metrics_graph.py --graphs 512         a few seconds
"""

from __future__ import annotations

import argparse
import platform
import time

import networkx
import numpy
import torch

from saobp import metrics


def random_maps(graphs: int, length: int, sharpness: float) -> torch.Tensor:
    """Half plain, half causal maps of which the graphs range from sparse to complete."""
    scores = torch.randn(graphs, length, length, generator=torch.Generator().manual_seed(0))
    scores *= torch.linspace(1, sharpness, graphs)[:, None, None]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores[::2].masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


def by_networkx(attention: torch.Tensor, tau: float) -> tuple[float, float]:
    weights = ((attention + attention.T) / 2).numpy()
    weights = numpy.where((weights > tau) & ~numpy.eye(len(weights), dtype=bool), weights, 0)
    graph = networkx.from_numpy_array(weights)
    between = networkx.betweenness_centrality(graph, normalized=False)
    return networkx.average_clustering(graph, weight="weight"), float(numpy.mean(list(between.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=65_536)
    parser.add_argument("--nodes", type=int, default=40)
    parser.add_argument("--sharpness", type=float, default=6.0, help="spread of scores in the sharpest map")
    parser.add_argument("--networkx", type=int, default=200, help="graphs given to networkx")
    options = parser.parse_args()
    maps = random_maps(options.graphs, options.nodes, options.sharpness)
    print(
        platform.processor() or platform.machine(),
        f"{torch.get_num_threads()} threads, torch {torch.__version__}",
    )

    seconds = {}
    for statistic in (metrics.clustering, metrics.betweenness):
        start = time.perf_counter()
        values = statistic(maps, nodes=options.nodes)
        name = statistic.__name__
        seconds[name] = time.perf_counter() - start
        print(f"{name:12} {options.graphs} graphs {seconds[name]:8.2f} s  mean {values.mean():.4f}")
    ours = sum(seconds.values()) / options.graphs

    some = torch.linspace(0, options.graphs - 1, min(options.networkx, options.graphs)).long()
    start = time.perf_counter()
    truth = torch.tensor([by_networkx(maps[i], 1e-4) for i in some])
    theirs = (time.perf_counter() - start) / len(some)
    mine = torch.stack(
        [
            metrics.clustering(maps[some], nodes=options.nodes),
            metrics.betweenness(maps[some], nodes=options.nodes),
        ],
        1,
    )
    minutes = theirs * options.graphs / 60
    print(f"networkx     {len(some)} graphs, {theirs * 1e3:.2f} ms each, {minutes:.1f} min for all")
    print(f"ratio        {theirs / ours:.0f}x   largest difference {float((mine - truth).abs().max()):.1e}")


if __name__ == "__main__":
    main()
