"""Prints the table of benchmarks/results/transformers-own-tests.md from the record of a run.

pytest -m slow tests/plugin/test_transformers_own.py --junitxml=record.xml
python tests/plugin/own_tests_table.py record.xml
"""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

CANNOT = "cannot apply: "


def main(path: str) -> None:
    outcomes: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        family = case.get("classname", "").rpartition(".")[2]
        if family.endswith("Test"):
            outcomes.setdefault(family.removesuffix("Test"), Counter())[_outcome(case)] += 1
    kinds = ("passed", "failed", "cannot apply", "skipped by Transformers")
    print(f"| family | {' | '.join(kinds)} |\n|{'---|' * (len(kinds) + 1)}")
    for family, counts in outcomes.items():
        print(f"| {family} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    total = sum(outcomes.values(), Counter())
    print(f"| all | {' | '.join(str(total[kind]) for kind in kinds)} |")


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "cannot apply" if skipped.get("message", "").startswith(CANNOT) else "skipped by Transformers"


if __name__ == "__main__":
    main(sys.argv[1])
