"""Reductions that Triton 3.6 and 3.7 compile wrongly: threads of a warp that share a row must be neighbours.

Threads along the reduced axis exchange numbers over distances 1, 2, 4, ... times the first of them. Where the
compiler lays a tile out otherwise, as it may after a permutation, the wrong ones meet (mended by
triton-lang/triton#9219).
"""

from __future__ import annotations

import ast
import re

LAYOUT = re.compile(r"^#(\w+) = #ttg\.linear<\{.*?lane = (\[.*?\]), warp = .*\}>$", re.MULTILINE)
REDUCTION = re.compile(r'"tt\.reduce"\(.*?axis = (\d+) : i32.*?\}\) : \(tensor<[^,]*, (.*?)>[,)]', re.DOTALL)
SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>")


def wrong_reductions(text: str) -> list[str]:
    """Axes and layouts of wrong reductions in a kernel's TTGIR; only linear layouts can be wrong."""
    linear = {name: ast.literal_eval(lanes) for name, lanes in LAYOUT.findall(text)}

    def steps(layout: str) -> list[list[int]]:
        """How far each bit of a thread's number moves along each axis; empty for other layouts."""
        if (part := SLICE.fullmatch(layout)) is None:
            return linear.get(layout.removeprefix("#"), [])
        removed = int(part[1])
        return [step[:removed] + step[removed + 1 :] for step in steps(part[2])]

    wrong = []
    for axis, layout in REDUCTION.findall(text):
        bits = [bit for bit, step in enumerate(steps(layout)) if step[int(axis)]]
        if bits and len(bits) != bits[-1] - bits[0] + 1:
            wrong.append(f"axis {axis} of {layout}, threads by bits {bits}")
    return wrong
