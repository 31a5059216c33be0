"""Text for the examples: docstrings of Python's own library, as characters."""

from __future__ import annotations

import argparse
import ast
import collections
import pydoc
import textwrap

import torch

PAD, MASK, FIRST = 0, 1, 2
"""Token numbers; characters begin at the last."""


def steps() -> int:
    """``--steps`` of the command line."""
    parser = argparse.ArgumentParser(description="One of the examples.")
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args().steps


def text() -> str:
    """Some ten thousand words."""
    modules = (argparse, ast, collections, pydoc, textwrap)
    return " ".join(" ".join(map(docstrings, modules)).split())


def docstrings(module: object) -> str:
    """Of a module and what it holds."""
    documented = [module, *vars(module).values()]
    return " ".join(one.__doc__ for one in documented if isinstance(getattr(one, "__doc__", None), str))


def rows(length: int = 64) -> tuple[torch.Tensor, int]:
    """The text as token numbers ``[rows, length]``, one per character, and the size of the vocabulary."""
    characters = text()
    vocabulary = {character: FIRST + number for number, character in enumerate(sorted(set(characters)))}
    numbers = torch.tensor([vocabulary[character] for character in characters])
    return numbers[: len(numbers) // length * length].view(-1, length), FIRST + len(vocabulary)


def masked(ids: torch.Tensor, share: float = 0.15) -> dict[str, torch.Tensor]:
    """A batch for masked language modelling: some tokens hidden, labels there and -100 elsewhere."""
    hidden = torch.rand(ids.shape) < share
    return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}
