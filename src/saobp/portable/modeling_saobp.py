"""Self-attention refined by belief propagation, in plain PyTorch: the code of the model in this folder.

Each row of attention is a node that chooses a key. Its softmax A is the prior; it sends the other rows the
message 1 - gamma A_ik about key k, with gamma = 1 - e^(-strength); a refined row is its prior times the
messages of all others, normalised. Causal rows receive messages of earlier rows only, so a cache carries one
more number per head and key.

Written by saobp. Where that package is installed, the model runs by it instead, which is faster.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import causal_mask_function, sdpa_mask

try:
    from saobp.transformers.load import attach_saved
except ImportError:
    attach_saved = None  # type: ignore[assignment]

NAME = "saobp-portable"
"""Name of this attention in Transformers' registries."""
MAX_STRENGTH = 16.0
SIGNS = {"high": 1, "low": -1, "high-listing": 1, "low-listing": -1, "high-key-bias": 1, "low-key-bias": -1}
KNOWN_ARGUMENTS = (
    *("cache_position", "deterministic", "ignore_index", "logits_to_keep", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings"),
    *("position_ids", "return_dict", "shift_labels", "token_type_ids", "tokenizer", "use_cache"),
)
"""Arguments of a call that do not change attention."""


class Graph:
    """Which keys rows see, which rows are nodes, and whether they receive messages of earlier rows only.

    visible: bool, broadcastable to ``[batch, heads, rows, keys]``, or None for all
    senders: bool, broadcastable to ``[batch, heads, rows, 1]``: False for padding; None for all
    """

    def __init__(self, visible: Tensor | None, senders: Tensor | None, causal: bool) -> None:
        self.visible, self.senders, self.causal = visible, senders, causal

    def mask_scores(self, scores: Tensor) -> Tensor:
        """Minus infinity where a row cannot see; rows that see nothing become 0."""
        if self.visible is None:
            return scores
        scores = scores.masked_fill(~self.visible, float("-inf"))
        return scores.masked_fill(~self.visible.any(-1, keepdim=True), 0.0)

    def mask_rows(self, rows: Tensor) -> Tensor:
        return rows if self.visible is None else rows.masked_fill(~self.visible, 0.0)

    def mask_messages(self, messages: Tensor) -> Tensor:
        """Log messages, 0 for padding rows and for keys that the row cannot see."""
        messages = self.mask_rows(messages)
        return messages if self.senders is None else messages.masked_fill(~self.senders, 0.0)

    def incoming(self, messages: Tensor, own: bool, past: Tensor | None, stride: int) -> Tensor:
        """Sum of the log messages that each row receives; ``past`` are those of rows in the cache.

        Every ``stride``-th node sends; its message counts for the number of nodes over that of sending ones.
        """
        messages = self.mask_messages(messages)
        if stride > 1:
            nodes = messages.new_ones(messages.shape[-2], 1, dtype=torch.bool)
            for real in (self.senders, None if self.visible is None else self.visible.any(-1, keepdim=True)):
                nodes = nodes if real is None else nodes & real
            sends = nodes & ((nodes.cumsum(-2) - 1) % stride == 0)
            counts = [some.sum(-2, keepdim=True, dtype=messages.dtype) for some in (nodes, sends)]
            messages = messages * sends * (counts[0] / counts[1].clamp(min=1))
        if not self.causal:
            total = messages.sum(-2, keepdim=True)
            return total if own else total - messages
        so_far = messages.cumsum(-2)
        received = so_far if own else functional.pad(so_far[..., :-1, :], (0, 0, 1, 0))
        return received if past is None else received + past.unsqueeze(-2)


def log_messages(rows: Tensor, repulsion: Tensor) -> Tensor:
    """log(1 - gamma A), and near A = 1, where that cancels, log(1 - A + A e^(-repulsion))."""
    near_one = rows > 0.5
    small = rows.masked_fill(near_one, 0.0)
    kept = small.sum(-1, keepdim=True) + rows * torch.exp(-repulsion)
    return torch.where(near_one, kept, 1.0).log() + torch.log1p(small * torch.expm1(-repulsion))


def log_similarity(rows: Tensor) -> Tensor:
    """Logarithm of A A^T, finite where two rows share no key."""
    precision = torch.finfo(rows.dtype)
    return torch.log((rows @ rows.mT).clamp(min=precision.tiny / precision.eps))


class CallState(threading.local):
    """What ``bind`` leaves for the attention function, for each thread; copies and pickles start empty."""

    messages: Messages | None = None
    inputs: Tensor | None = None

    def __reduce__(self) -> tuple[type[CallState], tuple[()]]:
        return CallState, ()


class LayerRefinement(nn.Module):
    """The refinement of one attention module: a strength per head, learned or fixed, and variants."""

    def __init__(self, saved: dict[str, Any], layer: int, heads: int, width: int) -> None:
        super().__init__()
        self.factor, self.steps, self.damping = saved["factor"], saved["steps"], saved["damping"]
        self.stride = saved.get("message_stride", 1)
        strength = saved["strength"]
        self.fixed: list[float] = []
        if strength == "learned":
            self.strength_bias = nn.Parameter(torch.zeros(heads))
        elif self.factor in SIGNS:
            own = strength[layer] if isinstance(strength, list) else strength
            self.fixed = own if isinstance(own, list) else [own] * heads
        per_head: dict[str, tuple[int, ...]] = {"head_bias": (heads,)}
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "temperature": per_head,
            "qk-norm": per_head,
            "gate": {"gate_weight": (heads, width), "gate_bias": (heads,)},
            "sink": per_head,
            "softmax-plus-one": {},
        }
        self.variants: Any = nn.ModuleDict(
            {
                name: nn.ParameterDict({key: torch.zeros(shape) for key, shape in shapes[name].items()})
                for name in saved.get("variants", [])
            }
        )
        self.call = CallState()

    @property
    def remembers(self) -> bool:
        """Whether rows receive messages of other rows, which a cache must carry."""
        return self.factor != "none" and not self.factor.endswith("-listing")

    def strengths(self, scores: Tensor) -> Tensor:
        """Repulsion of each head, ``[heads, 1, 1]`` in the precision of scores."""
        own = self.strength_bias if not self.fixed else scores.new_tensor(self.fixed, dtype=torch.float32)
        return SIGNS[self.factor] * own.to(scores).clamp(-MAX_STRENGTH, MAX_STRENGTH).view(-1, 1, 1)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Output ``[batch, rows, heads, dim]`` and refined rows ``[batch, heads, rows, keys]``."""
        for name, given in kwargs.items():
            if name not in KNOWN_ARGUMENTS and given is not None and given is not False:
                raise ValueError(
                    f"{type(module).__name__} passes {name!r}, which refined attention cannot honour"
                )
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            half = torch.get_autocast_dtype(kind)
            query, key, value = query.to(half), key.to(half), value.to(half)
        with torch.autocast(kind, enabled=False):
            query, key = self.changed_states(query, key)
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            scores = query @ key.mT * scale
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            causal = is_causal_call(module, is_causal)
            graph, bias = read_mask(
                mask, query.shape[-2], key.shape[-2], causal, sliding_window, query.device
            )
            rows = self.refined(scores if bias is None else scores + bias, graph).to(query.dtype)
            output = functional.dropout(rows, dropout) @ value
            output = self.gated(output).transpose(1, 2).contiguous()
        return output, rows

    def changed_states(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with their root mean square divided out, and the temperature of each head."""
        for name in ("temperature", "qk-norm"):
            if name in self.variants:
                if name == "qk-norm":
                    query, key = (functional.rms_norm(x, x.shape[-1:], eps=1e-6) for x in (query, key))
                query = query * self.variants[name]["head_bias"].exp().view(-1, 1, 1).to(query.dtype)
        return query, key

    def gated(self, output: Tensor) -> Tensor:
        inputs, self.call.inputs = self.call.inputs, None
        if "gate" not in self.variants or inputs is None:
            return output
        gate = self.variants["gate"]
        gates = functional.linear(
            inputs.to(gate["gate_weight"].dtype), gate["gate_weight"], gate["gate_bias"]
        )
        return output * gates.sigmoid().mT.unsqueeze(-1).to(output.dtype)

    def refined(self, scores: Tensor, graph: Graph) -> Tensor:
        """Refined rows of scores ``[batch, heads, rows, keys]``; adds their messages to the cache."""
        messages, self.call.messages = self.call.messages, None
        past = None if messages is None else messages.past
        log_prior = torch.log_softmax(graph.mask_scores(scores), -1)
        rows = graph.mask_rows(log_prior.exp())
        for name in ("sink", "softmax-plus-one"):
            if name in self.variants:
                logit = (
                    self.variants[name]["head_bias"].to(scores.dtype).view(-1, 1) if name == "sink" else 0.0
                )
                return rows * torch.sigmoid(graph.mask_scores(scores).logsumexp(-1) - logit).unsqueeze(-1)
        if self.factor == "none":
            return rows
        totals = []
        for step in range(self.steps):
            if self.factor in SIGNS:
                sent = log_messages(rows, self.strengths(scores))
                earlier = None if past is None else past[step]
                if messages is not None:
                    here = graph.mask_messages(sent).sum(-2)
                    totals.append(here if earlier is None else here + earlier)
                if self.factor.endswith("-listing"):
                    log_belief = log_prior - graph.mask_messages(sent)
                else:
                    own = self.factor.endswith("-key-bias")
                    log_belief = log_prior + graph.incoming(sent, own, earlier, self.stride)
            else:
                log_belief = log_similarity(rows) + (log_prior if self.factor == "elemmul-prior" else 0.0)
            updated = graph.mask_rows(torch.softmax(graph.mask_scores(log_belief), -1))
            rows = (
                updated if self.damping == 0 or self.steps == 1 else torch.lerp(updated, rows, self.damping)
            )
        if messages is not None:
            messages.store(torch.stack(totals))
        return rows


