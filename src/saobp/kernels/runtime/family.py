"""A family of kernels as PyTorch operators: schema, shapes for the compiler, gradients and cached launch plans.

Every family has the same flat schema, so one definition serves all: a family adds the tensors it saves for backward and
its launch plans. Plans are cached by a call's scalars and the layout of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from saobp.kernels.call_spec import CallNumbers, CallSpec, CallTensors, kernel_tensors, layout
from saobp.kernels.calls import Family
from saobp.kernels.dispatch import is_for_cuda_graph
from saobp.kernels.library.strength_gradient import strength_gradient
from saobp.kernels.runtime.custom_op import operator, register_autograd, requires_grad
from saobp.kernels.runtime.launcher import KernelLaunch, LaunchSequence, cached

TENSORS = len(CallTensors._fields)
INPUTS = "Tensor query, Tensor key, Tensor value, Tensor strength, Tensor? mask, Tensor? cu, Tensor? seed"
NUMBERS = (
    "SymInt longest, float scale, float dropout, float sign, int receives, float bound, int steps=1, "
    "float damping=0.0, int stride=1"
)
INPUT_NAMES = ("q", "k", "v", "strength", "mask", "cu", "seed")
"""Kernel argument names of a call's tensors."""

Shape = tuple[int, ...]
Saved = dict[str, tuple[Shape, torch.dtype]]


class LaunchPlan(NamedTuple):
    """Launches of a cached call, bytes of its scratch buffer, and the type that dK and dV are accumulated in, if not
    their own."""

    launches: LaunchSequence
    scratch: int | None = None
    keys_dtype: torch.dtype | None = None


