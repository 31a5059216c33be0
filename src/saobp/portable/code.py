"""The code that a portable folder carries: ``modeling_saobp.py`` with the classes of the model's family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from saobp.refinement import Refinement
from saobp.storage.json_files import read_object, write_json
from saobp.transformers.apply import attention_modules
from saobp.transformers.layer_refinement import is_causal_call, named_refinements
from saobp.transformers.load import STRENGTHS

CODE = "modeling_saobp.py"
FAMILIES = (
    *("albert", "bert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"),
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3"),
)
"""``model_type`` of the families whose portable code is tested."""
FACTORS = (
    *("none", "high", "low", "high-listing", "low-listing", "high-key-bias", "low-key-bias"),
    *("elemmul", "elemmul-prior"),
)
VARIANTS = ("temperature", "qk-norm", "gate", "sink", "softmax-plus-one")


def refinement_of(model: PreTrainedModel) -> Refinement | None:
    """The refinement that is applied to a model."""
    return next((layer.refinement for _, layer in named_refinements(model)), None)


def check_portable(model: PreTrainedModel) -> None:
    """Raise if the model has no portable code, with the reason in a sentence."""
    refinement = refinement_of(model)
    _check_family(model.config.model_type, refinement)
    if type(model).__name__ not in dict(classes_of(model.config)).values():
        raise ValueError(
            f"there is no portable code for {type(model).__name__}: no auto class of Transformers loads it"
        )
    causal = any(is_causal_call(module) for _, module in attention_modules(model))
    if refinement is not None and refinement.future == "paper" and causal:
        raise ValueError(
            "future='paper' shows a decoder the tokens it should predict, so such a model must not travel: "
            "apply a refinement with future='strict'"
        )


def _check_family(kind: str, refinement: Refinement | None) -> None:
    """Raise if there is no portable code for a ``model_type`` with this refinement."""
    if refinement is None:
        raise ValueError("the model is plain, so it loads anywhere as it is: it needs no portable code")
    if kind not in FAMILIES:
        raise ValueError(f"there is no portable code for {kind!r}: only for {', '.join(FAMILIES)}")
    if refinement.factor not in FACTORS:
        raise ValueError(
            f"there is no portable code for the factor {refinement.factor!r}: only for {', '.join(FACTORS)}"
        )
    others = [name for name in refinement.variants if name not in VARIANTS]
    if others:
        raise ValueError(
            f"there is no portable code for the variant {others[0]!r}: only for {', '.join(VARIANTS)}"
        )


def classes_of(config: Any) -> Iterator[tuple[str, str]]:
    """All auto classes of Transformers for a config, and the names of the family's classes that they load."""
    for name, auto in sorted(vars(modeling_auto).items()):
        if name.startswith("AutoModel") and type(config) in getattr(auto, "_model_mapping", ()):
            model_class = auto._model_mapping[type(config)]
            yield name, model_class.__name__


def code_for(model: PreTrainedModel) -> str:
    """The module that the folder of a model carries."""
    template = Path(__file__).with_name(CODE).read_text(encoding="utf-8")
    shared = template[: template.index("ATTENTION: tuple")]
    attention = sorted({type(module).__name__ for _, module in attention_modules(model)})
    names = sorted(set(dict(classes_of(model.config)).values()))
    classes = "".join(
        f'\n\nclass {name}(Refined, transformers.{name}):\n    """{name} with refined attention."""\n'
        for name in names
    )
    return f"{shared}ATTENTION = {(*attention,)!r}\n{classes}"


def weights_of(model: PreTrainedModel, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor] | None:
    """What to save of a refined model: its weights (or those given) and its fixed strengths.

    The latter are in the config too. Among the weights they make Transformers report an unexpected tensor
    where the model is loaded as a plain one, as learned strengths do.
    """
    strengths = [layer() for _, layer in named_refinements(model)]
    if not strengths or any(layer.requires_grad for layer in strengths):
        return weights
    return {**(model.state_dict() if weights is None else weights), STRENGTHS: torch.cat(strengths).cpu()}


def add_code(model: PreTrainedModel, folder: Path) -> None:
    """Make the folder of a saved model portable: its code, and ``auto_map`` in its config."""
    (folder / CODE).write_text(code_for(model), encoding="utf-8")
    config = read_object(folder / "config.json")
    module = CODE.removesuffix(".py")
    config["auto_map"] = {auto: f"{module}.{name}" for auto, name in classes_of(model.config)}
    write_json(folder / "config.json", config)