def is_causal_call(module: nn.Module, is_causal: bool | None = None) -> bool:
    """Whether rows see earlier keys only: from the call, else the module and its config."""
    if is_causal is not None:
        return is_causal
    config_says = getattr(getattr(module, "config", None), "is_causal", None)
    return bool(getattr(module, "is_causal", True)) and config_says is not False


def read_mask(
    mask: Tensor | None, rows: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> tuple[Graph, Tensor | None]:
    """The graph of a call from a mask of :func:`refined_mask` or of the user, and numbers added to scores."""
    if mask is None:
        if (causal and rows != keys) or (window is not None and window < keys):
            raise ValueError("a missing mask does not say which keys the rows see: pass an attention mask")
        triangle = torch.ones(rows, keys, dtype=torch.bool, device=device).tril() if causal else None
        return Graph(triangle, None, causal), None
    if mask.ndim != 4:
        raise ValueError(f"masks are [batch, keys] or [batch, heads, rows, keys], not {tuple(mask.shape)}")
    mask, bias = mask[..., :keys], None
    if mask.dtype == torch.int8:
        return Graph(mask != 0, ~(mask == 2).any(-1, keepdim=True), causal), None
    seen = mask
    if mask.is_floating_point():
        seen = mask > torch.finfo(mask.dtype).min / 2
        bias = mask.masked_fill(~seen, 0.0)
    return Graph(seen, seen.any(-2).unsqueeze(-1) if rows == keys else None, causal), bias


def refined_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``[batch, 1, rows, keys]``: bool without padding; else int8, 0 hidden, 1 seen, 2 by a padding row."""
    seen: Any = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=kwargs.get("use_vmap", False),
        device=kwargs.get("device", "cpu"),
    )
    if attention_mask is None:
        return seen
    missing = max(kv_length + kv_offset - attention_mask.shape[-1], 0)
    own = torch.arange(q_length, device=attention_mask.device) + q_offset
    real = functional.pad(attention_mask, (0, missing)).index_select(1, own)
    return seen.to(torch.int8) * torch.where(real, 1, 2).to(torch.int8)[:, None, :, None]


class Messages:
    """Mixin for a growing cache layer: the sum of all rows' log messages about each key it holds.

    totals: ``[steps, batch, heads, keys]``; past: the same for the keys of a call, 0 for its new ones
    """

    totals: Tensor | None = None
    past: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if self.totals is not None:
            self.past = functional.pad(self.totals, (0, key_states.shape[-2]))[..., -states[0].shape[-2] :]
        return states

    def store(self, totals: Tensor) -> None:
        self.totals = totals[..., -self.keys.shape[-2] :]  # type: ignore[attr-defined]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.totals = None if self.totals is None else self.totals.index_select(1, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.totals = None if self.totals is None else self.totals.repeat_interleave(repeats, 1)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.totals = None if self.totals is None else self.totals[:, indices]

    def crop(self, *_: Any) -> None:
        raise ValueError(
            "taking rows back from the cache of refined attention needs the package saobp: install it"
        )

    def reset(self) -> None:
        raise ValueError("start a new cache: that of refined attention is not used again")


class MessageLayer(Messages, DynamicLayer):
    pass


class MessageSlidingLayer(Messages, DynamicSlidingWindowLayer):
    pass


LAYERS: dict[type, Any] = {DynamicLayer: MessageLayer, DynamicSlidingWindowLayer: MessageSlidingLayer}


def message_layer(cache: Cache, index: int) -> Messages:
    """The cache's layer of that index, replaced on first use by one that also stores messages."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if isinstance(layer, Messages):
        return layer
    kind = LAYERS.get(type(layer))
    if kind is None or layer.is_initialized:
        raise ValueError(
            f"refined attention cannot carry its messages in this {type(layer).__name__}: start from "
            "an empty DynamicCache, install saobp for static caches, or generate with use_cache=False"
        )
    replacement = kind.__new__(kind)
    replacement.__dict__.update(layer.__dict__)
    cache.layers[index] = replacement
    return replacement


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention module: its inputs and cache, which its function does not get."""
    own: Any = module.saobp
    own.call.inputs = (args[0] if args else kwargs["hidden_states"]) if "gate" in own.variants else None
    own.call.messages = None
    cache: Any = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is None or not own.remembers:
        return
    cache = getattr(cache, "self_attention_cache", cache)
    if own.factor in SIGNS and is_causal_call(module):
        own.call.messages = message_layer(cache, module.layer_idx)  # type: ignore[arg-type]
    elif cache.get_seq_length(module.layer_idx) > 0:
        raise ValueError(f"{own.factor!r} needs all rows at once: generate with use_cache=False")


def refined_attention(module: nn.Module, *states: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The registered function. A module's own refinement attends: other folders may carry other versions."""
    return module.saobp.attend(module, *states, **options)  # type: ignore[union-attr, operator]


AttentionInterface.register(NAME, refined_attention)
AttentionMaskInterface.register(NAME, refined_mask)


class Refined:
    """Mixin for a model class of Transformers: refines the attention that ``config.saobp`` describes."""

    saobp_attaches_itself = True
    _supports_flash_attn = False
    _keys_to_ignore_on_load_unexpected = (r"saobp\.strengths",)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config._attn_implementation = None
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model: Any = self
        if attach_saved is not None:
            attach_saved(model)
            return
        modules = [module for module in model.modules() if type(module).__name__ in ATTENTION]
        if not modules:
            raise ValueError(f"this version of Transformers has none of {', '.join(ATTENTION)}")
        for layer, module in enumerate(modules):
            own = module.config
            module.saobp = LayerRefinement(config.saobp, layer, own.num_attention_heads, own.hidden_size)
            module.register_forward_pre_hook(bind, with_kwargs=True)
        for part in model.modules():
            if isinstance(part, transformers.PreTrainedModel):
                part.config._attn_implementation_internal = NAME
                part.config.attn_implementation = "saobp"

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        lost = [key for key in info["missing_keys"] if ".saobp." in key]
        if lost:
            raise ValueError(f"this checkpoint lacks its learned strengths ({lost[0]}, ...)")
        return (model, info) if output_loading_info else model

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        if attach_saved is None and attn_implementation != NAME:
            raise ValueError(f"attention of this model is refined, which {attn_implementation!r} is not")
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]


ATTENTION: tuple[str, ...] = ()
"""Classes of the family's attention modules."""
