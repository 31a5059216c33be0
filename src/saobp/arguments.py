"""The arguments of the public functions, read and checked: one sentence for each that is wrong."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from saobp.propagation.factors import Similarity, get_factor, has_strength
from saobp.propagation.graph import FactorGraph
from saobp.refinement import NO_CAUSAL_STRIDE, Refinement

NEUTRAL_ARGUMENTS = frozenset(
    {
        *("cache_position", "deterministic", "ignore_index", "logits_to_keep", "num_items_in_batch"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings"),
        *("position_ids", "return_dict", "shift_labels", "token_type_ids", "tokenizer", "use_cache"),
    }
)
"""Arguments that Transformers' models pass on to attention functions and that do not change attention."""

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of states; narrower ones are for storage."""
NUMBERS = (float, int, torch.SymFloat, Real)

Given = TypeVar("Given")


class BoundedStrength(NamedTuple):
    """Strengths ``[heads]``, and for the kernels an upper bound if one is known and no head's is negative."""

    values: Tensor
    strongest: float | None


def read_strength(
    refinement: Refinement,
    strength: Tensor | BoundedStrength | None,
    heads: int,
    device: torch.device,
    *,
    by_step: bool = False,
) -> BoundedStrength:
    """The strength of each head: the given one, or that of the refinement.

    ``by_step`` allows ``[steps, heads]``, also as ``[steps, 1, heads, 1, 1]``.
    """
    bound = refinement.strongest if strength is None else None
    if isinstance(strength, BoundedStrength):
        strength, bound = strength
    if strength is not None:
        if not isinstance(strength, Tensor) or strength.is_complex():
            raise ValueError(f"strength must be a tensor of one real number per head, not {_kind(strength)}")
        steps = len(strength) if strength.ndim else 0
        if (
            by_step
            and strength.shape in ((steps, heads), (steps, 1, heads, 1, 1))
            and 1 <= steps <= refinement.steps
        ):
            strength = strength.reshape(steps, heads) if steps > 1 else strength.reshape(heads)
            return BoundedStrength(strength.to(device), bound)
        if strength.shape != (heads,):
            several = f", or (steps, {heads}) for at most {refinement.steps} steps"
            raise ValueError(
                f"strength must have shape ({heads},), one per head"
                f"{several if by_step and refinement.steps > 1 else ''}, not {tuple(strength.shape)}"
            )
        return BoundedStrength(strength.to(device), bound)
    if not has_strength(refinement.factor):
        return BoundedStrength(torch.zeros(heads, device=device), bound)
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    if isinstance(refinement.strength, float):
        # No copy from the host, so that a CUDA graph can capture it.
        return BoundedStrength(torch.full((heads,), refinement.strength, dtype=dtype, device=device), bound)
    return BoundedStrength(refinement.layer_strengths(0, 1, heads).to(dtype).to(device), bound)


def check_no_variants(refinement: Refinement) -> None:
    if refinement.variants:
        raise ValueError(
            f"{', '.join(refinement.variants)} has parameters or inputs that only a model has: use "
            "saobp.apply(model, refinement)"
        )


def require_tensors(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Tensor):
            cure = ": torch.from_numpy(array) makes one" if type(value).__module__ == "numpy" else ""
            raise TypeError(f"{name} must be a torch.Tensor, not {_kind(value)}{cure}")


