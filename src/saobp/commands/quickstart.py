"""``saobp quickstart``."""

from __future__ import annotations


def quickstart() -> None:
    """Refine a small model's attention on real text and draw it before and after."""
