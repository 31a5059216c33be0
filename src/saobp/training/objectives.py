"""Training objectives: masked and causal language modelling.

Everything here has static shapes and no device sync, so that a step compiles to one graph. Masks are derived
from one seed per row, which is derived from the run's seed, the step and the row's index in the global batch:
they do not depend on the number of processes, and a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import ModernBertForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from saobp.sizes import DECODERS
from saobp.training.fast_layers import is_fused
from saobp.transformers.layer_refinement import PER_HEAD

_LOW = 0xFFFFFFFF
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
"""Odd multipliers below 2^31, so that a product with 32 bits fits into int64."""
_REPLACEMENT = 0x5BD1E995

HELD_OUT_SHARE = 0.15


def hashed(numbers: Any) -> Any:
    """Hash of 32-bit numbers, held as int64, in NumPy or PyTorch."""
    numbers = numbers & _LOW
    numbers = ((numbers ^ (numbers >> 16)) * _FIRST) & _LOW
    numbers = ((numbers ^ (numbers >> 15)) * _SECOND) & _LOW
    return numbers ^ (numbers >> 15)


def row_seeds(seed: int, step: int, rows: Iterable[int]) -> np.ndarray:
    """One seed for each row of the global batch at a step: int64 ``[rows]``."""
    start = hashed(hashed(np.int64(seed & _LOW)) + np.int64(step & _LOW))
    return hashed(start + np.asarray(rows, dtype=np.int64) * 0x9E37)


class Objective(Protocol):
    """A loss of a model on rows of tokens."""

    def __call__(
        self, model: PreTrainedModel, ids: Tensor, seeds: Tensor, precision: str, counts: Tensor | None = None
    ) -> Tensor:
        """ids ``[rows, length]``, seeds ``[rows]``; the mean loss over what is predicted, in nats.

        counts ``[rows]``: masked tokens of each row, where that changes over a run.
        """
        ...


@dataclass(frozen=True)
class MaskedLM:
    """Exactly ``round(share * length)`` tokens of each row are predicted, never special ones.

    In evaluation the share is ``HELD_OUT_SHARE``, so that losses are comparable between recipes. As in BERT,
    80 % are replaced by the mask token, 10 % by a random token, 10 % stay.
    """

    vocabulary: int
    mask: int
    special: tuple[int, ...]
    share: float = 0.15

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, share: float = 0.15) -> MaskedLM:
        if tokenizer.mask_token_id is None:
            name = getattr(tokenizer, "name_or_path", "") or "this one"
            raise ValueError(f"masked language modelling needs a tokenizer with a mask token, not {name}")
        return cls(len(tokenizer), tokenizer.mask_token_id, tuple(sorted(tokenizer.all_special_ids)), share)

    def __call__(
        self, model: PreTrainedModel, ids: Tensor, seeds: Tensor, precision: str, counts: Tensor | None = None
    ) -> Tensor:
        hiding = self if model.training else replace(self, share=HELD_OUT_SHARE)
        shown, masked_at, targets = hiding.hide(ids, seeds, counts)
        hidden = hidden_states(model, shown, precision)
        picked = hidden.gather(1, masked_at.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        scores = head_scores(model, picked, precision)
        if counts is None:
            return cross_entropy(scores, targets)
        losses = functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="none")
        counted = torch.arange(masked_at.shape[1], device=ids.device) < counts.unsqueeze(1)
        return (losses.view_as(targets) * counted).sum() / counted.sum()

    def hide(self, ids: Tensor, seeds: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Masked rows ``[rows, length]``, predicted positions and their tokens ``[rows, predicted]``.

        With counts only so many of the first positions of each row are masked.
        """
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)
        drawn = hashed(seeds.unsqueeze(1) + positions * 0x85EB)
        is_special = torch.zeros_like(ids, dtype=torch.bool)
        for token in self.special:
            is_special = is_special | (ids == token)
        ranks = drawn * length + positions - is_special * 2**48
        masked_at = ranks.topk(hidden_count(self.share, length), dim=1).indices
        targets = ids.gather(1, masked_at)
        again = hashed(drawn.gather(1, masked_at) + _REPLACEMENT)
        fate, token = again % 10, hashed(again + 1) % self.vocabulary
        replaced = torch.where(fate == 8, token, torch.where(fate == 9, targets, self.mask))
        if counts is not None:
            counted = torch.arange(masked_at.shape[1], device=ids.device) < counts.unsqueeze(1)
            replaced = torch.where(counted, replaced, targets)
        return ids.scatter(1, masked_at, replaced), masked_at, targets


@dataclass(frozen=True)
class CausalLM:
    """Every token but the first is predicted from those before it."""

    def __call__(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        seeds: Tensor,  # noqa: ARG002
        precision: str,
        counts: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        hidden = hidden_states(model, ids, precision)
        return cross_entropy(head_scores(model, hidden[:, :-1], precision), ids[:, 1:])


def hidden_count(share: float, length: int) -> int:
    """Tokens of a row that are predicted."""
    return max(1, round(share * length))


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """scores ``[rows, positions, vocabulary]``, targets ``[rows, positions]``; in float32."""
    return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def hidden_states(model: PreTrainedModel, ids: Tensor, precision: str) -> Tensor:
    """The last hidden states ``[rows, length, width]`` of full rows without padding."""
    body: Any = model.base_model
    options: dict[str, Any] = {"return_dict": True}
    if getattr(model.config, "type_vocab_size", 0):
        # Token types are broadcast: their gradient is then a plain sum over the batch.
        options["token_type_ids"] = torch.zeros(1, ids.shape[1], dtype=torch.long, device=ids.device)
    else:
        options["use_cache"] = False
    if precision == "fp32":
        return body(input_ids=ids, **options).last_hidden_state
    # Token embeddings are looked up in float32, so that gradients of frequent tokens accumulate in it.
    table = body.get_input_embeddings().weight
    options["inputs_embeds"] = functional.embedding(ids, table).to(torch.bfloat16)
    return functional_call(body, in_bfloat16(body), (), options, tie_weights=False).last_hidden_state


def head_scores(model: PreTrainedModel, hidden: Tensor, precision: str) -> Tensor:
    """Logits of the model's head for hidden states ``[rows, positions, width]``."""
    head = head_of(model)
    if precision == "fp32":
        return head(hidden)
    return functional_call(head, in_bfloat16(head), (hidden,), tie_weights=False)


def head_of(model: PreTrainedModel) -> nn.Module:
    """The module from hidden states to logits."""
    for name in ("cls", "lm_head"):
        head = getattr(model, name, None)
        if isinstance(head, nn.Module):
            return head
    if isinstance(model, ModernBertForMaskedLM):
        return nn.Sequential(model.head, model.decoder)
    raise ValueError(
        f"{type(model).__name__} has no head named cls or lm_head, so its loss cannot be taken at chosen "
        "places: pretrain BERT, ModernBERT, GPT-2 or a model shaped like them"
    )


def in_bfloat16(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters cast for one step, under all their names; gradients reach the originals.

    Except strengths and other per-head parameters, and weights of fused layers, which are cast together on
    use.
    """
    fused = [name for name, layer in module.named_modules() if is_fused(layer)]
    return {
        name: parameter.to(torch.bfloat16)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not name.endswith(PER_HEAD) and name.rpartition(".")[0] not in fused
    }


def objective_of(family: str, tokenizer: PreTrainedTokenizerBase, share: float) -> Objective:
    return CausalLM() if family in DECODERS else MaskedLM.of(tokenizer, share)
