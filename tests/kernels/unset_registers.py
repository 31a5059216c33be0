"""Uniform registers that machine code reads but never wrote: what they hold is left from another kernel.

Triton's assembler (ptxas 12.8, of Triton 3.6 and 3.7) made such code of a kernel with many tensor-core
products: the shared-memory descriptor of one is computed from a register that nothing has set, which
can end in an illegal memory access. Neither PTX nor Triton's interpreter shows it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile

LABEL = re.compile(r"(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
UNIFORM = re.compile(r"(gdesc\[|\w*desc\[)?\bUR(\d+)\b(\.64)?")
WRITES_UNIFORM = re.compile(r"U[A-Z]|R2UR|S2UR|VOTEU|REDUX|LDCU|ELECT")


def disassembled(binary: bytes) -> str:
    """Machine code of a kernel as text."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unset_registers(text: str) -> list[str]:
    """Instructions that read a uniform register which no way to them writes."""
    code: list[tuple[str, str, str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append(tuple(one or "" for one in found.groups()))  # type: ignore[arg-type]
    uses = [_read_and_written(name, rest) for _, _, name, rest in code]
    written: list[frozenset[int] | None] = [frozenset(), *[None] * len(code)]
    waiting = [0]
    while waiting:
        place = waiting.pop()
        if place == len(code):
            continue
        known = written[place]
        assert known is not None
        after = known | uses[place][1]
        for following in _following(place, *code[place][1:], labels):
            before = written[following]
            if before is None or not after <= before:
                written[following] = after | (before or frozenset())
                waiting.append(following)
    return [
        f"{address} {name} {rest}"
        for (address, _, name, rest), (read, _), known in zip(code, uses, written, strict=False)
        if known is not None and read - known
    ]


def _following(place: int, condition: str, name: str, rest: str, labels: dict[str, int]) -> list[int]:
    """Places of the instructions that may come next."""
    target = re.search(r"\.L_x_\d+", rest)
    jumps = [labels[target[0]]] if target and name.startswith(("BRA", "CALL", "BRX")) else []
    ends = name in ("BRA", "EXIT", "RET") and condition in ("", "PT")
    return jumps if ends else [*jumps, place + 1]


def _read_and_written(name: str, rest: str) -> tuple[frozenset[int], frozenset[int]]:
    """Uniform registers that an instruction reads and writes."""
    operands = [one.strip() for one in rest.split(",")]
    written: set[int] = set()
    if WRITES_UNIFORM.match(name):
        predicates = [one for one in operands if re.fullmatch(r"U?P[T0-9]", one)]
        target = next((one for one in operands if one not in predicates), "")
        if found := re.fullmatch(r"UR(\d+)", target):
            wide = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            written = {int(found[1]) + part for part in range(wide)}
            operands.remove(target)
    read: set[int] = set()
    for operand in operands:
        for kind, number, pair in UNIFORM.findall(operand):
            if kind == "gdesc[":  # of both operands; if the first is in registers, of the second alone
                parts = range(2 if re.match(r"R\d+\S*, R\d+", rest) else 0, 4)
            else:
                wide = name.startswith("UIADD3.64") or (".WIDE" in name and operand is operands[-1])
                parts = range(2 if kind or pair or wide else 1)
            read |= {int(number) + part for part in parts}
    return frozenset(read), frozenset(written)
