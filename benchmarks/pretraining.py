"""Tokens per second of pretraining against plain Transformers.

python benchmarks/pretraining.py                                          on a GPU: BERT and GPT-2 mini, ...
python benchmarks/pretraining.py --sizes tiny --device cpu --seconds 0.2  on a CPU, in half a minute
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pretraining_speed import DEFAULT, MODELS, VERSIONS, pretraining_speed
from rich.console import Console


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", help="of BERT, such as mini,small; or models, such as bert-mini,gpt2-mini")
    parser.add_argument("--versions", default=",".join(DEFAULT), help=f"some of {', '.join(VERSIONS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn of one version")
    parser.add_argument("--limit", type=float, default=480.0, help="begin no further model after so many")
    parser.add_argument("--out", type=Path, help="folder for the Markdown and CSV files")
    given = parser.parse_args(arguments)
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; try --device cpu --sizes tiny")
    if given.device == "cpu" and torch.cuda.is_available():
        parser.error("with a GPU in the machine Trainer uses it: hide it by CUDA_VISIBLE_DEVICES= in front")
    versions = given.versions.split(",")
    for version in versions:
        if version not in VERSIONS:
            parser.error(f"unknown version {version!r}: choose some of {', '.join(VERSIONS)}")
    sizes = given.sizes.split(",") if given.sizes else list(MODELS)
    table = pretraining_speed(
        names=[size if "-" in size else f"bert-{size}" for size in sizes],
        versions=versions,
        compiled=given.device == "cuda",
        turns=given.turns,
        seconds=given.seconds,
        limit=given.limit,
        notify=lambda line: print(line, flush=True),
        save=lambda table: None if given.out is None else table.write(given.out),
    )
    Console(width=200).print(table.markdown(), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
