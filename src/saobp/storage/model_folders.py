"""Where a saved model lies: in a folder, in the folder of its run, or under its name on the hub."""

from __future__ import annotations

import difflib
import functools
from os import PathLike
from pathlib import Path

from saobp.storage.manifest import check_manifest

HUB_SECONDS = 5.0
"""Longest wait for the hub's answer on whether it has a name."""
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
"""Files of which a tokenizer has at least one."""


def checked_folder(folder: str | PathLike[str]) -> str:
    """The folder of a saved model, or a name on the hub; the folder of a run means the model in it.

    The disk is looked at first, then the hub's cache, then the hub, which has a few seconds to answer.
    """
    path = Path(folder)
    if path.is_dir():
        for place in (path, path / "model"):
            if (place / "config.json").exists():
                return str(place)
        why = "it has no config.json"
        if (path / "recipe.json").exists() and not (path / "result.json").exists():
            why = "its run has not finished: go on with it first"
        raise FileNotFoundError(f"{str(path)!r} holds no model ({why})")
    if looks_local(folder):
        raise FileNotFoundError(f"there is no model folder {str(path)!r}{_nearest(path)}")
    problem = hub_problem(str(folder))
    if problem is not None:
        raise FileNotFoundError(
            f"there is no model folder {str(path)!r}{_nearest(path)}, and the hub {problem}"
        )
    return str(folder)


def intact_folder(folder: str | PathLike[str]) -> str:
    """The same, for a model that is to be loaded: its files must be those of its manifest, if it has one."""
    model_folder = checked_folder(folder)
    check_manifest(Path(model_folder))
    return model_folder


def check_file(path: Path) -> None:
    """Raises if a file that should be read is not there."""
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: name a file in it")
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")


def has_tokenizer(place: str) -> bool:
    """Whether a model's folder holds a tokenizer; a model on the hub is taken to have one."""
    path = Path(place)
    return not path.is_dir() or any(file for pattern in VOCABULARIES for file in path.glob(pattern))


def check_tokenizer(place: str) -> None:
    """Raises if a model's folder holds no tokenizer: Transformers would silently make an empty one."""
    if not has_tokenizer(place):
        raise ValueError(f"{place!r} holds no tokenizer: copy the one that the model was trained with there")


def looks_local(path: str | PathLike[str]) -> bool:
    """A path object, or text that cannot be the name of a model on the hub."""
    text = str(path)
    return not isinstance(path, str) or text.startswith((".", "/", "~")) or text.count("/") > 1


def hub_problem(name: str) -> str | None:
    """Why the hub cannot give a repository of that name; None if it can, or if its cache has a copy."""
    from huggingface_hub import errors

    try:
        return _hub_answer(name)
    except errors.OfflineModeIsEnabled:
        return "is switched off here (HF_HUB_OFFLINE)"
    except Exception as problem:
        return f"could not be asked within {HUB_SECONDS:g} seconds ({type(problem).__name__})"


@functools.cache
def _hub_answer(name: str) -> str | None:
    """As ``hub_problem``, cached; raises, and caches nothing, if the hub did not answer."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return None
        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled
        address = huggingface_hub.hf_hub_url(name, "config.json")
        huggingface_hub.get_hf_file_metadata(address, timeout=HUB_SECONDS)
    except (errors.EntryNotFoundError, errors.GatedRepoError):
        return None  # it exists: what is wrong with it will be said when it is loaded
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return "has nothing of that name"
    return None


def _nearest(path: Path) -> str:
    """A hint at a folder of nearly that name."""
    there = next((above for above in path.parents if above.is_dir()), None)
    if there is None:
        return ""
    missing, *rest = path.relative_to(there).parts
    beside = [entry.name for entry in there.iterdir() if entry.is_dir()]
    close = difflib.get_close_matches(missing, beside, 1)
    return f" (did you mean {str(there.joinpath(close[0], *rest))!r}?)" if close else ""
