"""The figures of every kernel, the stored table that they are compared with, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import clock, pipes, registers
from .disassembly import Instruction
from .loops import outside_path, steady_path

STORED = Path(__file__).resolve().parents[1] / "sass_table.json"
MOST_GROWTH = 0.03  # of a kernel's instructions


@dataclass(frozen=True)
class Figures:
    """Of one tile of the steady loop. Instructions are of one warp, cycles of a sub-partition with one warp of each
    consumer."""

    instructions: int
    consumers: int
    tensor: int
    mufu: int
    alu: int
    issue: int
    overlapped: int  # percent of the tensor cores' peak, with all of that at the same time
    local: int  # loads and stores of local memory in the loop


Table = dict[str, Figures]


@dataclass(frozen=True)
class Outside:
    """What a tile costs once, beside its steady loop. Instructions are of one warp, cycles of a sub-partition with one
    warp of each consumer, without waiting for memory. "stored": with the low part of an output, or dK and dV. A kernel
    without a loop over tiles has all its instructions as the first number."""

    instructions: int
    cycles: int = 0
    stored_instructions: int = 0
    stored_cycles: int = 0


Outsides = dict[str, Outside]


def figures_of(code: Sequence[Instruction]) -> Figures:
    path, consumers = steady_path(code), registers.consumers(code)
    kinds = [pipes.kind_of(instruction) for instruction in path]
    tensor = pipes.tensor_cycles(path) * consumers
    return Figures(
        instructions=len(path),
        consumers=consumers,
        tensor=round(tensor),
        mufu=kinds.count("mufu") * pipes.CYCLES["mufu"] * consumers,
        alu=kinds.count("alu") * pipes.CYCLES["alu"] * consumers,
        issue=len(path) * consumers,
        overlapped=round(100 * tensor / clock.period(path, consumers)),
        local=pipes.counts(path)["LDL STL"],
    )


def outside_of(code: Sequence[Instruction]) -> Outside:
    consumers = registers.consumers(code)
    paths = [outside_path(code, stores) for stores in (False, True)]
    plain, stored = (round(clock.period(path, consumers)) for path in paths)
    return Outside(len(paths[0]), plain, len(paths[1]), stored)


def register_problems(name: str, code: Sequence[Instruction]) -> list[str]:
    problems = []
    for who, role in (("producer", registers.producer(code)), ("consumers", registers.consumer(code))):
        if role is None:
            problems.append(f"{name}: no setmaxnreg of the {who} was found")
        elif role.named > role.limit:
            problems.append(f"{name}: the {who} name register R{role.named - 1}; they have {role.limit}")
    return problems


@dataclass(frozen=True)
class Stored:
    compiler: str  # the version of nvcc
    kernels: Table
    flash_attention_3: Table
    """Of kernels with the same head dimension, in FlashAttention-3's own machine code."""
    outside: Outsides
    """Of all kernels but the general ones, where the path of a tile depends on the options."""

    @staticmethod
    def read(path: Path = STORED) -> Stored:
        content = json.loads(path.read_text())

        def table(key: str) -> Table:
            return {name: Figures(**figures) for name, figures in content[key].items()}

        outside = {name: Outside(**figures) for name, figures in content["outside"].items()}
        return Stored(content["compiler"], table("kernels"), table("flash_attention_3"), outside)

    def write(self, path: Path = STORED) -> None:
        """One kernel a line."""

        def lines(table: Mapping[str, Figures | Outside]) -> str:
            return ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(table[name]))}" for name in sorted(table))

        path.write_text(
            f'{{\n "compiler": {json.dumps(self.compiler)},\n "kernels": {{\n{lines(self.kernels)}\n }},\n'
            f' "flash_attention_3": {{\n{lines(self.flash_attention_3)}\n }},\n'
            f' "outside": {{\n{lines(self.outside)}\n }}\n}}\n'
        )


def problems(found: Table, stored: Table) -> list[str]:
    """What the figures have that the stored ones do not allow."""
    result = [f"{name}: the stored table lacks it; needs --write" for name in found if name not in stored]
    result += [f"{name}: the library lacks it; needs the kernel, or --write" for name in stored if name not in found]
    for name, now in found.items():
        before = stored.get(name)
        if before and now.local > before.local:
            result.append(
                f"{name}: got {now.local} loads and stores of local memory in the loop; needs at most {before.local}"
            )
        if before and now.instructions > before.instructions * (1 + MOST_GROWTH):
            result.append(
                f"{name}: got {now.instructions} instructions a tile; needs at most {MOST_GROWTH:.0%} more than "
                f"{before.instructions}"
            )
    return result


_HEADER = ("kernel", "instructions", "stored", "FA3", "tensor", "MUFU", "ALU", "issue", "overlapped", "stored", "FA3")


def rows_of(found: Table, stored: Stored) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [_HEADER]
    for name, now in sorted(found.items()):
        before = stored.kernels.get(name)
        peer = stored.flash_attention_3.get(name)
        rows.append(
            (
                name,
                str(now.instructions),
                str(before.instructions) if before else "-",
                str(peer.instructions) if peer else "-",
                *map(str, (now.tensor, now.mufu, now.alu, now.issue)),
                f"{now.overlapped}%",
                f"{before.overlapped}%" if before else "-",
                f"{peer.overlapped}%" if peer else "-",
            )
        )
    return rows


def outside_rows(found: Outsides) -> list[tuple[str, ...]]:
    header = ("outside the loop", "instructions", "cycles", "with stores", "cycles")
    return [header, *((name, *map(str, asdict(now).values())) for name, now in sorted(found.items()))]


def text_of(rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first to the left and the others to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "".join(f"{line}\n" for line in lines)
