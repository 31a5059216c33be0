"""Write ``requirements.lock``: the versions installed here, with the hashes of every file of their releases.

    .venv/bin/python tools/lock.py

pip checks what it installs against these hashes. Files come from pip's configured index. PyTorch's
wheels of the public index for Linux need CUDA libraries, which are pinned in ``requirements-cuda.lock``; its
CPU build, preferred where pip finds it, in ``requirements-cpu.lock``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version
from pip._internal.commands import create_command
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.link import Link

ROOT = Path(__file__).parents[1]
NOT_LOCKED = ("pip", "saobp")
LINUX_ONLY = ("triton",)
OLDEST = 11
"""Python 3.11: wheels for older versions only are left out."""


def main() -> None:
    installed = installed_versions()
    cuda = {name: pin for name, pin in torch_on_linux(installed["torch"]).items() if name not in installed}
    write(ROOT / "requirements.lock", installed, LINUX_ONLY)
    write(ROOT / "requirements-cuda.lock", cuda, tuple(cuda))
    write(ROOT / "requirements-cpu.lock", {"torch": f"{installed['torch']}+cpu"}, ())


def installed_versions() -> dict[str, str]:
    """Public versions by canonical name."""
    lines = pip("freeze", "--all", "--exclude-editable").splitlines()
    found = [Requirement(line) for line in lines if "==" in line]
    pins = {canonicalize_name(one.name): Version(str(one.specifier)[2:]).public for one in found}
    return {name: pin for name, pin in pins.items() if name not in NOT_LOCKED}


def torch_on_linux(version: str) -> dict[str, str]:
    """What the public index's wheel of PyTorch needs on Linux, whatever build is installed here."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", str(report))
        pip("--isolated", "install", *options, f"torch=={version}", configured=False)
        needed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in needed}


def write(path: Path, pins: dict[str, str], linux_only: tuple[str, ...]) -> None:
    with index_links() as links_of:
        lines = []
        for name, version in sorted(pins.items()):
            hashes = sorted({file_hash(link) for link in links_of(name) if is_of(link, version)})
            if not hashes:
                sys.exit(f"no index that pip is configured with has a file of {name} {version}")
            marker = "; sys_platform == 'linux'" if name in linux_only else ""
            lines.append(
                f"{name}=={version}{marker}" + "".join(f" \\\n    --hash=sha256:{one}" for one in hashes)
            )
            print(f"{name} {version}: {len(hashes)} files")
    path.write_text("\n".join(lines) + "\n")


@contextmanager
def index_links() -> Iterator[Callable[[str], list[Link]]]:
    """A function from a project's name to all of its files that pip can find."""
    command: Any = create_command("download")
    options, _ = command.parse_args([])
    with command.main_context():
        collector = LinkCollector.create(command.get_default_session(options), options)

        def page(address: Link) -> list[Any]:
            content = collector.fetch_response(address)
            return [] if content is None else list(parse_links(content))

        def links(name: str) -> list[Link]:
            groups = collector.collect_sources(name, candidates_from_page=page)
            sources = [source for group in groups for source in group if source is not None]
            return [link for one in sources for link in (*one.file_links(), *one.page_candidates())]

        yield links


def is_of(link: Link, version: str) -> bool:
    """Whether the file belongs to that release and supports a supported Python."""
    try:
        if not link.filename.endswith(".whl"):
            return str(parse_sdist_filename(link.filename)[1]) == version
        _, found, _, tags = parse_wheel_filename(link.filename)
    except ValueError:
        return False
    return version in (found.public, str(found)) and any(takes(tag.interpreter, tag.abi) for tag in tags)


def takes(interpreter: str, abi: str) -> bool:
    if interpreter.startswith("cp3"):
        return abi == "abi3" or int(interpreter[3:] or 0) >= OLDEST
    return interpreter.startswith("py3")


def file_hash(link: Link) -> str:
    if link.hash_name == "sha256" and link.hash:
        return link.hash
    if link.scheme != "file":
        sys.exit(f"the index gives no sha256 for {link.filename}")
    return hashlib.sha256(Path(url2pathname(unquote(link.path))).read_bytes()).hexdigest()


def pip(*arguments: str, configured: bool = True) -> str:
    environment = os.environ if configured else os.environ | {"PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
