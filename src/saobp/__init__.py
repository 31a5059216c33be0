"""Self-attention refined by belief propagation, and instruments that show which heads collapse."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from saobp._register_on_import import register_on_import
from saobp.version import __version__ as __version__

if TYPE_CHECKING:
    from saobp import nn
    from saobp.explanation import explain
    from saobp.functional import attention, refine
    from saobp.metrics.fast.monitor import watch
    from saobp.metrics.health.recorder import probe
    from saobp.packing import attention_packed, pack, unpack
    from saobp.portable.save import save
    from saobp.propagation import Factor, register_factor
    from saobp.refinement import Refinement
    from saobp.transformers.apply import apply, remove
    from saobp.transformers.load import load

__all__ = [
    "Factor",
    "Refinement",
    "apply",
    "attention",
    "attention_packed",
    "explain",
    "load",
    "nn",
    "pack",
    "probe",
    "refine",
    "register_factor",
    "remove",
    "save",
    "unpack",
    "watch",
]

_MODULES = {
    "Factor": "saobp.propagation",
    "Refinement": "saobp.refinement",
    "apply": "saobp.transformers.apply",
    "attention": "saobp.functional",
    "attention_packed": "saobp.packing",
    "explain": "saobp.explanation",
    "load": "saobp.transformers.load",
    "pack": "saobp.packing",
    "probe": "saobp.metrics.health.recorder",
    "refine": "saobp.functional",
    "register_factor": "saobp.propagation",
    "remove": "saobp.transformers.apply",
    "save": "saobp.portable.save",
    "unpack": "saobp.packing",
    "watch": "saobp.metrics.fast.monitor",
}
"""Where public names are defined; imported on first use, so ``saobp --help`` does not import PyTorch."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return found
    try:
        return import_module(f"saobp.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"saobp.{name}":
            raise
        raise AttributeError(f"module 'saobp' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_on_import()
