"""Every kernel goes through the compiler for a GPU that need not be there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pretended_gpu
import pytest
import torch

KERNELS = {
    "short": {"short_forward", "short_weak_forward", "short_backward"},
    "hopper": {
        "short_hopper_forward",
        "short_hopper_backward",
        "short_careful_backward",
        "strength_gradient",
    },
    "whole map": {"whole_map_forward", "careful_output", "whole_map_backward", "careful_gradients"},
    "joint sums": {"joint_sums", "refined_output", "careful_output"},
    "long": {
        "row_sums",
        "column_messages",
        "refined_output",
        "value_gradient",
        "query_gradient",
        "key_gradient",
    },
    "key bias": {
        "find_senders",
        "row_sums",
        "column_messages",
        "biased_output",
        "row_products",
        "key_value_gradient",
        "sender_query_gradient",
        "query_gradient",
        "sender_key_gradient",
        "strength_gradient",
    },
    "causal": {
        "causal_row_sums",
        "weak_messages",
        "weak_output",
        "weak_climb",
        "weak_query_gradient",
        "causal_value_gradient",
        "stored_climb",
    },
    "causal hopper": {
        "causal_hopper_forward",
        "stored_mean_parts",
        "stored_row_means",
        "stored_climb",
        "stored_query_gradient",
        "stored_key_gradient",
    },
    "short causal": {"short_causal_forward", "short_causal_backward"},
    "causal key bias": {
        "short_causal_forward",
        "short_causal_backward",
        "stored_mean_parts",
        "stored_climb",
        "causal_output",
        "causal_value_gradient",
        "weak_output",
        "weak_climb",
    },
    "statistics": {"row_sweep"},
    "decoding": {"attend_part", "attend_part_hopper", "finish_row"},
    "masked": {
        "mask_spans",
        "masked_row_sums",
        "masked_column_messages",
        "masked_output",
        "row_products",
        "masked_value_gradient",
        "masked_query_gradient",
        "masked_key_gradient",
        "strength_gradient",
    },
    "masked float32": {
        "masked_output",
        "masked_value_gradient",
        "masked_query_gradient",
        "masked_key_gradient",
    },
    "elemmul": {"row_sums", "elemmul_output", "elemmul_key_gradient"},
    "steps": {
        "row_sums",
        "column_messages",
        "step_rows",
        "step_messages",
        "step_row_sums",
        "step_key_sums",
        "step_query_gradient",
        "step_key_gradient",
        "strength_gradient",
    },
    "short steps": {"short_steps_forward", "short_steps_backward"},
}


SLOW = ("statistics", "masked", "steps", "causal key bias")
"""Cases of kernels that have been the same for long, or are others' but for a matrix of ones; compiling one
takes 20 seconds or more."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what compiling needs, which takes as long as compiling a few kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, pretended_gpu.__file__],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests compile the kernels for the GPU that is here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in pretended_gpu.CASES],
)
def test_kernels_compile_for_hopper(case: str, compiler: subprocess.Popen[str]) -> None:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    print(case, file=compiler.stdin, flush=True)
    names, error = json.loads(compiler.stdout.readline())
    assert not error, error[-3000:]
    assert KERNELS[case] <= set(names)
