"""Transformers' own test classes from its source, and models that are refined wherever they are made.

``TRANSFORMERS_SOURCE`` is the folder that holds Transformers' ``tests``: its unpacked source distribution, or
a checkout of the same version. The source distribution lacks the generation tests, a checkout has them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

import saobp
from saobp.transformers.load import _prepared as prepared

SOURCE = os.environ.get("TRANSFORMERS_SOURCE")
REFINEMENT = os.environ.get("TRANSFORMERS_TESTS_REFINEMENT", "high:0.5")
"""Empty for plain models: what they fail too is no matter of the refinement."""
PACKAGE = "transformers_tests"


def mixins(source: str) -> tuple[type, type]:
    """Transformers' mixins of common model tests and of generation tests, empty if the source lacks them."""
    tests = Path(source) / "tests"
    package = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    package.__path__ = [str(tests)]
    parts = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
    for name, mixin in parts.items():
        if not (tests / f"{name.replace('.', '/')}.py").is_file():
            folder = f"{PACKAGE}.{name.partition('.')[0]}"
            sys.modules[folder] = ModuleType(folder)
            missing = ModuleType(f"{PACKAGE}.{name}")
            setattr(missing, mixin, type(mixin, (), {}))
            sys.modules[missing.__name__] = missing
    common = import_module(f"{PACKAGE}.test_modeling_common")
    return common.ModelTesterMixin, common.GenerationTesterMixin


class ModelTester:
    """Sizes and inputs of a tiny model, as the mixins ask for them."""

    batch_size, seq_length, is_training, num_choices, pad_token_id = 3, 7, True, 2, 0
    num_hidden_layers, num_attention_heads, hidden_size, vocab_size = 2, 4, 32, 64

    def __init__(self, make: Callable[[], PreTrainedModel]) -> None:
        self.make = make

    def get_config(self) -> Any:
        config = self.make().config
        config.architectures, config._attn_implementation_internal = None, None
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def refined(classes: tuple[type[PreTrainedModel], ...]) -> Iterator[None]:
    """Meanwhile, models of these classes are refined when they are built and when they are loaded."""
    if not REFINEMENT:
        yield
        return
    building = []
    originals = {kind: kind.__init__ for kind in classes}
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def wrapped(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            building.append(self)
            try:
                original(self, *args, **kwargs)
            finally:
                building.pop()
            if not building:
                saobp.apply(self, REFINEMENT)

        init.__wrapped__ = original  # type: ignore[attr-defined]
        return init

    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if config is not None and not hasattr(config, "saobp"):
            config.saobp = saobp.Refinement.of(REFINEMENT).to_dict()
        file = Path(args[0] if args and args[0] is not None else "") / "config.json"
        if config is None and (not file.is_file() or "saobp" not in json.loads(file.read_text())):
            return load(cls, *args, **kwargs)
        building.append(cls)
        try:
            with prepared():
                return load(cls, *args, **kwargs)
        finally:
            building.pop()

    for kind, original in originals.items():
        kind.__init__ = wrapped(original)  # type: ignore[method-assign]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = classmethod(load)  # type: ignore[assignment]
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]
