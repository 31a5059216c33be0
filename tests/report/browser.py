"""Node and Chromium for the tests of the page, where the machine has them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import saobp.report

PAGE_FOLDER = Path(saobp.report.__file__).with_name("page")
HOSTILE = "<b>bold</b> </script><script>alert('x')</script> \"quoted\" שלום עולם 🙂👩‍👩‍👧 &amp; ${7*7} café"
"""Text that a page must escape: markup, template, end of a script."""
NO_NODE = "the page's arithmetic is not checked in Node: there is no node on this machine"
NO_CHROMIUM = (
    "the page is not opened in a browser: there is no chromium on this machine, "
    "and make chromium could not install Debian's"
)


def chromium_path() -> str | None:
    """The system's Chromium; SAOBP_CHROMIUM names another."""
    named = os.environ.get("SAOBP_CHROMIUM")
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    return named or next((path for path in found if path), None)


def node_path() -> str | None:
    """The system's Node, or the one that drives Playwright."""
    spec = importlib.util.find_spec("playwright")
    driver = None if spec is None or spec.origin is None else Path(spec.origin).with_name("driver") / "node"
    return shutil.which("node") or (str(driver) if driver is not None and driver.is_file() else None)


def run_node(script: str, given: Any) -> Any:
    """Run a module next to the page's own; returns the JSON it prints. It sees ``given`` as a constant."""
    node = node_path()
    assert node is not None
    source = f"const given = JSON.parse(await new Response(process.stdin).text());\n{script}"
    done = subprocess.run(
        [node, "--input-type=module", "--eval", source],
        input=json.dumps(given),
        cwd=PAGE_FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Opened:
    """A page in a browser, with its console messages and requests.

    ``tab`` is Playwright's page; ``complaints`` are console messages and errors, ``requests`` the addresses.
    """

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.complaints: list[str] = []
        self.requests: list[str] = []
        tab.on("console", lambda message: self.complaints.append(message.text))
        tab.on("pageerror", lambda problem: self.complaints.append(str(problem)))
        tab.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: self.requests.append(request.url))

    def open(self, address: str) -> None:
        """Load an address and wait until the page has built itself."""
        self.tab.goto(address)
        built = self.tab.evaluate("document.documentElement.dataset.ready")
        assert built == "true", f"the page did not build itself: {self.complaints}"

    def drawn(self, chart: str) -> dict[str, Any]:
        """Scroll to a chart, wait until plotly has drawn it, and return its traces and layout."""
        place = f'[data-chart="{chart}"] .plot'
        self.tab.locator(place).evaluate("(one) => one.closest('details')?.setAttribute('open', '')")
        self.tab.locator(place).scroll_into_view_if_needed()
        self.tab.locator(f"{place}.js-plotly-plot .main-svg").first.wait_for(timeout=20_000)
        self.settle()
        return self.tab.evaluate(
            "(place) => { const { data, layout } = document.querySelector(place); return { data, layout }; }",
            place,
        )

    def charts(self) -> list[str]:
        """The names of all charts of the page that are shown."""
        shown = self.tab.locator(".chart:not([hidden])")
        return shown.evaluate_all("(all) => all.map((one) => one.dataset.chart)")

    def overflow(self) -> int:
        """Pixels by which the page is wider than the screen."""
        return self.tab.evaluate("document.documentElement.scrollWidth - innerWidth")

    def settle(self) -> None:
        """Wait two frames, until the last input is rendered."""
        self.tab.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def wait_until(self, holds: str, selector: str) -> None:
        """Wait until ``holds``, a function in JavaScript, is true of all elements; 5 seconds at most."""
        is_so = self.tab.evaluate(
            f"""async () => {{
              for (let turn = 0; turn < 100; turn += 1) {{
                if ([...document.querySelectorAll("{selector}")].every({holds})) return true;
                await new Promise((done) => setTimeout(done, 50));
              }}
              return false;
            }}"""
        )
        assert is_so, f"not all {selector} came to be so: {holds}"

    def number(self, statistic: str, when: str = "after") -> float:
        """A statistic of the explorer's head, as the page computed it."""
        shown = self.tab.locator(f"[data-statistic={statistic}][data-when={when}]")
        return float(shown.get_attribute("data-value"))

    def set_slider(self, name: str, value: float) -> None:
        """Move a slider of the explorer, widening its range if need be, and wait for two frames."""
        self.tab.evaluate(
            """([name, value]) => {
              const slider = document.getElementById(name);
              const range = document.getElementById(`${name}-range`);
              if (range && Math.abs(value) > Number(slider.max)) {
                range.value = "16";
                range.dispatchEvent(new Event("input", { bubbles: true }));
              }
              slider.value = value;
              slider.dispatchEvent(new Event("input", { bubbles: true }));
            }""",
            [name, value],
        )
        self.settle()

    def choose(self, label: str, value: str) -> None:
        """Choose from one of the explorer's lists and wait for two frames."""
        chosen = self.tab.locator("#explorer").get_by_label(label, exact=True)
        chosen.evaluate("(one) => one.closest('details')?.setAttribute('open', '')")
        chosen.select_option(value)
        self.settle()

    def picture(self, place: int) -> str:
        """The pixels of a map."""
        return self.tab.evaluate(
            "(place) => document.querySelectorAll('canvas.map')[place].toDataURL()", place
        )
