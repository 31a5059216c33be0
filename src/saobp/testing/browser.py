"""Node and Chromium for the tests of the page, where the machine has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

PAGE_FOLDER = Path(__file__).parents[1] / "report" / "page"
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


def run_node(script: str, given: Any) -> Any:
    """What a module beside the page's own prints as JSON; it finds ``given`` as a constant of that name."""
    node = shutil.which("node")
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
