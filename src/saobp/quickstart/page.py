"""The page of the quickstart: everything in one file, nothing to fetch."""

from __future__ import annotations

import base64
import io
from importlib import resources
from typing import Any

from jinja2 import Environment
from matplotlib.figure import Figure

from saobp.metrics.figures import TITLES
from saobp.quickstart.comparison import STATISTICS, Comparison


def render_page(comparison: Comparison, maps: bytes, dots: bytes, **facts: Any) -> str:
    """The page with its pictures inside; ``facts`` are the other names that the template uses."""
    layer, head, row = comparison.most_moved_row()
    old, new = (look.rows[layer, head, row].tolist() for look in (comparison.before, comparison.after))
    template = resources.files("saobp.quickstart").joinpath("page.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            comparison=comparison,
            layer=layer,
            head=head,
            row=row,
            weights=list(zip(comparison.tokens, old, new, strict=True)),
            largest=max(*old, *new),
            layers=len(comparison.before.rows),
            heads=comparison.before.rows.shape[1],
            numbers=numbers(comparison),
            maps=base64.b64encode(maps).decode(),
            dots=base64.b64encode(dots).decode(),
            **facts,
        )
    )


def numbers(comparison: Comparison) -> list[tuple[str, float, float]]:
    """Name, before and after: means over heads, and the loss."""
    before, after = comparison.before, comparison.after
    means = [(TITLES[name], before.mean(name), after.mean(name)) for name in STATISTICS]
    return [*means, ("loss of masked tokens (nats)", before.loss, after.loss)]


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
