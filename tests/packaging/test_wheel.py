"""The package is built from a copy of the tree; its wheel works in an environment without the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_runs_the_first_block_of_the_readme(tmp_path: Path) -> None:
    tree, dist = tmp_path / "tree", tmp_path / "dist"
    tree.mkdir()
    for name in ("src", "docs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".lock":
            shutil.copy(path, tree)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    own = {
        path.relative_to(tree / "src").as_posix()
        for path in (tree / "src" / "saobp").rglob("*")
        if path.is_file() and path.suffix != ".md"
    }
    assert own <= packed
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "NOTICE", "README.md", "pyproject.toml"} <= names
    subprocess.run([sys.executable, ROOT / "tools/try_wheel.py", wheel, "--offline"], check=True)
