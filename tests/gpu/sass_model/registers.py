"""Which registers a kernel can reach after its warpgroups have given some back (setmaxnreg). One that a warpgroup no
longer has would be an error that nothing reports before a GPU runs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .disassembly import Instruction
from .loops import is_conditional


@dataclass(frozen=True)
class Role:
    """The code after one setmaxnreg: how many registers each thread has, and how many it names."""

    limit: int
    named: int


def _reachable(code: Sequence[Instruction], begin: int) -> set[int]:
    index = {instruction.address: k for k, instruction in enumerate(code)}
    seen: set[int] = set()
    stack = [begin]
    while stack:
        k = stack.pop()
        while k < len(code) and k not in seen:
            seen.add(k)
            instruction = code[k]
            jumps = instruction.name in ("BRA", "CALL", "BSSY") and instruction.target in index
            if jumps and instruction.target is not None:
                stack.append(index[instruction.target])
            if instruction.name == "BRA" and jumps and not is_conditional(instruction):
                break
            if instruction.name in ("EXIT", "RET", "BSYNC") and not instruction.guarded:
                break
            k += 1
    return seen


def _role(code: Sequence[Instruction], word: str) -> Role | None:
    begin = next((k for k, x in enumerate(code) if x.name == "USETMAXREG" and word in x.opcode), None)
    if begin is None:
        return None
    limit = code[begin].target
    texts = (code[k].text for k in _reachable(code, begin))
    named = max((int(number) for text in texts for number in re.findall(r"\bR(\d+)\b", text)), default=-1)
    return Role(limit or 0, named + 1)


def producer(code: Sequence[Instruction]) -> Role | None:
    """The warpgroup that gives registers back."""
    return _role(code, "DEALLOC")


def consumer(code: Sequence[Instruction]) -> Role | None:
    """The warpgroups that take more."""
    return _role(code, ".TRY_ALLOC") or _role(code, ".ALLOC")


def consumers(code: Sequence[Instruction]) -> int:
    """The number of consumer warpgroups: a multiprocessor has 512 registers for the threads with the same number."""
    gives, takes = producer(code), consumer(code)
    return (512 - gives.limit) // takes.limit if gives and takes else 1