class KernelFamily:
    """Operators of one family.

    saved:         tensors saved for the backward pass besides the inputs: shape and type by name
    plan_forward:  launches on the inputs, "out", the saved tensors and "scratch"
    plan_backward: launches on the inputs, "grad", "out" if saved, the saved tensors, "dq", "dk", "dv", "strength_grad"
                   and "scratch"
    saves_output:  whether the backward pass needs the output
    has_strength:  whether the backward pass computes the gradient of gamma, per row (and step)
    inference:     name of an operator for inference, which saves nothing, if that is cheaper
    """

    def __init__(
        self, family: Family, name: str, *, saved: Callable[[CallSpec], Saved],
        plan_forward: Callable[[CallSpec, CallTensors, bool], LaunchPlan],
        plan_backward: Callable[[CallSpec, CallTensors, Tensor, Tensor], LaunchPlan],
        saves_output: bool = True, has_strength: bool = True, inference: str = "",
    ) -> None:  # fmt: skip
        self.family: Family = family
        self.saved, self.plan_forward, self.plan_backward = saved, plan_forward, plan_backward
        self.saves_output, self.has_strength = saves_output, has_strength
        self.plans: dict[Any, tuple[Any, ...]] = {}
        count = len(saved(_EXAMPLE))
        self.end = TENSORS + count + saves_output
        saved_schema = ", ".join(f"Tensor saved{number}" for number in range(count + saves_output))
        outputs = ", ".join(["Tensor"] * (1 + count))
        self.forward = operator(
            name, f"({INPUTS}, {NUMBERS}) -> ({outputs})", self._forward, self._fake_forward
        )
        self.backward = operator(
            f"{name}_backward", f"(Tensor grad, {INPUTS}, {saved_schema}, {NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)",
            self._backward, self._fake_backward,
        )  # fmt: skip
        register_autograd(self.forward, self._gradients, self._save)
        self.output: OpOverload | None = None
        if inference:
            schema = f"({INPUTS}, {NUMBERS}) -> Tensor"
            self.output = operator(
                inference, schema, self._output, lambda *flat: self._fake_forward(*flat)[0]
            )

    def __call__(self, *flat: Any) -> Tensor:
        """The output, from the fields of CallTensors and CallNumbers; bypasses the autograd key if no input requires a
        gradient."""
        has_gradient = requires_grad(*flat[:4])
        if self.output is not None and not has_gradient:
            only: Tensor = self.output(*flat)
            return only
        if has_gradient or torch.compiler.is_compiling():
            outputs: tuple[Tensor, ...] = self.forward(*flat)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = self.forward(*flat)
        return outputs[0]

    def _forward(self, *flat: Any) -> tuple[Tensor, ...]:
        return self._run_forward(True, flat)

    def _output(self, *flat: Any) -> Tensor:
        if requires_grad(*flat[:4]):
            names = [one._opname for one in (self.output, self.forward) if one is not None]
            raise RuntimeError("{} has no gradient: use {}, or no_grad".format(*names))
        return self._run_forward(False, flat)[0]

    def _run_forward(self, saves: bool, flat: tuple[Any, ...]) -> tuple[Tensor, ...]:
        tensors, numbers, query = flat[:TENSORS], flat[TENSORS:], flat[0]
        key = (saves, layout(tensors), numbers, is_for_cuda_graph())
        entry = self.plans.get(key) or cached(self.plans, key, self._forward_entry, saves, tensors, numbers)
        plan, shape, strides, specs, scratch = entry
        out = query.new_empty_strided(shape, strides)
        saved = [query.new_empty(size, dtype=dtype) for size, dtype in specs]
        buffers = () if scratch is None else (query.new_empty(scratch, dtype=torch.uint8),)
        plan(*kernel_tensors(tensors), out, *saved, *buffers)
        return out, *saved

    def _forward_entry(self, saves: bool, flat: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
        tensors = CallTensors(*flat)
        spec = CallSpec.of(tensors, CallNumbers(*numbers))
        plan = self.plan_forward(spec, tensors, saves)
        specs = list(self.saved(spec).values()) if saves else []
        return plan.launches, spec.states_shape, spec.states_strides, specs, plan.scratch

    def _backward(self, grad: Tensor, *flat: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tensors, saved, numbers = flat[:TENSORS], flat[TENSORS : self.end], flat[self.end :]
        query, out = flat[0], saved[0]
        key = (
            grad.stride(), grad.dtype, grad.data_ptr() & 15, out.stride(), out.data_ptr() & 15, layout(tensors), numbers,
            is_for_cuda_graph(),
        )  # fmt: skip
        entry = self.plans.get(key) or cached(
            self.plans, key, self._backward_entry, tensors, numbers, grad, out
        )
        plan, shape, strides, keys_dtype, rows, scratch, finish = entry
        dq = query.new_empty_strided(shape, strides)
        dk, dv = [query.new_empty_strided(shape, strides, dtype=keys_dtype) for _ in range(2)]
        dgamma = query.new_empty(rows, dtype=torch.float32)
        buffers = () if scratch is None else (query.new_empty(scratch, dtype=torch.uint8),)
        plan(*kernel_tensors(tensors), grad, *saved, dq, dk, dv, dgamma, *buffers)
        if keys_dtype != query.dtype:
            dk, dv = dk.to(query.dtype), dv.to(query.dtype)
        d_strength = query.new_empty(0 if finish is None else rows[1], dtype=torch.float32)
        if finish is not None:
            finish(dgamma, tensors[3], d_strength)
        return dq, dk, dv, d_strength

    def _backward_entry(
        self, flat: tuple[Any, ...], numbers: tuple[Any, ...], grad: Tensor, out: Tensor
    ) -> tuple[Any, ...]:
        tensors = CallTensors(*flat)
        spec = CallSpec.of(tensors, CallNumbers(*numbers))
        plan = self.plan_backward(spec, tensors, grad, out)
        finish = None
        if self._learns(spec):
            sizes = {
                "batch": spec.batch,
                "heads": spec.steps * spec.heads,
                "length": spec.length,
                "sign": spec.sign,
                "SIZE": 4096,
            }
            finish = KernelLaunch(
                strength_gradient, spec.steps * spec.heads, sizes | {"num_warps": 16}, tensors.query.device
            )
        rows = (spec.batch, spec.steps * spec.heads, spec.length) if self.has_strength else (0,)
        return (
            plan.launches, spec.states_shape, spec.gradient_strides, plan.keys_dtype or tensors.query.dtype, rows,
            plan.scratch, finish,
        )  # fmt: skip

    def _learns(self, spec: CallSpec) -> bool:
        """Whether the backward pass gives the gradient of the strength, which it does if that is not known beforehand."""
        return self.has_strength and not spec.bound

    def _fake_forward(self, *flat: Any) -> tuple[Tensor, ...]:
        query = flat[0]
        spec = CallSpec.of(CallTensors(*flat[:TENSORS]), CallNumbers(*flat[TENSORS:]))
        saved = [query.new_empty(shape, dtype=dtype) for shape, dtype in self.saved(spec).values()]
        return query.new_empty_strided(spec.states_shape, spec.states_strides), *saved

    def _fake_backward(self, _grad: Tensor, *flat: Any) -> tuple[Tensor, ...]:
        query = flat[0]
        spec = CallSpec.of(CallTensors(*flat[:TENSORS]), CallNumbers(*flat[self.end :]))
        states = (query.new_empty_strided(spec.states_shape, spec.gradient_strides) for _ in range(3))
        return *states, query.new_empty(
            spec.steps * spec.heads if self._learns(spec) else 0, dtype=torch.float32
        )

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:TENSORS], *output[0 if self.saves_output else 1 :])
        ctx.numbers = inputs[TENSORS:]

    def _gradients(self, ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        """One for each input of the forward operator."""
        query, key, _, strength, *_ = saved
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        dq, dk, dv, d_strength = self.backward(grad, *saved, *ctx.numbers)
        if key.shape[1] != query.shape[1]:
            dk, dv = (d.unflatten(1, (key.shape[1], -1)).sum(2) for d in (dk, dv))
        learned = None
        if ctx.needs_input_grad[3] and self.has_strength:
            bound = CallNumbers(*ctx.numbers).bound
            if bound:
                raise RuntimeError(f"a strength that learns needs bound 0, which is unknown, not {bound}")
            learned = d_strength.to(strength.dtype).view(strength.shape)
        return dq, dk, dv, learned, *[None] * (len(ctx.needs_input_grad) - 5)


_EXAMPLE = CallSpec(1, 1, 1, 1, 16, 16, 16, torch.float16, 1.0, 0.0, 1.0, 1, 0.0, False, False)
"""Placeholder call, to count the tensors that a family saves."""
