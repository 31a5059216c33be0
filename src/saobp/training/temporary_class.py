"""Temporarily change a module's class: another forward, with the same parameters and names.

Two parts of a training step need it. Trainer, DDP, FSDP and checkpoints are given the model itself, so that
saved names are those of Transformers, but what they call has to be the loss (``compiled_step``). And the
query, key and value layers of an attention stay three modules, but are multiplied at once (``fused_qkv``).
A wrapper around a module would rename its parameters, and a hook cannot take the place of a forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def temporary_class(module: nn.Module, mixin: type, **attributes: Any) -> Iterator[None]:
    """Context in which the module's class derives from ``mixin`` and its own, with the attributes set.

    Afterwards it has its class again, unless FSDP has made one of its own from it; so a mixin without its
    attributes must behave like the module's own class.
    """
    own = type(module)
    derived = type(own.__name__, (mixin, own), {"__module__": own.__module__})
    module.__class__ = derived
    vars(module).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(module)[name]
        if type(module) is derived:
            module.__class__ = own
