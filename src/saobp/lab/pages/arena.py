"""The page of the arena at one scale; ``saobp arena`` writes one of any runs."""

from __future__ import annotations

from saobp.lab.arena import HEADERS, power, rows
from saobp.lab.arena_records import settings_of
from saobp.lab.forest import forest
from saobp.lab.result_page import Page
from saobp.lab.results import Results


def arena(results: Results, page: Page) -> None:
    settings = [setting for setting in settings_of(results.records()) if setting.gains()]
    if not settings:
        return
    page.figure("forest", forest(settings), "Paired differences from Original with their 95 % intervals.")
    for setting in settings:
        page.text(f"## {setting.title}")
        page.table(HEADERS, list(rows(setting)))
        page.text(power(setting))