def under_autocast(*states: Tensor) -> tuple[Tensor, ...]:
    """The states in the precision of autocast, which casts for PyTorch's attention but not for this one.

    Rotary positions leave queries and keys in single precision while values are in half.
    """
    device_type = states[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return states
    half = torch.get_autocast_dtype(device_type)
    return tuple(
        state.to(half) if state.is_floating_point() and state.dtype != torch.float64 else state
        for state in states
    )


def check_states(query: Tensor, key: Tensor, value: Tensor) -> None:
    if any(states.layout is not torch.strided or states.is_nested for states in (query, key, value)):
        raise ValueError("query, key and value must be dense tensors, neither sparse nor nested")
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(
            f"query, key and value must be [batch, heads, length, dim], not {_shapes(query, key, value)}"
        )
    if not (query.dtype == key.dtype == value.dtype and query.dtype in FLOATING):
        dtypes = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"query, key and value must share one floating-point type, not {dtypes}")
    if not query.device == key.device == value.device:
        where = f"{query.device}, {key.device} and {value.device}"
        raise ValueError(f"query, key and value must be on the same device, not {where}")
    (batch, heads, _, dim), (key_batch, key_heads, keys, key_dim) = query.shape, key.shape
    if batch != key_batch or dim != key_dim or value.shape[:3] != (batch, key_heads, keys):
        raise ValueError(f"query, key and value do not fit together: {_shapes(query, key, value)}")
    if dim == 0:
        raise ValueError(f"query and key must have a head size of at least 1: {_shapes(query, key, value)}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"query heads must be a multiple of key heads, not {heads} and {key_heads}")


def check_causal(is_causal: bool) -> None:
    if isinstance(is_causal, Tensor) or is_causal not in (True, False):
        raise ValueError(f"is_causal must be True or False, not {is_causal!r}")


def check_numbers(is_causal: bool, dropout_p: float, scale: float | None) -> None:
    check_causal(is_causal)
    if not isinstance(dropout_p, NUMBERS) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must lie from 0 up to but not including 1, not {dropout_p}")
    if scale is not None and not (isinstance(scale, NUMBERS) and -math.inf < scale < math.inf):
        cure = ": multiply the query by a tensor" if isinstance(scale, Tensor) else ""
        raise ValueError(f"scale must be a finite number, not {scale}{cure}")


def check_lengths(queries: int, keys: int, refinement: Refinement, is_causal: bool) -> None:
    if is_causal and refinement.message_stride > 1:
        raise ValueError(NO_CAUSAL_STRIDE)
    factor = get_factor(refinement.factor)
    if queries != keys and is_causal and factor is not None and factor.remembers:
        raise ValueError(
            f"causal {refinement.factor!r} with {queries} queries and {keys} keys lacks the messages of the "
            "earlier rows: pass all rows, or decode through a model that saobp.apply has prepared"
        )
    if queries > keys and is_causal:
        raise ValueError(f"causal attention needs at least as many keys as queries, not {keys} and {queries}")
    in_order = is_causal and refinement.future == "strict"
    if factor is not None and (why := factor.obstacle(queries, keys, in_order)) is not None:
        raise ValueError(why)


def read_padding(
    attention_mask: Tensor | None,
    padding_mask: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor | None:
    """The padding mask under either of its names, checked, as bool: True for real tokens."""
    name = "attention_mask" if padding_mask is None else "padding_mask"
    mask = one_of("attention_mask", attention_mask, "padding_mask", padding_mask)
    if mask is None:
        return None
    mask = read_zeros_and_ones(name, mask)
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, not {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"{name} must be on {device} like the rest, not on {mask.device}")
    return mask


def one_of(name: str, given: Given | None, older: str, given_as_older: Given | None) -> Given | None:
    """The argument under its name or its older name."""
    if given is not None and given_as_older is not None:
        raise ValueError(f"{older} is the older name of {name}: give one of the two")
    return given if given_as_older is None else given_as_older


def read_zeros_and_ones(name: str, mask: Tensor) -> Tensor:
    """A mask of 0 and 1 in any type as bool. Values are checked on a CPU only: a GPU would need a sync."""
    if not isinstance(mask, Tensor) or mask.is_complex():
        raise ValueError(f"{name} must be a tensor of True or 1 for real tokens, not {_kind(mask)}")
    if mask.dtype == torch.bool:
        return mask
    real = mask == 1
    readable = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and not bool((real | (mask == 0)).all()):
        raise ValueError(
            f"{name} must hold only 1 for real tokens and 0 for padding, unlike this mask of {mask.dtype}: "
            "numbers to add to the scores are attn_mask"
        )
    return real


def read_attn_mask(
    mask: Tensor, shape: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Visible entries, bool, and the bias added to the scores; both broadcast to ``shape``."""
    require_tensors(attn_mask=mask)
    if mask.dtype != torch.bool and mask.dtype not in FLOATING:
        raise ValueError(
            f"attn_mask must be bool (True: attend) or floating point (added to scores), not {mask.dtype}"
        )
    fits = 2 <= mask.ndim <= 4 and all(
        mask_size in (1, size) for mask_size, size in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to [batch, heads, queries, keys] {shape}, unlike {tuple(mask.shape)}; "
            "[batch, keys] with 1 for real tokens is attention_mask"
        )
    if mask.device != device:
        raise ValueError(f"attn_mask must be on {device} like the rest, not on {mask.device}")
    mask = four_dimensional(mask)
    mask = mask.expand(*mask.shape[:3], shape[-1])
    if mask.dtype == torch.bool:
        return mask, None
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden, mask.masked_fill(hidden, 0.0)


def four_dimensional(mask: Tensor) -> Tensor:
    """A mask that broadcasts to ``[batch, heads, queries, keys]``, with all four dimensions."""
    return mask.view(*[1] * (4 - mask.ndim), *mask.shape)


def read_window(window: int | None, queries: int, keys: int) -> int | None:
    """A sliding window that hides something, else None."""
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int | torch.SymInt) or window < 1:
        raise ValueError(f"sliding_window must be a whole number of keys, at least 1, not {window!r}")
    if queries > keys:
        raise ValueError(f"sliding_window needs at least as many keys as queries, not {keys} and {queries}")
    return window if window < keys else None


def check_symmetric_mask(graph: FactorGraph, refinement: Refinement, is_causal: bool) -> None:
    """Raises on a mask that is not symmetric between nodes, unless messages are causal.

    Every row receives messages of all others, so a row would learn about tokens that are hidden from it.
    """
    factor = get_factor(refinement.factor)
    if is_causal or factor is None or not factor.remembers or isinstance(factor, Similarity):
        return
    visible, senders = graph.visible, graph.senders
    if visible is None or senders is None:
        return
    nodes = senders & visible.any(-1, keepdim=True)
    visible = visible.expand(*visible.shape[:-2], visible.shape[-1], visible.shape[-1])
    two_way = ~(visible & ~visible.mT & nodes & nodes.mT).any()
    sentence = (
        "attn_mask lets one row see another's token but not the reverse, as a causal mask does, so rows "
        "would receive messages about tokens hidden from them: pass is_causal=True, or a mask that is "
        "symmetric; in a model, is_causal is an attribute of each attention module"
    )
    if torch.compiler.is_compiling():
        torch._assert_async(two_way, sentence)
    elif not two_way.is_meta and not bool(two_way):
        raise ValueError(sentence)


def check_not_decoder(module: nn.Module) -> None:
    """Raises for a decoder's attention that says it is not causal (BigBirdPegasus).

    Its masks hide later keys, but a causal mask without padding may be left out, as for PyTorch's attention.
    """
    config = getattr(module, "config", None)
    if getattr(module, "is_decoder", False) and getattr(config, "is_causal", None) is not False:
        raise ValueError(
            f"{type(module).__name__} belongs to a decoder and says that it is not causal (is_causal), so "
            "saobp cannot tell whether rows may see later keys"
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _kind(given: object) -> str:
    return str(given.dtype) if isinstance(given, Tensor) else type(given).__name__
