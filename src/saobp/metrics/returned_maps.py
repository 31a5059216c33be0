"""Sees the maps that a model returns for ``output_attentions``, while its caller gets what was asked for."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from saobp.metrics.before_dropout import BeforeDropout
from saobp.metrics.known_maps import KnownMaps, known_maps
from saobp.transformers.apply import other_attention

FIELDS = {
    "attentions": ("", "attention_mask"),
    "encoder_attentions": ("encoder", "attention_mask"),
    "decoder_attentions": ("decoder", "decoder_attention_mask"),
}
"""Fields of a model's output with maps of self-attention: the stack of layers, and the mask of its tokens."""
RETURN_SCORES = {"squeezebert"}
"""Types of models that return scores, whose softmax is the map."""
EARLIER_TOKENS = ("past_key_values", "mems")
"""Arguments that bring keys of tokens before those of the call."""
OTHER_PADDING = ("input_mask", "lengths")
"""Arguments of single models (XLNet, XLM) that tell the padding in another form."""

OnMaps = Callable[[str, str, KnownMaps], object]
"""Called with the name of a layer, its stack of layers, and its maps."""


class ReturnedMaps:
    """Calls ``on_maps`` for each layer of each forward of a Transformers model inside :meth:`observing`.

    The model may be wrapped or be a part of ``model``. Its forward is asked for maps and for an output with
    names; its caller gets neither unless asked for. ``on_skipped`` gets the name of a layer whose rows and
    keys are different tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        on_maps: OnMaps,
        on_skipped: Callable[[str], object] = lambda _: None,
        texts: int | None = None,
    ) -> None:
        self.on_maps, self.on_skipped, self.texts = on_maps, on_skipped, texts
        self.parts: dict[nn.Module, str] = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, PreTrainedModel) and other_attention(module)
        }
        self._root = model
        self._thread: int | None = None
        self._hooked: set[nn.Module] = set()
        self._open: list[Request | None] = []

    def __deepcopy__(self, _: object) -> ReturnedMaps:
        """One that does nothing, for a copy of the model that is made meanwhile."""
        return ReturnedMaps(nn.Module(), lambda *_: None)

    def attached(self) -> AbstractContextManager[None]:
        """To be entered before a forward whose own hooks enter ``observing``, too late to add others."""
        compiled = self._root.__dict__.get("_compiled_call_impl") is not None
        return self._hooks([] if compiled else [self._root])

    @contextmanager
    def observing(self) -> Iterator[None]:
        with self._hooks(self.parts):
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None

    @contextmanager
    def _hooks(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        added = [module for module in modules if module in self.parts and module not in self._hooked]
        self._hooked.update(added)
        with ExitStack() as stack:
            for module in added:
                before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
                after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            try:
                yield
            finally:
                self._hooked.difference_update(added)

    def _is_observed(self, module: nn.Module) -> bool:
        """False for a replica of DataParallel, and for a forward of another thread than the measured one."""
        if torch.compiler.is_compiling() or module not in self.parts:
            return False
        return self._thread == threading.get_ident()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_observed(module):
            return None
        self._open.append(None)
        if len(self._open) > 1:  # a part of a model that was asked already
            return None
        request = Request(module, args, kwargs)
        self._open[-1] = request
        return request.start()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        del args, kwargs
        if not self._is_observed(module) or not self._open:
            return None
        request = self._open.pop()
        if request is None:
            return None
        request.stop()
        if output is None:  # the forward has raised
            return None
        self._show(module, request, output)
        return request.answer(output)

    def _show(self, module: nn.Module, request: Request, output: Any) -> None:
        owner, found = type(module).__name__, 0
        for field, (stack, mask_name) in FIELDS.items():
            layers = (output.get(field) if isinstance(output, ModelOutput) else None) or ()
            for number, rows in enumerate(rows for rows in layers if rows is not None):
                found += 1
                place = [part for part in (self.parts[module], stack) if part]
                name = ".".join([*place, f"layer.{number}"])
                if request.is_cached(rows):
                    self.on_skipped(name)
                    continue
                rows = request.checked(rows)[: self.texts]
                mask = request.mask(mask_name)
                mask = None if mask is None else mask[: self.texts]
                heads = known_maps(rows, mask, owner, after_dropout=module.training)
                self.on_maps(name, ".".join(place), heads)
        if not found:
            raise ValueError(
                f"{owner} computes its attention without Transformers' attention registry and returns no "
                "maps for output_attentions=True, so saobp cannot measure it"
            )


class Request:
    """One forward that is asked for its maps."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.module, self.owner, self.config = module, type(module).__name__, getattr(module, "config", None)
        self.args, self.kwargs = args, kwargs
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]  # without self
        self.positional = [one.name for one in parameters[: len(args)]]
        self.given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        names = {one.name for one in parameters}
        self.asked = [name for name in ("output_attentions", "return_dict") if takes_any or name in names]
        if "output_attentions" not in self.asked:
            raise ValueError(
                f"{self.owner} computes its attention without Transformers' attention registry and takes no "
                "output_attentions, so saobp cannot measure it"
            )
        self.dropout = BeforeDropout()
        self._entered = ExitStack()

    def start(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to run with."""
        self._entered.enter_context(eager_attention(self.module))
        self._entered.enter_context(self.dropout)
        by_place = zip(self.positional, self.args, strict=False)
        args = tuple(True if name in self.asked else value for name, value in by_place)
        return args, {**self.kwargs, **{name: True for name in self.asked if name not in self.positional}}

    def stop(self) -> None:
        self._entered.close()

    def answer(self, output: Any) -> Any:
        """What the caller asked for, from a ModelOutput, which is a dataclass."""
        if not self._wanted("output_attentions", False):
            maps = [one.name for one in dataclasses.fields(output) if one.name.endswith("attentions")]
            output = dataclasses.replace(output, **dict.fromkeys(maps))
        return output if self._wanted("return_dict", True) else output.to_tuple()

    def mask(self, name: str) -> Tensor | None:
        """The mask ``[batch, length]`` under that name; raises on padding in other forms."""
        other = next((name for name in OTHER_PADDING if self.given.get(name) is not None), None)
        if other is not None:
            raise ValueError(
                f"saobp reads which tokens of {self.owner} are real from attention_mask, not from {other}: "
                "pass that instead"
            )
        mask = self.given.get(name)
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"to know which tokens of {self.owner} are real, saobp needs {name} [batch, length], not "
                f"{what}"
            )
        return mask

    def is_cached(self, rows: Any) -> bool:
        """Whether there are more keys than rows, from earlier tokens."""
        earlier = any(self.given.get(name) is not None for name in EARLIER_TOKENS)
        return earlier and isinstance(rows, Tensor) and rows.ndim == 4 and rows.shape[-1] > rows.shape[-2]

    def checked(self, rows: Any) -> Tensor:
        """Maps ``[batch, heads, length, length]`` before dropout; raises on what has another shape."""
        if not isinstance(rows, Tensor) or rows.ndim != 4 or rows.shape[-1] != rows.shape[-2]:
            what = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"{self.owner} returns {what} for the attention of a layer, not maps [batch, heads, length, "
                "length] in which each token attends to the same tokens, so saobp cannot measure it"
            )
        if getattr(self.config, "model_type", None) in RETURN_SCORES:
            return rows.softmax(-1)
        return self.dropout.of(rows)

    def _wanted(self, name: str, default: bool) -> bool:
        asked = self.given.get(name)
        return bool(getattr(self.config, name, default) if asked is None else asked)


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Selects eager attention: only that is sure to return the maps and to get a mask of numbers to add."""
    configs: dict[int, Any] = {
        id(part.config): part.config
        for part in model.modules()
        if isinstance(getattr(part, "config", None), PreTrainedConfig)
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    other = next((name for name in before.values() if name not in (None, "eager", "sdpa")), None)
    if other is not None:
        raise ValueError(
            f"{type(model).__name__} runs with {other}, which returns no attention maps: load it with "
            "attn_implementation='eager' to measure it"
        )
    for key, config in configs.items():
        if config.model_type == "falcon" and config.alibi and before[key] == "sdpa":
            raise ValueError(
                f"{type(model).__name__} with ALiBi returns other maps than those it attends by: with eager "
                "attention Transformers adds ALiBi twice, so saobp cannot measure it as it runs with sdpa"
            )
    for config in configs.values():
        config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
