"""Which path a call takes, and why: the one place that decides. Nothing here imports Triton or the kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import threading
from collections.abc import Iterator

import torch

from saobp.kernels.call_spec import JOINT, SHORT, WHOLE, CallNumbers, CallSpec, is_short, padded_keys
from saobp.kernels.calls import POTTS, Call, Family, KernelChoice, Path
from saobp.propagation.cpu_inference import cpu_obstacle
from saobp.refinement import MAX_STRENGTH, NO_CAUSAL_STRIDE, Refinement

TRITON_FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Both are read once at import: ``torch.compile`` cannot trace such checks."""
LACKS_BFLOAT16 = INTERPRETED
"""Triton's interpreter computes bfloat16 wrongly; a test that mends it sets this."""

MAX_STEPS = 4
"""The kernels for several steps hold the beliefs of every step of a tile in registers."""

HALF_MAX_STRENGTH = 8.0
"""Beyond this strength weights and gradients of single entries leave the range of float16."""

CHUNKED_MIN_LENGTH = 128
"""Minimum tokens on a CPU of causal ElemMul in chunks of rows; with fewer its whole maps, in a cache, take less time."""


def select(call: Call) -> Path:
    """The path of a call. Raises if backend='fused' and the kernels do not support it."""
    if call.backend not in ("auto", "reference", "fused"):
        raise ValueError(f"unknown backend {call.backend!r}: choose 'auto', 'reference' or 'fused'")
    if call.backend == "reference":
        return Path("reference", call)
    obstacle: str | None = f"the tensors are on {call.device}, not on a CUDA GPU"
    if call.backend == "fused" or call.device == "cuda":
        obstacle = fused_obstacle(call)
        if obstacle is None:
            longest = call.query[2] if call.longest is None else call.longest
            kernels = family(call.refinement, call.is_causal, longest, call.query[3], call.dtype)
            return Path("fused", call, "masked" if call.is_masked else kernels)
        if call.backend == "fused":
            raise ValueError(f"the fused backend cannot do this call because {obstacle}")
    if call.refinement.is_plain and (call.device == "cuda" or call.values_only):
        return Path("torch", call, obstacle=obstacle)
    causal_elemmul = call.refinement.factor == "elemmul" and call.is_causal
    if causal_elemmul and (obstacle := chunk_obstacle(call)) is None:
        return Path("chunked", call)
    if call.device != "cpu":
        return Path("reference", call, obstacle=obstacle)
    if call.values_only:
        obstacle = cpu_obstacle(call.refinement, call.query, call.key, call.value, call.dropout_p)
        if call.has_bias:
            obstacle = "attn_mask adds numbers to the scores"
        return Path("reference" if obstacle else "cpu inference", call, obstacle=obstacle)
    if not causal_elemmul:
        obstacle = "a gradient, autocast, a tensor subclass, a tracer or torch.compile needs the reference's operations"
    return Path("reference", call, obstacle=obstacle)


def chunk_obstacle(call: Call) -> str | None:
    """Why causal ElemMul is not computed in chunks of rows, in words that fit behind 'because'; None if it is."""
    if call.device not in ("cuda", "cpu"):
        return f"the tensors are on {call.device}, neither on a CUDA GPU nor on a CPU"
    if call.traced:
        return (
            "a tensor subclass, a tracer, a forward derivative or torch.func needs the reference's operations"
        )
    if call.is_masked:
        what = "attn_mask" if call.has_attn_mask else f"a sliding window of {call.window}"
        return f"chunks of rows of causal 'elemmul' do not know {what}"
    if call.dropout_p:
        return "dropout on 'elemmul' needs the entries of A A^T, which chunks of rows never form"
    if call.refinement.steps > 1:
        return (
            f"{call.refinement.steps} steps were asked for and chunks of rows of causal 'elemmul' are for one"
        )
    if 0 in call.query or 0 in call.value:
        return "there is nothing to compute"
    longest = call.query[2] if call.longest is None else call.longest
    if call.device == "cpu" and longest < CHUNKED_MIN_LENGTH:
        return f"whole maps of up to {CHUNKED_MIN_LENGTH - 1} tokens take less time than chunks of rows"
    return None


