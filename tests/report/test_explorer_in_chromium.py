"""What a stranger meets first: one sentence, one picture, and the explorer, on one page for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import NO_NODE, Opened, node_path, run_node

from saobp.metrics.diagnosis.loading import example_model
from saobp.propagation.beliefs import propagate
from saobp.propagation.factors import get_factor
from saobp.propagation.graph import FactorGraph
from saobp.report import explorer_data, write_explorer, write_report
from saobp.report.explorer import decode_head
from saobp.testing.fake_runs import make_run
from saobp.testing.tiny_models import tiny_model
from saobp.transformers import apply

SENTENCES = ["one two three four five six seven eight nine ten eleven twelve", "a b c d e f g"]
HIGH = {"factor": "high", "strength": 0.2, "steps": 1, "damping": 0.0, "future": "strict"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("explorer")
    runs = [
        make_run(root / "plain", layers=2, heads=4, steps=50, measured=2),
        make_run(root / "high", layers=2, heads=4, steps=50, measured=2, refinement=HIGH),
    ]
    models = [tiny_model("bert"), apply(tiny_model("bert"), "high:0.2")]
    explorers = [explorer_data(model, example_model()[1], SENTENCES) for model in models]
    for run, data in zip(runs, explorers, strict=True):
        write_explorer(data, run)
    return write_report(runs, root / "report.html"), explorers


@pytest.fixture(scope="module")
def tab(chromium: Any, written: tuple[Path, Any]) -> Iterator[Opened]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    opened = Opened(context.new_page())
    opened.open(written[0].as_uri())
    yield opened
    context.close()


def chosen(opened: Opened) -> tuple[str, str, str]:
    explorer = opened.tab.locator("#explorer")
    names = ("Layer", "Head", "Sentence")
    layer, head, sentence = (explorer.get_by_label(name, exact=True).input_value() for name in names)
    return layer, head, sentence


def changes(data: dict[str, Any]) -> torch.Tensor:
    """How far high:0.2 moves each row of each head of the first sentence: ``[layer, head, row]``."""
    own = data["sentences"][0]
    length = len(own["tokens"])
    logs = torch.stack(
        [
            torch.stack([torch.from_numpy(decode_head(head, length).copy()) for head in heads])
            for heads in own["scores"]
        ]
    )
    strength = torch.tensor(0.2, dtype=torch.float64)
    rows = propagate(logs, get_factor("high"), strength, FactorGraph(), steps=1, damping=0.0).rows
    return (rows - logs.exp()).abs().sum(-1) / 2


def test_it_opens_on_the_head_and_the_token_that_change_most(
    tab: Opened, written: tuple[Path, list[dict[str, Any]]]
) -> None:
    tab.tab.goto("about:blank")
    tab.open(written[0].as_uri())
    tab.settle()
    moved = changes(written[1][1])
    layer, head = divmod(int(moved.mean(-1).argmax()), moved.shape[1])
    assert tab.tab.locator("#model option:checked").inner_text() == "high"
    assert chosen(tab) == (str(layer), str(head), "0")
    pressed = tab.tab.locator(".tokens button[aria-pressed=true]")
    assert pressed.count() == 1
    assert pressed.get_attribute("title").startswith(f"{int(moved[layer, head].argmax())}: ")
    assert 0 < tab.tab.locator(".arcs").first.locator("path").count() <= 5
    thumbnails = tab.tab.locator("#thumbnails button")
    assert thumbnails.count() == 8
    assert thumbnails.nth(4 * layer + head).get_attribute("aria-pressed") == "true"


def test_the_chosen_head_is_in_sight_among_those_of_a_deep_model(chromium: Any, tmp_path: Path) -> None:
    data = explorer_data(tiny_model("bert", num_hidden_layers=30), example_model()[1], ["one two three four"])
    page = write_report([], tmp_path / "page.html", explorer=data)
    opened = Opened(chromium.new_page(viewport={"width": 1280, "height": 900}))
    for layer in (29, 0, 15):
        opened.tab.goto("about:blank")
        opened.open(f"{page.as_uri()}#layer={layer}&head=2")
        opened.settle()
        below, height = opened.tab.evaluate(
            """() => {
              const list = document.getElementById("thumbnails");
              const both = [list, list.querySelector("[aria-pressed=true]")];
              const [outer, inner] = both.map((element) => element.getBoundingClientRect());
              return [inner.top - outer.top, outer.height - inner.height];
            }"""
        )
        assert 0 <= below <= height
    opened.tab.close()


def test_a_thumbnail_and_the_map_of_heads_open_a_head(tab: Opened) -> None:
    tab.tab.locator("#thumbnails button").nth(1).click()
    tab.settle()
    assert chosen(tab)[:2] == ("0", "1")
    tab.tab.keyboard.press("ArrowDown")
    tab.tab.keyboard.press("Enter")
    tab.settle()
    assert chosen(tab)[:2] == ("1", "1")
    tab.drawn("map-0")
    box = tab.tab.locator("[data-chart=map-0] .nsewdrag").first.bounding_box()
    tab.tab.mouse.click(box["x"] + box["width"] * 3.5 / 4, box["y"] + box["height"] * 0.25)
    tab.settle()
    assert chosen(tab)[:2] == ("0", "3")
    assert tab.tab.locator("#model option:checked").inner_text() == "plain"


def test_the_view_is_in_the_address_and_comes_back_from_it(tab: Opened, written: tuple[Path, Any]) -> None:
    address = f"{written[0].as_uri()}#layer=1&head=2&lambda=-0.4&sentence=1&token=3&model=plain&steps=2"
    tab.tab.goto("about:blank")
    tab.open(address)
    tab.settle()
    assert chosen(tab) == ("1", "2", "1")
    assert float(tab.tab.locator("#strength").input_value()) == -0.4
    assert tab.tab.locator(".tokens button").nth(3).get_attribute("aria-pressed") == "true"
    tab.set_slider("strength", 0.3)
    tab.choose("Head", "0")
    assert tab.tab.url.endswith("#model=plain&sentence=1&layer=1&head=0&lambda=0.3&token=3&steps=2")
    tab.tab.evaluate("location.hash = 'layer=99&head=-1&lambda=x&token=2&factor=nothing'")
    tab.settle()
    assert chosen(tab) == ("0", "0", "1")
    assert float(tab.tab.locator("#strength").input_value()) == 0.3
    assert tab.complaints == []


def test_lambda_has_room_for_more(tab: Opened) -> None:
    tab.choose("Factor", "potts")
    slider, exact = tab.tab.locator("#strength"), tab.tab.locator("#strength-exact")
    assert (slider.get_attribute("min"), slider.get_attribute("max")) == ("-1", "1")
    exact.fill("3")
    exact.press("Enter")
    tab.settle()
    assert slider.get_attribute("max") == "4"
    assert float(slider.input_value()) == 3
    tab.tab.locator("#strength-range").select_option("1")
    assert float(exact.input_value()) == 1


def test_the_idea_is_stepped_through(tab: Opened) -> None:
    words = tab.tab.locator("#idea-picture")
    assert "messages" not in words.text_content()
    tab.tab.locator("#idea-next").click()
    assert "messages" in words.text_content()
    assert "\N{MULTIPLICATION SIGN} 0.24" in words.text_content()
    tab.tab.get_by_role("button", name="Rows choose again").click()
    assert "new choice" in words.text_content()
    assert tab.tab.locator(".idea li.now").inner_text().startswith("Rows choose again")
    tab.tab.locator("#idea-next").click()
    assert "messages" not in words.text_content()


def test_terms_are_explained_to_pointer_and_keyboard(tab: Opened) -> None:
    bubble = tab.tab.locator("#tip")
    tab.tab.locator("#explorer .term").first.hover()
    assert "attention maps of a layer" in bubble.inner_text()
    tab.tab.mouse.move(0, 0)
    bubble.wait_for(state="hidden")
    tab.tab.locator(".numbers .term", has_text="sink mass").focus()
    assert "single token" in bubble.inner_text()
    box = bubble.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1280
    tab.tab.keyboard.press("Escape")
    bubble.wait_for(state="hidden")


def test_nothing_covers_what_a_link_leads_to_and_arcs_fit_a_phone(tab: Opened) -> None:
    for part in ("explorer", "heads", "curves"):
        tab.tab.locator(f"nav a[href='#{part}']").click()
        tab.tab.wait_for_function(
            f"""() => {{
              const title = document.querySelector("#{part} h2").getBoundingClientRect();
              return title.top >= document.querySelector(".bar-top").getBoundingClientRect().bottom - 1;
            }}"""
        )
    tab.choose("Sentence", "0")
    for width in (390, 1280):
        tab.tab.set_viewport_size({"width": width, "height": 900})
        upright = tab.tab.locator(".arc-sheet.upright")
        upright.wait_for(state="attached" if width == 390 else "detached")
        sheet = "(one) => one.scrollWidth - one.clientWidth"
        assert tab.tab.locator(".arc-scroll").evaluate(sheet) <= 0


def test_fixed_strengths_are_not_called_learned(tab: Opened) -> None:
    assert "fixed strength (λ)" in tab.tab.locator("#head-statistic").inner_text()
    assert "learned strength" not in tab.tab.locator("main").text_content()


def test_dark_maps_do_not_glare(chromium: Any, written: tuple[Path, Any]) -> None:
    context = chromium.new_context(color_scheme="dark")
    opened = Opened(context.new_page())
    opened.open(written[0].as_uri())
    cells = opened.drawn("map-0")
    (heat,) = cells["data"]
    for _, colour in heat["colorscale"]:
        light = sum(int(colour[start : start + 2], 16) for start in (1, 3, 5)) / (3 * 255)
        assert light < 0.72, colour
    context.close()


@pytest.mark.skipif(node_path() is None, reason=NO_NODE)
def test_a_cell_shows_the_side_of_a_limit_that_it_is_on() -> None:
    script = """
      globalThis.document = { querySelectorAll: () => [] };
      const { cellText } = await import("./heads.js");
      const limits = { from: [0.5, 0.6], upTo: [0.8, 0.85] };
      console.log(JSON.stringify(given.map((value) => cellText(value, limits))));
    """
    values = [0.599, 0.6, 0.604, 0.8, 0.803, 0.8004, 0.49996, None, 0.7]
    shown = ["0.599", "0.60", "0.60", "0.80", "0.803", "&gt;0.8", "&lt;0.5", "", "0.70"]
    assert run_node(script, values) == shown
