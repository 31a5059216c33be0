"""Registers ``attn_implementation="saobp"`` once both saobp and Transformers are imported, in either order.

``import saobp`` imports neither PyTorch nor Transformers, but users expect it to register the plug-in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TRIGGER = "transformers.modeling_utils"
"""The module that defines ``PreTrainedModel``: no model exists before it has been imported."""
PLUG_IN = "saobp.transformers"


def register_on_import() -> None:
    """Import the plug-in now if Transformers' models are imported already, else right after them."""
    after_import(TRIGGER, lambda _: import_module(PLUG_IN))


def after_import(name: str, action: Callable[[ModuleType], object]) -> None:
    """Call ``action`` with a module now if it is imported already, else right after its body has run."""
    if name in sys.modules:
        action(sys.modules[name])
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Finds one module as Python would, and calls the action after its body has run."""

    def __init__(self, name: str, action: Callable[[ModuleType], object]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run_body = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_body(module)
            self.action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