def fused_obstacle(call: Call) -> str | None:
    """Why the kernels do not support this call, in words that fit behind 'because'; None if they do."""
    query, key, value, dtype, device, refinement = call[:6]
    factor = refinement.factor
    if not TRITON_FOUND:
        return "Triton is not installed"
    if device != "cuda" and not INTERPRETED:
        return f"the tensors are on {device}, not on a CUDA GPU"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{dtype} is not float16, bfloat16 or float32"
    if LACKS_BFLOAT16 and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if factor not in POTTS and factor != "elemmul":
        return f"factor {factor!r} has no kernel"
    if call.is_masked and (why := _masked_obstacle(call)) is not None:
        return why
    if factor == "elemmul" and call.is_causal:
        return "causal 'elemmul' has no kernel: backend='auto' computes it in chunks of rows"
    if factor == "elemmul" and call.dropout_p:
        return "dropout on 'elemmul' needs the entries of A A^T, which its kernels never form"
    known = 0.0 if call.strongest is None or factor not in POTTS else call.strongest
    if known > HALF_MAX_STRENGTH and dtype != torch.float32:
        return f"strength {known:g} is more than the {HALF_MAX_STRENGTH:g} that {dtype} has range for"
    if refinement.steps > 1 and known * refinement.steps > HALF_MAX_STRENGTH and not _holds_map(call):
        return (
            f"strength {known:g} in {refinement.steps} steps leaves rows with all weight on one key no digits"
        )
    if refinement.steps > 1 and refinement.message_stride > 1:
        return "several steps with messages from a part of the rows have no kernel"
    if refinement.steps > MAX_STEPS:
        return f"{refinement.steps} steps were asked for and the kernels do up to {MAX_STEPS}"
    if refinement.steps > 1 and (call.is_causal or factor == "elemmul"):
        what = "causal attention" if call.is_causal else "'elemmul'"
        return f"{refinement.steps} steps were asked for and the kernels of {what} do one"
    if call.is_causal and refinement.future == "paper" and POTTS[factor][1]:
        return "the leaking form of causal attention has no kernel"
    if call.is_causal and refinement.message_stride > 1:
        return NO_CAUSAL_STRIDE
    if query[2] != key[2]:
        return f"{query[2]} queries and {key[2]} keys differ in number"
    if value[3] != query[3]:
        return f"keys of size {query[3]} and values of size {value[3]} differ"
    if not 1 <= query[3] <= 256:
        return f"head size {query[3]} is not between 1 and 256"
    if call.scale is not None and call.scale <= 0:
        return f"scale {call.scale} is not positive"
    if 0 in query:
        return "there is nothing to compute"
    return None


def _holds_map(call: Call) -> bool:
    """Whether a program holds a head's whole map, so that steps lose no digits."""
    longest = call.query[2] if call.longest is None else call.longest
    return is_short(longest, call.query[3], call.dtype)


def _masked_obstacle(call: Call) -> str | None:
    """Why the kernels for windows and masks do not support a call."""
    what = "attn_mask" if call.has_attn_mask else f"a sliding window of {call.window}"
    if call.refinement.factor not in POTTS:
        return f"factor {call.refinement.factor!r} has no kernel for {what}"
    if call.is_causal and POTTS[call.refinement.factor][1] == 2:
        return f"causal attention with a key bias has no kernel for {what}"
    if call.is_causal and call.has_attn_mask:
        return "causal attention with attn_mask has no kernel: there each row needs its own sums of earlier messages"
    if call.refinement.steps != 1:
        return f"{call.refinement.steps} steps with {what} have no kernel"
    if call.refinement.message_stride > 1:
        return f"messages from a part of the rows have no kernel for {what}"
    return None


def decoding_obstacle(call: Call) -> str | None:
    """Why the kernels do not do a decoding step, one row against a cache; None if they do."""
    query, key, value, dtype, device, refinement = call[:6]
    if not TRITON_FOUND:
        return "Triton is not installed"
    if 0 in query or 0 in key:
        return "there is nothing to compute"
    if device != "cuda" and not (INTERPRETED and call.backend == "fused"):
        return f"the tensors are on {device}, not on a CUDA GPU"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32) or (
        LACKS_BFLOAT16 and dtype == torch.bfloat16
    ):
        return f"{dtype} has no kernel"
    if dtype == torch.float32 and call.backend != "fused":
        return "in float32 the kernel has more than twice the error of eager attention"
    if query[2] != 1:
        return f"{query[2]} rows are new and the kernel does one"
    if POTTS.get(refinement.factor, (0.0, 0))[1] != 1 or refinement.future != "strict":
        return f"factor {refinement.factor!r}, future {refinement.future!r} has no kernel for decoding"
    if refinement.steps != 1 or call.dropout_p:
        return "several steps and dropout have no kernel for decoding"
    if value[3] != query[3] or query[3] % 8 or query[3] > 256:
        return f"head sizes {query[3]} of keys and {value[3]} of values have no kernel for decoding"
    return None


