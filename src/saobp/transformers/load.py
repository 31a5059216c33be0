"""Load a saved model with its refinement, and warn about one that is loaded without.

:func:`saobp.apply` also writes ``attn_implementation`` to the model's config. Transformers looks that name up
when it builds the model: where it is registered, ``from_pretrained`` loads the refined model; where it is
not, because saobp is not imported, it raises.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from saobp.refinement import Refinement
from saobp.storage.atomic import ADDED
from saobp.storage.model_folders import looks_local
from saobp.transformers.apply import (
    attach,
    attention_modules,
    build,
    check_model,
    put_through_registry,
    switch_on,
)
from saobp.transformers.layer_refinement import CONFIG_FIELD, IMPLEMENTATION, SUBMODULE, named_refinements

HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
"""Arguments of ``from_pretrained`` that say which config is meant."""

STRENGTHS = "saobp.strengths"
"""Name under which :func:`saobp.save` stores fixed strengths; they are read from the config."""
HUB_FUNCTION = "saobp_attention"
"""Name of the attention function in the kernel for the hub, after ``repository:``."""

_loading: ContextVar[bool] = ContextVar("saobp_loading", default=False)


def load(path: str | PathLike[str], auto_class: Any = None, **kwargs: Any) -> Any:
    """Load a model saved after :func:`saobp.apply`, with its refinement and learned strengths.

    ``auto_class`` is a model class or an auto class such as ``AutoModelForMaskedLM``, by default the class
    that was saved, which its config names; other arguments go to its ``from_pretrained``.
    """
    if auto_class is not None and not hasattr(auto_class, "from_pretrained"):
        raise TypeError(
            f"saobp.load takes a model class such as transformers.AutoModelForMaskedLM, not {auto_class!r}"
        )
    if looks_local(path) and not Path(path).is_dir():
        raise FileNotFoundError(f"there is no folder {str(path)!r} to load a model from")
    if (Path(path) / ADDED).is_dir() and not (Path(path) / "config.json").exists():
        raise ValueError(f"a save to {str(path)!r} was interrupted between two files: save the model again")
    if auto_class is None:
        options = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        auto_class = saved_class(AutoConfig.from_pretrained(path, **options), path)
    if kwargs.pop("output_loading_info", False):
        raise ValueError("saobp.load returns the model alone: leave output_loading_info out")
    if kwargs.get("attn_implementation") == IMPLEMENTATION:
        del kwargs["attn_implementation"]
    with _prepared():
        return auto_class.from_pretrained(path, **kwargs)


def saved_class(config: Any, path: str | PathLike[str]) -> Any:
    """The class of Transformers that the config of a saved model names."""
    names = getattr(config, "architectures", None) or ["no class"]
    model_class = getattr(transformers, names[0], None)
    if model_class is None:
        raise ValueError(
            f"the config of {str(path)!r} names {names[0]}, which Transformers does not have: give a class, "
            "as in saobp.load(path, AutoModelForMaskedLM), or save the model with save_pretrained"
        )
    return model_class


def patch_from_pretrained() -> None:
    """Wrap ``from_pretrained`` to load refined checkpoints, and to warn of one loaded as a plain model."""
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if hasattr(original, "saobp"):
        return

    @wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        if _loading.get() or loads_refined(args, kwargs):
            with _prepared(False):
                return _load_refined(original, cls, args, kwargs)
        loaded = original(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        used = str(model.config._attn_implementation)
        is_refined = used == IMPLEMENTATION or used.endswith(f":{HUB_FUNCTION}")
        if getattr(model.config, CONFIG_FIELD, None) is not None and not is_refined:
            warnings.warn(
                "this checkpoint was saved with refined attention (config.saobp) but runs without it here: "
                f"load it with saobp.load(path, {cls.__name__})",
                UserWarning,
                stacklevel=2,
            )
        return loaded

    from_pretrained.saobp = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]


def loads_refined(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved refined, and the caller asks for no other attention implementation."""
    config = kwargs.get("config")
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if kwargs.get("attn_implementation") not in (None, IMPLEMENTATION):
        return False
    if isinstance(config, PreTrainedConfig):
        return config._attn_implementation in (None, IMPLEMENTATION) and hasattr(config, CONFIG_FIELD)
    if config is not None or path is None or "gguf_file" in kwargs:
        return False
    written, _ = PreTrainedConfig.get_config_dict(path, **kwargs)
    return CONFIG_FIELD in written


def attach_saved(model: PreTrainedModel) -> None:
    """Attach the refinement that a model's config describes; classes of portable folders call this."""
    check_model(model)
    put_through_registry(model)
    modules = attention_modules(model)
    refinement = _saved_refinement(model.config).resolved(model.num_parameters())
    attach(modules, build(modules, refinement))
    switch_on(model, modules, refinement)


def _load_refined(original: Any, cls: type[PreTrainedModel], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Load with a class that attaches the refinement as it is built, so that strengths load like weights."""
    wants_info = kwargs.pop("output_loading_info", False)
    attaches_itself = getattr(cls, "saobp_attaches_itself", False)  # comes with a portable folder
    refined = cls if attaches_itself else _attaching(cls)
    model, info = original(refined, *args, output_loading_info=True, **kwargs)
    lost = [key for key in info["missing_keys"] if f".{SUBMODULE}." in key]
    if lost:
        raise ValueError(f"this checkpoint lacks its learned strengths ({lost[0]}, ...)")
    model.__class__ = cls
    for _, layer_refinement in named_refinements(model):
        layer_refinement.reset_fixed()
    return (model, info) if wants_info else model


def _attaching(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def init(self: PreTrainedModel, config: Any, *inputs: Any, **options: Any) -> None:
        if config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation = None  # so that saobp.remove restores another
        cls.__init__(self, config, *inputs, **options)
        attach_saved(self)

    names = {
        "__init__": init,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_keys_to_ignore_on_load_unexpected": [
            *(cls._keys_to_ignore_on_load_unexpected or ()),
            re.escape(STRENGTHS),
        ],
    }
    return type(cls.__name__, (cls,), names)


def _saved_refinement(config: Any) -> Refinement:
    written = getattr(config, CONFIG_FIELD, None)
    if written is None:
        raise ValueError(
            "this checkpoint has no config.saobp, so it was not saved with refined attention: load it with "
            "from_pretrained and call saobp.apply(model, refinement)"
        )
    return Refinement.from_dict(written)


@contextmanager
def _prepared(value: bool = True) -> Iterator[None]:
    token = _loading.set(value)
    try:
        yield
    finally:
        _loading.reset(token)
