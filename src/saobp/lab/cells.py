"""Tables and numbers as the pages of the lab print them, and where runs were made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from saobp.lab.methods import METHODS
from saobp.lab.statistics import Gain, Spread, spread

WHOLE_HASH = re.compile(r"\b[0-9a-f]{40}\b")


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
    lines += [f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def three_digits(value: float) -> str:
    """Three significant digits."""
    if value == 0 or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def paper_digits(values: Iterable[float], digits: int) -> int:
    """Decimals of the paper's values, at least two and at most ours."""
    printed = [f"{value:.{digits}f}".rstrip("0").partition(".")[2] for value in values]
    return min(digits, max([2, *map(len, printed)]))


def format_spread(summary: Spread | None, digits: int) -> str:
    """``12.30 ± 0.40 (3)``: mean, standard deviation, seeds."""
    if summary is None:
        return "not run"
    if summary.deviation is None:
        return f"{summary.mean:.{digits}f} (1)"
    return f"{summary.mean:.{digits}f} ± {summary.deviation:.{digits}f} ({summary.seeds})"


def format_means(measures: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """``perplexity: 300 (Original), 303 (High); ...``, over the seeds of each method."""
    parts = []
    for measure, methods in measures.items():
        spreads = {key: spread(by_seed.values()) for key, by_seed in methods.items()}
        means = [
            f"{three_digits(summary.mean)} ({METHODS[key].title})"
            for key, summary in spreads.items()
            if summary is not None
        ]
        if means:
            parts.append(f"{measure}: {', '.join(means)}")
    return "; ".join(parts)


def format_gain(gain: Gain | None, digits: int) -> str:
    if gain is None:
        return ""
    if gain.low is None or gain.high is None:
        return f"{gain.difference:+.{digits}f}"
    return f"{gain.difference:+.{digits}f} [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}]"


def format_percent(gain: Gain) -> str:
    """``-1.4 % [-2.3, -0.5]``, with another digit where an end would be printed as zero."""
    if gain.low is None or gain.high is None:
        return f"{gain.difference:+.1f} %"
    digits = 2 if min(abs(gain.low), abs(gain.high)) < 0.05 else 1
    return f"{gain.difference:+.{digits}f} % [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}]"


def format_verdict(gain: Gain | None, summary: Spread | None) -> str:
    if gain is None:
        return "not run" if summary is None else "no pair"
    if gain.verdict == "undecided":
        return f"undecided ({gain.pairs} pair{'s' if gain.pairs > 1 else ''})"
    return "no gain (within the spread)" if gain.verdict == "no gain" else gain.verdict


def made_on(records: Sequence[Mapping[str, Any]]) -> str:
    """Hardware and commits of the runs, and a warning where they were not trained on the same texts."""
    hardware = Counter(str(record.get("environment", {}).get("hardware", "unknown")) for record in records)
    commits = Counter(_shortened(str(record.get("commit", "unknown"))) for record in records)
    texts: dict[str, set[str]] = {}
    for record in records:
        for name, checksum in record.get("data", {}).items() if record["kind"] == "pretrain" else ():
            texts.setdefault(f"{record['run'].split('-')[0]}, {name}", set()).add(checksum)
    differing = sorted(name for name, checksums in texts.items() if len(checksums) > 1)
    warning = (
        f" **Runs were not all trained on the same texts: {'; '.join(differing)}.**" if differing else ""
    )
    return f"Made on {_counted(hardware)}, at commit {_counted(commits)}.{warning}"


def _shortened(commit: str) -> str:
    """A commit with the first seven digits of its hash."""
    return WHOLE_HASH.sub(lambda found: found[0][:7], commit)


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in found.most_common()) or "nothing"