def family(refinement: Refinement, is_causal: bool, longest: int, dim: int, dtype: torch.dtype) -> Family:
    """Kernel family of a supported call."""
    if refinement.factor == "elemmul":
        return "elemmul"
    short = is_short(longest, dim, dtype)
    if refinement.steps > 1:
        return "short steps" if short else "steps"
    if is_causal:
        return "short causal" if short else "causal"
    if refinement.message_stride > 1 and not short:
        return "key bias"
    return "short" if short else "long"


def numbers_of(
    refinement: Refinement, longest: int, dim: int, scale: float | None, dropout_p: float, strongest: float | None
) -> CallNumbers:  # fmt: skip
    """Scalar arguments of the operators. The bound is set only for strengths without gradient: kernels given a bound
    compute none."""
    sign, receives = POTTS.get(refinement.factor, (1.0, 0))
    known = strongest is not None and refinement.factor in POTTS
    bound = -math.expm1(-sign * min(strongest, MAX_STRENGTH)) if known and strongest is not None else 0.0
    scale, damping = (
        dim**-0.5 if scale is None else scale,
        refinement.damping if refinement.steps > 1 else 0.0,
    )
    return CallNumbers(
        longest, scale, dropout_p, sign, receives, bound, refinement.steps, damping, refinement.message_stride
    )


HOPPER = 90
ANY_STRENGTH_DTYPE = torch.bfloat16
"""The Hopper kernel takes any strength in this type only: inverse messages and factors of keys need its exponent range."""
HOPPER_MIN_HEADS = 2048
"""Minimum heads for the Hopper kernels of up to 128 tokens. Each tensor descriptor, four forward and seven backward, costs the
host 11 microseconds per launch; with fewer heads ``short_weak_forward`` is done before four of them are built."""
WHOLE_MIN_HEADS = 512
"""Minimum heads for the Hopper kernel of 129 to 256 tokens; inside ``for_cuda_graph``, where only the GPU's time counts, also for
fewer tokens."""
WHOLE_BACKWARD_MIN_HEADS = 512
"""Minimum heads for its backward pass, which has eight descriptors and no dropout: both of its sweeps would have to make the
mask."""
SUMS_MIN_HEADS, SWEEPS_MAX_LENGTH = 512, 448
"""Minimum heads for row and key sums in one kernel, and the tokens up to which separate sweeps are used instead. Sweeps are
faster at 320 tokens and slower at 512; lengths between were interpolated."""
SUMS_DTYPE = torch.bfloat16
"""Type of that kernel's states. It computes in float32 for any half type, but in float16 it has not run on a GPU."""
CAUSAL_MIN_HEADS, CAUSAL_MAX_LENGTH = 128, 1024
"""Minimum heads, about one for each multiprocessor, and maximum tokens of the strict causal kernel for Hopper, which leaves own
messages out: a key bias takes the sweeps."""
CAUSAL_MIN_ENTRIES = 1 << 25
"""Minimum entries of all maps for that kernel: 512 heads of 256 tokens."""
STORED_MAX_LENGTH = 1024
"""Maximum tokens of the strict causal backward pass that stores the gradients of scores: 2 bytes for each, so 1 KiB per token and
head at 1024 tokens, 2 KiB in a packed batch."""
TMA_MIN_ENTRIES = 1 << 28
"""Minimum entries of all maps for tiles fetched by TMA, whose descriptors cost host time. At half as many, 512 heads of 512
tokens, a call with its backward pass waited for the host (1.1 ms instead of 0.8 on an H200)."""
SPLIT_MIN_ENTRIES = 1 << 29
"""Minimum entries of all maps for a split over two streams, which doubles the number of launches."""


_graph_depth = 0
_graph_lock = threading.Lock()


@contextlib.contextmanager
def for_cuda_graph() -> Iterator[None]:
    """Calls inside, warm-up and capture alike, are for a CUDA graph, in whose replays the host's time does not count.

    For the whole process, since the backward pass runs in a thread of its own. Calls of other threads meanwhile give the same
    results, but may wait longer for the host.
    """
    global _graph_depth
    with _graph_lock:
        _graph_depth += 1
    try:
        yield
    finally:
        with _graph_lock:
            _graph_depth -= 1


def is_for_cuda_graph() -> bool:
    return _graph_depth > 0


