"""Which unit of a multiprocessor an instruction takes, and for how many cycles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .disassembly import Instruction

CYCLES = {"mufu": 8, "alu": 2, "fma": 1, "imad": 2, "shared": 4, "uniform": 2}
"""Cycles of a unit of a sub-partition for one instruction of a warp. Tensor cores: tensor_cycles()."""

SHARED_BYTES = 128  # that a multiprocessor reads from shared memory in a cycle

_KINDS = {
    "tensor": r"HGMMA",
    "mufu": r"MUFU",
    "fma": r"FFMA|FMUL|FADD",
    "imad": r"IMAD",
    "uniform": r"U(?!TMA|CGABAR|BLK|SETMAXREG)\w+",
    "alu": r"FMNMX|FSETP|FSEL|FSET|F2F|F2FP|I2F|F2I|HADD2|PRMT|R2UR|IADD3?|LEA|SHF|LOP3?|ISETP|SEL|IMNMX|VIADD|VIMNMX|"
    r"VIADDMNMX|PLOP3?|P2R|R2P|BMSK|SGXT|I2I|POPC|IABS",
    "shared": r"SHFL|LDS|STS|LDSM|STSM|LDL|STL",
}
_PATTERNS = {kind: re.compile(f"(?:{names})$") for kind, names in _KINDS.items()}

GROUPS = {
    "HGMMA": r"HGMMA",
    "MUFU": r"MUFU",
    "FFMA FADD FMUL": r"FFMA|FADD|FMUL",
    "FMNMX": r"FMNMX",
    "FSETP FSEL": r"FSETP|FSEL",
    "conversions": r"F2FP?|PRMT|HADD2",
    "integers": _KINDS["uniform"] + r"|IMAD|R2UR|IADD3?|LEA|SHF|LOP3?|ISETP|SEL|VIADD|VIMNMX|PLOP3?|P2R|R2P",
    "LDS LDSM": r"LDS|LDSM",
    "STS STSM": r"STS|STSM",
    "LDL STL": r"LDL|STL",
}
"""The columns of counts in the long form of the table."""


def kind_of(instruction: Instruction) -> str:
    """The unit: a key of CYCLES, "tensor", or "other"."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.match(instruction.name)), "other")


def counts(path: Sequence[Instruction]) -> dict[str, int]:
    """How many instructions of each of GROUPS there are."""
    names = Counter(instruction.name for instruction in path)
    return {
        group: sum(count for name, count in names.items() if re.fullmatch(pattern, name))
        for group, pattern in GROUPS.items()
    }


@dataclass(frozen=True)
class Product:
    """One HGMMA: 64 x columns, 16 deep."""

    columns: int
    from_registers: bool
    ends_group: bool

    @staticmethod
    def of(instruction: Instruction) -> Product:
        columns = re.search(r"64x(\d+)x16", instruction.opcode)
        if not columns:
            raise ValueError(f"HGMMA: got {instruction.text}; needs a shape such as 64x128x16")
        registers = re.search(r"HGMMA\S*\s+R\w+,\s+R\w+,\s+gdesc", instruction.text) is not None
        return Product(int(columns.group(1)), registers, "gsb0" in instruction.text)

    @property
    def tensor_cycles(self) -> float:
        """At the peak of 4096 dense 16-bit operations a cycle."""
        return self.columns / 2

    @property
    def cycles(self) -> float:
        """With its operands' way from shared memory."""
        operand_bytes = (0 if self.from_registers else 64 * 16 * 2) + self.columns * 16 * 2
        return max(self.tensor_cycles, operand_bytes / SHARED_BYTES)


def tensor_cycles(path: Sequence[Instruction]) -> float:
    return sum(Product.of(x).tensor_cycles for x in path if x.name == "HGMMA")
