"""The page's charts in a real Chromium: drawn by plotly, moved by controls, printed, and without a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from browser import Opened

from saobp.metrics.diagnosis.diagnose import diagnose
from saobp.metrics.diagnosis.loading import example_model
from saobp.report import write_report
from saobp.report.diagnosis_page import write_diagnosis, write_diagnosis_page
from saobp.testing.fake_runs import make_run

Open = Callable[..., Opened]


def test_words_and_tables_need_no_script_and_no_library(report: tuple[Path, Any], chromium: Any) -> None:
    context = chromium.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(report[0].as_uri())
    assert "heads are healthy" in tab.locator("#summary").text_content()
    assert tab.locator("#facts tbody tr").count() > 20
    context.close()


def test_kinds_of_heads_are_in_map_and_table_and_explained(tmp_path: Path, open_page: Open) -> None:
    model, tokenizer = example_model()
    found = diagnose(model, tokenizer, ["some words " * 12], subject="planted", statistics=["gtd"])
    write_diagnosis([found], tmp_path)
    opened = open_page(write_diagnosis_page([found], tmp_path, "some words"))
    (heat,) = opened.drawn("map-0")["data"]
    kinds = ["", "self", "first token", "previous token", ""]
    words = [
        ", ".join(filter(None, [head.verdict, kind])) for head, kind in zip(found.heads, kinds, strict=True)
    ]
    assert heat["customdata"] == [words]
    opened.tab.get_by_text("Every head of planted").first.click()
    table = opened.tab.get_by_role("table", name="Every head of planted")
    column = table.locator("thead th").all_inner_texts().index("kind")
    rows = table.locator("tbody tr").all()
    shown = [row.locator("th, td").nth(column).inner_text() for row in rows]
    assert shown == ["\N{EN DASH}", "self", "first token", "previous token", "\N{EN DASH}"]
    table.locator(".term", has_text="previous token").hover()
    assert opened.tab.locator("#tip").inner_text() == "It looks at the token before."
    assert opened.complaints == []


def test_an_old_browser_is_told_and_has_the_rest(report: tuple[Path, Any], chromium: Any) -> None:
    context = chromium.new_context()
    context.add_init_script("delete globalThis.DecompressionStream")
    opened = Opened(context.new_page())
    opened.open(report[0].as_uri())
    opened.tab.locator("html[data-charts=none]").wait_for()
    assert "cannot unpack the library" in opened.tab.locator("#no-charts").inner_text()
    chart = opened.tab.locator("#curves .chart").first
    chart.locator("summary").click()
    chart.locator("tbody tr").nth(39).wait_for()
    assert opened.number("gtd") > 0
    assert opened.complaints == []
    context.close()


def test_runs_can_be_hidden_and_axes_changed(report: tuple[Path, Any], open_page: Open) -> None:
    opened = open_page(report[0])
    assert len(opened.drawn("curve-loss")["data"]) == 5
    opened.tab.get_by_role("button", name="sst2").click()
    before = opened.drawn("curve-loss")["data"]
    assert [line["meta"]["name"] for line in before] == ["plain <i>run", "high"]
    opened.tab.get_by_label("Smooth").fill("0.9")
    after = opened.drawn("curve-loss")["data"][0]["y"]
    assert numpy.diff(after).std() < numpy.diff(before[0]["y"]).std()
    opened.tab.get_by_label("x axis", exact=True).select_option("tokens")
    loss = opened.drawn("curve-loss")
    assert loss["layout"]["xaxis"]["title"]["text"] == "tokens"
    assert loss["data"][0]["x"][:2] == [10 * 256 * 128, 20 * 256 * 128]
    steps = opened.tab.locator("#heads").get_by_label("Step", exact=True)
    last = opened.drawn("map-0")["data"][0]["z"]
    steps.fill("0")
    assert "step 0" in opened.tab.locator("#heads h3").first.inner_text()
    assert opened.drawn("map-0")["data"][0]["z"] != last
    opened.tab.locator("#heads").get_by_label("Statistic").select_option("strengths")
    assert opened.tab.locator("#heads .empty:visible").inner_text() == "This run has no learned strength (λ)."
    (heat,) = opened.drawn("map-1")["data"]
    assert heat["zmin"] == -heat["zmax"]
    assert opened.complaints == []


def test_long_names_and_short_runs_beside_long_ones(tmp_path: Path, open_page: Open) -> None:
    runs = [make_run(tmp_path / ("name_" * 30), steps=500), make_run(tmp_path / "short", steps=50)]
    opened = open_page(write_report(runs, tmp_path / "page.html"), width=390)
    assert opened.overflow() <= 0
    opened.drawn("curve-loss")
    chart = opened.tab.locator("#curves .chart").first
    assert chart.locator(".reading").count() == 2
    chart.locator(".plot").focus()
    opened.tab.keyboard.press("End")
    assert chart.locator(".readout").inner_text().startswith("step 500: name_")
    assert "short" not in chart.locator(".readout").inner_text()
    assert opened.overflow() <= 0


def test_a_printed_page_holds_all_of_it(report: tuple[Path, Any], open_page: Open) -> None:
    opened = open_page(report[0], scheme="dark")
    opened.tab.locator("html[data-charts=ready]").wait_for(timeout=20_000)
    opened.tab.set_viewport_size({"width": 695, "height": 980})
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.tab.emulate_media(media="print")
    assert opened.tab.locator(".plot:not([hidden]) .main-svg:first-child").count() == len(opened.charts())
    assert opened.drawn("curve-loss")["layout"]["template"]["layout"]["font"]["color"] == "#59636e"
    ends = "[one, one.querySelector('.main-svg')].map((part) => part.getBoundingClientRect().right)"
    plots = opened.tab.locator(".plot").evaluate_all(f"(all) => all.map((one) => {ends})")
    assert all(drawn <= plot + 1 for plot, drawn in plots)
    sheet, panel = (
        opened.tab.locator(place).first.evaluate("(one) => one.getBoundingClientRect().right")
        for place in (".arc-sheet", "main")
    )
    assert sheet <= panel
    assert opened.overflow() <= 0