def select_kernels(
    family: Family, spec: CallSpec, *, aligned: bool = False, capability: int = 0
) -> KernelChoice:
    """Kernels of a family that a call launches.

    aligned:    whether TMA can fetch its states
    capability: ten times the GPU's compute capability

    ``weak`` and ``careful`` of the result follow from the family and the spec alone, since shapes of saved tensors depend on them.
    """
    half = spec.dtype != torch.float32
    tma = half and aligned and spec.dim == 64 and not spec.packed and capability >= HOPPER
    hopper = tma and has_hopper_kernel(capability)
    if family == "short":
        return _short_kernels(spec, hopper)
    if family == "long":
        return _long_kernels(spec, tma, hopper)
    if family == "causal":
        return _causal_kernels(spec, tma, hopper)
    weak = spec.precise == 0
    if family == "key bias":
        return KernelChoice(weak, split_axis=None if spec.masked else split_axis(spec))
    return KernelChoice(weak and family.endswith("steps"), spec.may_underflow or family == "short steps")


def _short_kernels(spec: CallSpec, hopper: bool) -> KernelChoice:
    """hopper: whether kernels written for Hopper can compute states of this layout."""
    weak = spec.precise == 0 and not spec.may_underflow and spec.stride == 1
    weak = weak and padded_keys(spec) >= 64  # with fewer keys its tiles would be mostly empty
    strong = spec.receives > 0 and spec.dtype == ANY_STRENGTH_DTYPE and not (spec.stride > 1 and spec.masked)
    hopper = hopper and (weak or strong) and padded_keys(spec) == SHORT and has_heads(spec, HOPPER_MIN_HEADS)
    return KernelChoice(weak, spec.may_underflow, hopper)


def _long_kernels(spec: CallSpec, tma: bool, hopper: bool) -> KernelChoice:
    """tma: whether TMA can fetch the states; hopper as above."""
    hopper = hopper and spec.receives > 0
    whole = hopper and SHORT < spec.length <= WHOLE and spec.dtype == ANY_STRENGTH_DTYPE
    forward = whole and has_heads(spec, WHOLE_MIN_HEADS)
    backward = whole and has_heads(spec, WHOLE_BACKWARD_MIN_HEADS) and not spec.dropout
    joint = hopper and SWEEPS_MAX_LENGTH < spec.length <= JOINT and spec.dtype == SUMS_DTYPE
    joint = joint and has_heads(spec, SUMS_MIN_HEADS)
    tma = tma and entries(spec) >= TMA_MIN_ENTRIES
    weak, axis = spec.precise == 0, split_axis(spec)
    return KernelChoice(weak, spec.may_underflow, forward, backward, joint, tma=tma, split_axis=axis)


def _causal_kernels(spec: CallSpec, tma: bool, hopper: bool) -> KernelChoice:
    """tma and hopper as above."""
    weak = spec.precise == 0 and spec.receives > 0 and spec.bound > 0  # for messages that lower beliefs
    forward = hopper and SHORT < spec.length <= CAUSAL_MAX_LENGTH and spec.receives == 1
    forward = forward and has_heads(spec, CAUSAL_MIN_HEADS) and entries(spec) >= CAUSAL_MIN_ENTRIES
    half = spec.dtype != torch.float32
    stored = half and spec.receives > 0 and spec.dim <= 64 and spec.longest <= STORED_MAX_LENGTH
    tma = tma and weak and entries(spec) >= TMA_MIN_ENTRIES
    return KernelChoice(weak, not weak or spec.may_underflow, forward, stored=stored, tma=tma)


def has_heads(spec: CallSpec, min_heads: int) -> bool:
    """Whether a call has enough heads for a Hopper kernel, which the host needs more time for."""
    return spec.sequences * spec.heads >= (
        min(min_heads, WHOLE_MIN_HEADS) if is_for_cuda_graph() else min_heads
    )


def entries(spec: CallSpec) -> int:
    """Number of entries of all attention maps of a call."""
    return spec.sequences * spec.heads * spec.length**2


def has_hopper_kernel(capability: int) -> bool:
    """Whether the Hopper kernels can be used: Gluon is experimental, so only with the versions of Triton in ``KNOWN_TRITON``."""
    from saobp.kernels.runtime.launcher import LAUNCHES_DIRECTLY

    return capability == HOPPER and LAUNCHES_DIRECTLY and not INTERPRETED


def split_axis(spec: CallSpec) -> int | None:
    """Axis of ``[batch, heads, length, dim]`` that is halved over two streams; None if the call is not split.

    Not with dropout, whose seeds count heads from a call's first one, nor in float32, which stores numbers in two planes.
    """
    if entries(spec) < SPLIT_MIN_ENTRIES or spec.packed or spec.dropout or spec.dtype == torch.float32:
        return None
    if spec.batch % 2 == 0:
        return 0
    key_heads = spec.heads // spec.group
    return 1 if spec.batch == 1 and key_heads % 2 == 0 else None
