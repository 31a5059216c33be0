"""Install a wheel in an empty environment and run the README's first block there.

    .venv/bin/python tools/try_wheel.py dist/saobp-0.1.0-py3-none-any.whl

PyTorch is the CPU build of ``requirements-cpu.lock`` where pip finds it; other packages have the versions of
``requirements.lock``. ``--offline`` takes all but the wheel itself from the environment that runs this.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--offline", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        python = empty_environment(Path(name) / "venv")
        if asked.offline:
            borrow_packages(python, sysconfig.get_path("purelib"))
            pip(python, "install", "--no-deps", "--no-index", "--force-reinstall", str(asked.wheel))
        else:
            install_with_dependencies(python, asked.wheel, Path(name))
        program = Path(name) / "first_block.py"
        program.write_text(first_block() + LAST_LINES, encoding="utf-8")
        subprocess.run([python, "-I", program], cwd=name, check=True)
        if not asked.offline:
            lines = subprocess.run(
                [python, "-I", "-m", "pip", "freeze"], capture_output=True, text=True, check=True
            ).stdout.splitlines()
            names = [re.split("==| @", line)[0] for line in lines]
            print(f"{len(names)} packages: {', '.join(names)}")


LAST_LINES = """
from pathlib import Path
from saobp.version import __version__
assert Path(saobp.__file__).is_relative_to(Path(__import__("sys").prefix)), saobp.__file__
tokens = torch.arange(12)[None]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(tokens, labels=tokens).loss.backward()
optimizer.step()  # learned strengths begin at 0
with saobp.probe(model) as health:
    refined = model(tokens).logits
assert len(health.heads()) == 8
assert not torch.equal(refined, saobp.remove(model)(tokens).logits)
print(f"saobp {__version__} from its wheel, with torch {torch.__version__}: README's first block runs")
"""


def first_block() -> str:
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    assert found is not None
    return found[1]


def empty_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def borrow_packages(python: Path, place: str) -> None:
    """Let the environment find the packages of another, behind its own."""
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(own, "borrowed.pth").write_text(place + "\n")


def install_with_dependencies(python: Path, wheel: Path, folder: Path) -> None:
    lock = ROOT / "requirements-cpu.lock"
    subprocess.run(
        [python, "-I", "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "-r", lock],
        stderr=subprocess.DEVNULL,
        check=False,  # where pip does not find it, the public index's wheel follows
    )
    pins = re.findall(r"^([\w.-]+==[\w.]+)", (ROOT / "requirements.lock").read_text(), re.M)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(one for one in pins if not one.startswith("torch==")) + "\n")
    pip(python, "install", "-c", str(constraints), str(wheel))


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-I", "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)


if __name__ == "__main__":
    main()
