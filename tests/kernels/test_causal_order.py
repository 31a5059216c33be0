"""Strict causal sweeps begin with the longest blocks of several heads: each is done once, in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from call_helpers import clear_plans, spec_of
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from saobp.kernels.call_spec import CallTensors
from saobp.kernels.causal import launch as causal_launch
from saobp.kernels.fused import FAMILIES
from saobp.kernels.library.indexing import locate_sorted
from saobp.testing.inputs import attention_inputs

causal_refined_attention = FAMILIES["causal"].forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit(do_not_specialize=["section"])
def _note_places(places_ptr, cu_ptr, blocks, section, heads, length, PACKED: tl.constexpr):
    block, batch, head, first, tokens, line = locate_sorted(blocks, section, heads, length, cu_ptr, PACKED)
    own = places_ptr + tl.program_id(0) * 6
    tl.store(own, line)
    tl.store(own + 1, block)
    tl.store(own + 2, batch)
    tl.store(own + 3, head)
    tl.store(own + 4, first)
    tl.store(own + 5, tokens)


def places(
    blocks: int, section: int, heads: int, sequences: int, cu: Tensor | None = None
) -> list[list[int]]:
    """Line, block, batch, head, first token and tokens, program by program."""
    programs = blocks * heads * sequences
    noted = torch.full((programs, 6), -1, dtype=torch.int32, device=DEVICE)
    _note_places[(programs,)](
        noted, noted if cu is None else cu, blocks, section, heads, 50, PACKED=cu is not None
    )
    return noted.tolist()


@pytest.mark.parametrize("blocks", [1, 9])
@pytest.mark.parametrize("section", [1, 2, 5, 6, 7, 100])
@pytest.mark.parametrize(("heads", "sequences"), [(1, 1), (2, 3), (3, 1), (1, 7)])
def test_every_block_of_every_head_comes_once(blocks: int, section: int, heads: int, sequences: int) -> None:
    """Whether sections divide the lines, leave a rest, or are larger than all of them."""
    noted = places(blocks, section, heads, sequences)
    lines = heads * sequences
    expected = [
        [line, block, line // heads, line % heads, 0, 50] for line in range(lines) for block in range(blocks)
    ]
    assert sorted(noted) == expected
    for start in range(0, lines, section):
        of_section = noted[start * blocks : (start + section) * blocks]
        assert {line for line, *_ in of_section} == set(range(start, min(start + section, lines)))
        numbers = [block for _, block, *_ in of_section]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("section", [1, 4, 50])
def test_packed_lines_find_their_sequence(section: int) -> None:
    ends = [0, 5, 5, 40, 50]
    noted = places(3, section, 2, 4, torch.tensor(ends, dtype=torch.int32, device=DEVICE))
    assert sorted(noted) == [
        [line, block, 0, line % 2, ends[line // 2], ends[line // 2 + 1] - ends[line // 2]]
        for line in range(8)
        for block in range(3)
    ]


def test_few_blocks_stay_with_their_head_and_many_fill_a_section() -> None:
    inputs = attention_inputs(1, 3, 1, 16, device=DEVICE)
    spec = spec_of(inputs.query, inputs.key, None, None, 1, 0.25, 0.0, 1.0, 1, 0.0)
    few = causal_launch.FEW

    def section(length: int) -> int:
        step = causal_launch.causal_block(spec, "row_sums").rows
        whole = replace(spec, length=length * step, longest=length * step)
        tensors = CallTensors(inputs.query, inputs.key, inputs.value, inputs.strength)
        launch = causal_launch.plan_forward(whole, tensors, True).launches.launches[0][0]
        numbers = [name for name in launch.kernel.arg_names if not name.endswith(("_ptr", "_map"))]
        assert launch.programs == 3 * length
        return launch.numbers[numbers.index("section")]

    assert [section(count) for count in (1, few)] == [1, 1]
    for count in (few + 1, 128, 5000):
        assert section(count) == max(1, causal_launch.SECTION // count)


def test_results_do_not_depend_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, forward and backward, packed, over two spans, with sections that leave a rest."""
    monkeypatch.setattr(causal_launch, "SPAN", 64)
    lengths = (66, 0, 3)
    inputs = attention_inputs(1, 2, sum(lengths), 16, strength=0.7, dtype=torch.float16, device=DEVICE)
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()

    def results() -> list[Tensor]:
        clear_plans()
        leaves = inputs.leaves()
        output = causal_refined_attention(*leaves, None, cu, None, 66, 0.25, 0.0, 1.0, 1, 0.0)[0]
        return [output.detach(), *torch.autograd.grad(output, leaves, inputs.output_gradient)]

    in_order = results()
    assert all(x.isfinite().all() for x in in_order)
    monkeypatch.setattr(causal_launch, "FEW", 0)
    monkeypatch.setattr(causal_launch, "SECTION", 8)  # four lines of two blocks, of six
    assert all(map(torch.equal, results(), in_order))
    clear_plans()
