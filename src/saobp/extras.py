"""Packages that a plain ``pip install saobp`` leaves out, and the extra of this package that brings each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXTRA_OF = {
    "accelerate": "train",
    "datasets": "train",
    "pyarrow": "train",
    "scipy": "train",
    "sklearn": "train",
    "matplotlib": "report",
    "plotly": "report",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "executorch": "executorch",
    "lm_eval": "harness",
}
"""By the name under which a package is imported."""


class MissingPackageError(ModuleNotFoundError):
    """An optional package is not installed; the message says what needs it and how to install it."""

    def __init__(self, what: str, package: str, extra: str | None = None) -> None:
        extra = extra or EXTRA_OF[package]
        super().__init__(
            f"{what} needs {package}, which is not installed here: pip install 'saobp[{extra}]'", name=package
        )


def import_optional(module: str, what: str) -> Any:
    """Import a module of an optional package. Raises :class:`MissingPackageError`, saying what needs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as problem:
        raise named(problem, what) from None


def named(problem: ModuleNotFoundError, what: str, extra: str | None = None) -> ModuleNotFoundError:
    """The error in a sentence if an extra brings the missing package, else the error itself.

    extra: the one to name, where ``what`` needs more than the missing package
    """
    if isinstance(problem, MissingPackageError):
        return problem
    package = (problem.name or "").partition(".")[0]
    return MissingPackageError(what, package, extra) if package in EXTRA_OF else problem
