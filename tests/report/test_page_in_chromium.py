"""The page as a reader meets it, in a real Chromium: from disk, by keyboard, on a phone, in the dark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from browser import HOSTILE, Opened

from saobp import metrics
from saobp.metrics.diagnosis.loading import example_model
from saobp.metrics.health.verdicts import HEALTHY_FROM, HEALTHY_TO
from saobp.propagation.beliefs import propagate
from saobp.propagation.factors import get_factor
from saobp.propagation.graph import FactorGraph
from saobp.report import explorer_data, read_runs, write_report
from saobp.report.explorer import FORMAT, decode_head, encode_head
from saobp.report.server import make_server
from saobp.testing.fake_runs import make_run
from saobp.testing.tiny_models import tiny_model

STATISTICS = ("gtd", "indirect_entropy", "attention_entropy", "sink_mass")
Open = Callable[..., Opened]


def library(
    data: dict[str, Any],
    sentence: int,
    layer: int,
    head: int,
    factor: str,
    strength: float,
    steps: int,
    damping: float,
) -> torch.Tensor:
    """The rows that the library computes from the stored scores."""
    own = data["sentences"][sentence]
    logs = torch.from_numpy(decode_head(own["scores"][layer][head], len(own["tokens"])).copy())
    graph = FactorGraph(visible=logs.isfinite(), causal=data["in_order"][layer])
    scaled = torch.tensor(abs(strength), dtype=torch.float64)
    return propagate(logs, get_factor(factor), scaled, graph, steps=steps, damping=damping).rows


def test_it_opens_from_disk_without_a_word_or_a_request(report: tuple[Path, Any], open_page: Open) -> None:
    opened = open_page(report[0])
    runs = read_runs([report[0].parent / name for name in ("plain <i>run", "high", "sst2")])
    loss = opened.drawn("curve-loss")
    assert [line["meta"]["name"] for line in loss["data"][:2]] == ["plain <i>run", "high"]
    assert loss["data"][0]["name"] == "plain &lt;i&gt;run"
    assert loss["data"][1]["y"] == pytest.approx(runs[1].curves["loss"][0].values, rel=1e-5)
    assert opened.drawn("curve-eval_perplexity")["layout"]["yaxis"]["type"] == "log"
    (heat,) = opened.drawn("map-0")["data"]
    assert heat["z"] == pytest.approx(numpy.array(runs[0].health[-1].statistics["gtd"]), abs=1e-4)
    assert heat["customdata"] == runs[0].health[-1].verdicts
    (band,) = opened.drawn("layers")["layout"]["shapes"]
    assert (band["y0"], band["y1"]) == (HEALTHY_FROM, HEALTHY_TO)
    assert "GTD across layers" in opened.tab.locator("#heads").inner_text()
    assert opened.complaints == []
    assert opened.requests == [report[0].as_uri()]
    assert report[0].stat().st_size < 3_000_000


@pytest.mark.parametrize("model", [0, 1], ids=["bidirectional", "causal"])
def test_numbers_equal_the_librarys(report: tuple[Path, Any], open_page: Open, model: int) -> None:
    opened, data = open_page(report[0]), report[1][model]
    opened.choose("Model", str(model))
    opened.choose("Layer", "1")
    opened.choose("Head", "2")
    for ours, factor, strength, steps, damping in (
        ("potts", "high", 1.0, 1, 0.0),
        ("potts", "high", 2.5, 3, 0.4),
        ("potts", "low", -0.75, 2, 0.0),
        ("key-bias", "high-key-bias", 1.5, 1, 0.0),
        ("listing", "high-listing", 1.5, 1, 0.0),
        ("elemmul", "elemmul", 0.0, 1, 0.0),
        ("elemmul-prior", "elemmul-prior", 0.0, 2, 0.2),
        ("none", "none", 0.0, 1, 0.0),
    ):
        opened.choose("Factor", ours)
        opened.set_slider("strength", strength)
        opened.set_slider("steps", steps)
        opened.set_slider("damping", damping)
        rows = library(data, 0, 1, 2, factor, strength, steps, damping)
        plain = library(data, 0, 1, 2, "none", 0.0, 1, 0.0)
        for statistic in STATISTICS:
            exact = getattr(metrics, statistic)
            assert opened.number(statistic) == pytest.approx(float(exact(rows)), abs=1e-4), (
                factor,
                statistic,
            )
            assert opened.number(statistic, "before") == pytest.approx(float(exact(plain)), abs=1e-4)
    assert opened.complaints == []


def test_sliders_change_the_map_and_the_numbers(report: tuple[Path, Any], open_page: Open) -> None:
    opened = open_page(report[0])
    softmax, refined, gtd = opened.picture(0), opened.picture(1), opened.number("gtd")
    opened.set_slider("strength", 3)
    assert opened.picture(1) != refined
    assert opened.number("gtd") != gtd
    assert "high" in opened.tab.locator(".sign").inner_text()
    opened.set_slider("strength", -1)
    assert "low" in opened.tab.locator(".sign").inner_text()
    opened.set_slider("strength", 0)
    assert opened.number("gtd") == pytest.approx(opened.number("gtd", "before"))
    opened.choose("Second map", "difference")
    opened.set_slider("strength", 2)
    assert opened.picture(1) not in (softmax, refined)
    opened.tab.locator("#own").click()
    opened.settle()
    assert opened.tab.get_by_label("Factor").input_value() == "none"


def test_every_head_is_measured_and_can_be_chosen(report: tuple[Path, Any], open_page: Open) -> None:
    opened, data = open_page(report[0]), report[1][0]
    opened.choose("Model", "0")
    opened.set_slider("strength", 1.0)
    opened.tab.locator(".overview .note").filter(has_text="Healthy heads:").wait_for()
    (heat,) = opened.drawn("overview")["data"]
    rows = library(data, 0, 1, 2, "high", 1.0, 1, 0.0)
    assert heat["z"][1][2] == pytest.approx(float(metrics.gtd(rows)), abs=1e-4)
    box = opened.tab.locator(".overview .nsewdrag").first.bounding_box()
    opened.tab.mouse.click(box["x"] + box["width"] * 2.5 / 4, box["y"] + box["height"] * 1.5 / 2)
    opened.settle()
    assert opened.tab.locator("#explorer").get_by_label("Layer", exact=True).input_value() == "1"
    assert opened.tab.locator("#explorer").get_by_label("Head", exact=True).input_value() == "2"
    (mark,) = opened.drawn("overview")["layout"]["shapes"]
    assert (mark["x0"], mark["y0"]) == (1.5, 0.5)


def test_a_head_that_did_not_fit_cannot_be_chosen(open_page: Open, tmp_path: Path) -> None:
    data = explorer_data(tiny_model("bert"), example_model()[1], ["one two three four"])
    data["sentences"][0]["scores"][1][2:] = [None] * len(data["sentences"][0]["scores"][1][2:])
    opened = open_page(write_report([], tmp_path / "page.html", explorer=data))
    opened.tab.locator(".overview .note").filter(has_text="Healthy heads:").wait_for()
    (heat,) = opened.drawn("overview")["data"]
    assert [[value is None for value in row] for row in heat["z"]] == [
        [False] * 4,
        [False, False, True, True],
    ]
    opened.tab.locator(".overview summary").click()
    assert "not in this page" in opened.tab.locator(".overview td").last.inner_text()
    opened.choose("Layer", "1")
    assert opened.tab.locator("#explorer").get_by_label("Head", exact=True).locator("option").count() == 2
    assert opened.complaints == []


def test_two_hop_paths_between_chosen_tokens(report: tuple[Path, Any], open_page: Open) -> None:
    opened, data = open_page(report[0]), report[1][0]
    opened.choose("Layer", "0")
    opened.choose("Head", "0")
    opened.choose("From", "5")
    opened.choose("to", "1")
    rows = library(data, 0, 0, 0, "none", 0.0, 1, 0.0)
    table = opened.tab.get_by_role("region", name="Paths from")
    shown = table.locator("tr").nth(2).locator("td").first.inner_text()
    assert float(shown) == pytest.approx(float((rows @ rows)[5, 1]), abs=1e-4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_and_no_scheme_overflows(report: tuple[Path, Any], open_page: Open, scheme: str) -> None:
    opened = open_page(report[0], width=1440, scheme=scheme)
    charts = opened.charts()
    for name in charts:
        opened.drawn(name)
    opened.tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    for width in (1440, 820, 390):
        opened.tab.set_viewport_size({"width": width, "height": 900})
        assert opened.overflow() <= 0
        opened.wait_until("(one) => one.clientWidth < innerWidth", ".plot .main-svg")
        assert opened.overflow() <= 0
    back = opened.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in back.removeprefix("rgb(").removesuffix(")").split(","))
    assert (brightness < 150) == (scheme == "dark")
    assert opened.complaints == []


def test_the_button_turns_the_colours_and_print_is_light(report: tuple[Path, Any], open_page: Open) -> None:
    opened = open_page(report[0], scheme="dark")
    dark = opened.picture(0)
    ink = opened.drawn("curve-loss")["layout"]["template"]["layout"]["font"]["color"]
    button = opened.tab.get_by_role("button", name="Colours")
    button.click()
    opened.settle()
    assert button.inner_text() == "Colours: light"
    light = opened.picture(0)
    assert light != dark
    assert opened.drawn("curve-loss")["layout"]["template"]["layout"]["font"]["color"] != ink
    button.click()
    opened.settle()
    assert opened.picture(0) == dark
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.picture(0) == light
    opened.tab.emulate_media(media="print")
    assert opened.overflow() <= 0
    assert not opened.tab.get_by_label("Factor").is_visible()
    opened.tab.emulate_media(media="screen")
    opened.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.picture(0) == dark


def test_hostile_words_are_only_words(report: tuple[Path, Any], open_page: Open) -> None:
    opened = open_page(report[0])
    assert opened.tab.title() == f"Page {HOSTILE}"
    assert opened.tab.locator("h1").inner_text() == f"Page {HOSTILE}"
    assert opened.tab.locator("blockquote").text_content() == HOSTILE
    tokens = opened.tab.locator(".tokens button").all_inner_texts()
    assert tokens == report[1][0]["sentences"][0]["tokens"]
    assert {"<", "שלום", "café"} <= set(tokens)
    assert opened.tab.locator("h3", has_text="plain <i>run").count() >= 2
    assert opened.tab.locator("main i, main script").count() == 0
    assert opened.complaints == []


def test_everything_has_a_name_and_answers_the_keyboard(report: tuple[Path, Any], open_page: Open) -> None:
    opened = open_page(report[0])
    nameless = opened.tab.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas, [role=img], [role=region]")]
          .filter((one) => !one.closest("[role=img] *") && !one.closest("[aria-hidden=true]"))
          .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length))
          .map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    named, shown = opened.tab.locator(".plot[role=img][aria-label$='.']"), len(opened.charts())
    named.nth(shown - 1).wait_for(state="attached")  # charts get their names one after the other
    assert named.count() == shown
    opened.drawn("curve-loss")
    chart = opened.tab.locator("#curves .chart").first
    chart.locator(".plot").focus()
    opened.tab.keyboard.press("Home")
    first = chart.locator(".readout").inner_text()
    opened.tab.keyboard.press("ArrowRight")
    assert first.startswith("step 10:")
    assert chart.locator(".readout").inner_text().startswith("step 20:")
    opened.tab.wait_for_timeout(100)
    assert chart.locator(".hoverlayer").text_content().startswith("20plain <i>run : ")
    opened.tab.locator("canvas.map").first.focus()
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        opened.tab.keyboard.press(key)
    opened.settle()
    assert "looks at" in opened.tab.locator(".explorer .readout").inner_text()
    assert opened.tab.locator(".tokens button").nth(1).get_attribute("aria-pressed") == "true"
    chart.locator("summary").click()
    chart.locator("tbody tr").nth(39).wait_for()
    assert chart.locator("tbody tr").count() == 40


def test_a_partial_run_says_what_is_missing(tmp_path: Path, open_page: Open) -> None:
    run = make_run(tmp_path / "run", steps=50)
    (run / "health.jsonl").unlink()
    (run / "metrics.jsonl").write_text("not json\n")
    opened = open_page(write_report([run], tmp_path / "page.html"))
    words = opened.tab.locator(".card .problems").inner_text()
    assert "health.jsonl is missing" in words
    assert "1 of 1 lines of metrics.jsonl" in words
    assert opened.tab.locator("#facts").is_visible()
    assert opened.tab.locator("#heads, #curves, #explorer").count() == 0
    assert opened.complaints == []


def test_many_heads_of_a_long_text_stay_responsive(
    tmp_path: Path, open_page: Open, record_property: Callable[[str, object], None]
) -> None:
    """64 heads and 512 tokens: from a slider to the picture well within what feels immediate."""
    length, random = 512, numpy.random.default_rng(0)
    scores = 2 * random.standard_normal((length, length))
    heads = []
    for head in range(64):
        rows = numpy.roll(scores, head, axis=1)
        rows = rows - numpy.log(numpy.exp(rows).sum(-1, keepdims=True))
        heads.append(encode_head(rows))
    sentence = {
        "text": "long",
        "tokens": [f"t{place}" for place in range(length)],
        "scores": [heads[:32], heads[32:]],
    }
    data = {
        "format": FORMAT,
        "subject": "long",
        "layers": ["0", "1"],
        "in_order": [False, False],
        "refinement": None,
        "strengths": [None, None],
        "sentences": [sentence],
        "left_out": [],
    }
    opened = open_page(write_report([], tmp_path / "page.html", explorer=data, max_bytes=100_000_000))
    opened.tab.locator("[data-statistic=gtd]").first.wait_for()
    took = opened.tab.evaluate(
        """async () => {
          const slider = document.getElementById("strength");
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          const times = [];
          for (const value of [0.5, 0.7, 0.9, 1, -1, 0.3, 0.8]) {
            const start = performance.now();
            slider.value = value;
            slider.dispatchEvent(new Event("input", { bubbles: true }));
            await frame();
            await frame();
            times.push(performance.now() - start);
          }
          return times.sort((a, b) => a - b);
        }"""
    )
    median = took[len(took) // 2]
    record_property("slider_to_repaint_ms", median)
    print(f"slider to repaint, 512 tokens: median {median:.0f} ms, worst {took[-1]:.0f} ms")
    assert median < 500
    opened.tab.wait_for_selector(".numbers:not([aria-busy])", timeout=20_000)
    logs = torch.from_numpy(decode_head(heads[0], length).copy())
    rows = propagate(logs, get_factor("high"), torch.tensor(0.8, dtype=torch.float64), FactorGraph()).rows
    assert opened.number("gtd") == pytest.approx(float(metrics.gtd(rows)), abs=1e-4)
    assert opened.complaints == []


def test_a_typed_sentence_is_explored(open_page: Open) -> None:
    model, tokenizer = tiny_model("gpt2"), example_model()[1]
    server = make_server(
        lambda text: explorer_data(model, tokenizer, [text], max_tokens=16),
        subject="tiny <b>model</b>", characters=400, tokens=16,
    )  # fmt: skip
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        opened = open_page(address)
        opened.tab.get_by_label("Sentence", exact=True).first.fill("<i>one</i> two three")
        opened.tab.get_by_role("button", name="Look").click()
        opened.tab.locator(".tokens button").first.wait_for()
        assert "two" in opened.tab.locator(".tokens button").all_inner_texts()
        opened.tab.get_by_label("Sentence", exact=True).first.fill("word " * 60)
        opened.tab.keyboard.press("Enter")
        opened.tab.get_by_text("Sentence 1 is cut to its first 16 tokens.").first.wait_for()
        assert opened.tab.locator(".tokens button").count() == 16
        assert opened.tab.locator("#sentence option").count() == 2
        assert set(opened.requests) == {address, f"{address}attention"}
        assert opened.complaints == []
    finally:
        server.shutdown()
        server.server_close()
