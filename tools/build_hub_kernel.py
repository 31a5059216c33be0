"""Build the kernel for the Hugging Face hub from the package's own kernels.

    python tools/build_hub_kernel.py                 writes dist/saobp-attention

The folder has the layout of the ``kernels`` library: ``build/torch-cuda`` and ``build/torch-cpu``, each a
Python package with relative imports only, operators of a namespace of its own and ``metadata.json``. It is
generated: change the sources in ``src/saobp`` and build again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "saobp"
NAME = "saobp-attention"
VERSION = 1
"""Major version on the hub; a branch ``v1`` there. Raise it when the functions below change."""
BACKENDS = ("cuda", "cpu")
MODULES = (
    "arguments.py",
    "functional.py",
    "packing.py",
    "refinement.py",
    "kernels",
    "propagation",
    "portable/hub_function.py",
)
ENTRY = '''"""Attention whose rows are refined by belief propagation. Generated from saobp."""

from .functional import attention, refine
from .packing import attention_packed, pack, unpack
from .portable.hub_function import saobp_attention
from .refinement import Refinement

flash_attn_forward = saobp_attention  # Transformers accepts kernels for attention by this name
__all__ = ["Refinement", "attention", "attention_packed", "pack", "refine", "saobp_attention", "unpack"]
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernels, attention]
---

# saobp-attention

Scaled dot-product attention whose rows are refined by belief propagation, forward and backward, in Triton for
CUDA GPUs and in plain PyTorch elsewhere. Generated from the package saobp, which has the tests.

```python
from kernels import get_kernel

kernel = get_kernel("OWNER/saobp-attention", version=1, trust_remote_code=True)
output = kernel.attention(query, key, value, "high:0.2")          # [batch, heads, length, dim]
```

In Transformers, for a model whose `config.saobp` has fixed strengths:

```python
model = AutoModelForMaskedLM.from_pretrained(
    folder, attn_implementation="OWNER/saobp-attention:saobp_attention", allow_all_kernels=True
)
```

Limits: learned strengths, variants and caches need saobp itself, and are refused here.
"""
IMPORT = re.compile(r"^(\s*)from saobp\.([\w.]+) import ", re.MULTILINE)
ALLOWED = {*sys.stdlib_module_names, "torch", "triton"}


def sources() -> dict[Path, str]:
    """The files of the kernel by their path in it."""
    found: dict[Path, str] = {}
    for name in MODULES:
        path = SOURCE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found[file.relative_to(SOURCE)] = file.read_text(encoding="utf-8")
    found[Path("portable/__init__.py")] = '"""The attention function for Transformers."""\n'
    return found


def with_relative_imports(path: Path, text: str) -> str:
    """``from saobp.a.b import c`` as seen from a file of the kernel."""
    dots = "." * len(path.parts)
    return IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[2]} import ", text)


def check_imports(path: Path, text: str) -> None:
    """Raise on an import of anything but the standard library, torch, Triton and the kernel itself."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] not in ALLOWED:
                raise ValueError(f"{path} imports {name}, which a kernel for the hub may not")


def build(folder: Path) -> Path:
    """Write the kernel to a new folder, and return it."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: remove it, or name another folder by --out")
    texts = {path: with_relative_imports(path, text) for path, text in sources().items()}
    texts[Path("__init__.py")] = ENTRY
    digest = hashlib.sha256("".join(f"{path}\n{text}" for path, text in texts.items()).encode()).hexdigest()[
        :7
    ]
    for path, text in texts.items():
        check_imports(path, text)
    try:
        for backend in BACKENDS:
            write_variant(folder / "build" / f"torch-{backend}", texts, backend, digest)
        (folder / "README.md").write_text(CARD, encoding="utf-8")
        shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def write_variant(folder: Path, texts: dict[Path, str], backend: str, digest: str) -> None:
    unique = f"_{NAME.replace('-', '_')}_{backend}_{digest}"
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if path.name == "custom_op.py":
            text, count = re.subn(
                r'^NAMESPACE = "saobp"$', f'NAMESPACE = "{unique}"', text, flags=re.MULTILINE
            )
            if count != 1:
                raise ValueError(f"{path} does not set NAMESPACE in one line")
        file.write_text(text, encoding="utf-8")
    metadata = {
        "id": unique,
        "name": NAME,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / NAME, help="a folder that does not exist")
    try:
        print(f"wrote {build(parser.parse_args().out)}")
    except (OSError, ValueError) as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
