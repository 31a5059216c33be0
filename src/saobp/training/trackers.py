"""Experiment trackers, by Trainer's names."""

from __future__ import annotations

from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK


def trackers(report_to: str) -> list[str]:
    """Names joined by commas, ``all`` for those installed, ``none``. Raises on one that is not available."""
    installed = sorted(get_available_reporting_integrations())
    names = [name.strip() for name in report_to.split(",")]
    if names == ["none"]:
        return []
    if names == ["all"]:
        return installed
    there = ", ".join(installed) or "none"
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(
                f"there is no tracker {name!r} to report to: Trainer knows {known}; installed here: {there}"
            )
        if name not in installed:
            raise ValueError(f"the tracker {name!r} is not installed; installed here: {there}")
    return names
