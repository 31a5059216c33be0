"""Self-attention refined by belief propagation, and instruments that show which heads collapse."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

IS_COMMAND = Path(sys.argv[0] if sys.argv else "").name in ("saobp", "saobp.exe", "-m")
"""Whether this process is the command, which gives help before it imports PyTorch."""

if TYPE_CHECKING or not IS_COMMAND:
    from saobp.attention import attention, refine
    from saobp.metrics.probe import probe
    from saobp.packing import attention_packed, pack, unpack
    from saobp.propagation import Factor, register_factor
    from saobp.refinement import Refinement
    from saobp.transformers.apply import apply, remove
    from saobp.transformers.load import load

__version__ = "0.1.0"

__all__ = [
    "Factor",
    "Refinement",
    "apply",
    "attention",
    "attention_packed",
    "load",
    "pack",
    "probe",
    "refine",
    "register_factor",
    "remove",
    "unpack",
]


if not TYPE_CHECKING:

    class _Package(ModuleType):
        """In the command, public names come when one is asked for, and no module hides a function."""

        def __getattr__(self, name: str) -> Any:
            if name not in __all__:
                raise AttributeError(f"module 'saobp' has no attribute {name!r}")
            for place in (
                "attention",
                "metrics.probe",
                "packing",
                "propagation",
                "refinement",
                "transformers",
            ):
                found = vars(import_module(f"saobp.{place}"))
                vars(self).update({public: found[public] for public in __all__ if public in found})
            return vars(self)[name]

        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in __all__ and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    if IS_COMMAND:
        sys.modules[__name__].__class__ = _Package
