"""The map in docs/design.md is that of the code: its files exist, its layers are the contract's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
LAYERS, WALK = PAGE.split("## The shape of the code")[1].split("### One sentence")


def test_every_file_on_the_way_of_a_sentence_exists_and_is_met_once() -> None:
    met = re.findall(r"`([\w/]+\.py)`", WALK.split("## Decisions")[0])
    assert len(met) > 20
    assert [name for name in met if not (ROOT / "src/saobp" / name).is_file()] == []
    assert len(set(met)) == len(met)


def test_layers_of_the_page_stand_in_the_order_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [line.split(" | ") for line in reversed(contracts[0]["layers"])]
    rank = {name.strip("()"): number for number, line in enumerate(layers) for name in line}
    first_cells = re.findall(r"^\| ([^|]*`[^|]*) \|", LAYERS, re.MULTILINE)
    named = [re.findall(r"`(\w+)(?:/|\.py)`", cell) for cell in first_cells]
    assert {name for cell in named for name in cell} | {"_register_on_import", "__main__"} == set(rank)
    order = [rank[name] for cell in named for name in cell]
    assert order == sorted(order)
