"""From a library or a cubin to the instructions of the kernels for Hopper, by NVIDIA's cuobjdump and nvdisasm.

They are on the PATH, in Python's packages, or installed from PyPI into a folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
ARCH = "sm_90a"

# The storage type, head_dim, value_dim, general, packed, quantised, and the blocks of a cluster.
_KERNEL = re.compile(
    r"sm90_(forward|backward|delta)_kernelI\w*?ConfigI"
    r"NS_\d+(BFloat16|Float16)ELi(\d+)ELi(\d+)E"
    r"Lb([01])E(?:Lb([01])E)?(?:Lb([01])E)?(?:Li(\d+)E)?"
)
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_FIRST = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_GUARD = re.compile(r"^@!?U?P\w+\s+")


@dataclass(frozen=True)
class Instruction:
    """One instruction and its control fields: the cycles until the next one may issue, the counters that it holds until
    its result is written or its operands are read (7: none), and the counters that it waits for, one bit each."""

    address: int
    text: str
    stall: int = 1
    writes: int = 7
    reads: int = 7
    waits: int = 0

    @property
    def guarded(self) -> bool:
        return _GUARD.match(self.text) is not None

    @cached_property
    def opcode(self) -> str:
        """With its modifiers, as in "MUFU.EX2"."""
        return _GUARD.sub("", self.text).split()[0]

    @cached_property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that ends the text, as in a branch."""
        found = re.search(r"\b0x([0-9a-f]+)\)?$", self.text)
        return int(found.group(1), 16) if found else None


def kernel_name(symbol: str) -> str | None:
    """As in "forward_bfloat16_64_plain", or "192x128" where values have other columns; None for other functions. The
    small kernels of a backward have the configuration of its main one."""
    found = _KERNEL.search(symbol)
    if not found:
        return None
    direction, number, dim, value_dim, general, packed, quantised, blocks = found.groups()
    dims = dim if value_dim == dim else f"{dim}x{value_dim}"
    kind = "quantised" if quantised == "1" else "packed" if packed == "1" else "cluster" if blocks == "2" else ""
    kind = ("general" if general == "1" else "plain") + (kind and f"_{kind}")
    return f"{direction}_{number.lower()}_{dims}_{kind}"


def has_tiles(name: str) -> bool:
    """Whether a kernel has a loop over tiles: the others are bound by memory."""
    return name.startswith(("forward_", "backward_"))


def parse(text: str) -> dict[str, list[Instruction]]:
    """The functions in the output of `cuobjdump -sass`, by symbol."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    pending: tuple[int, str] | None = None
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            current = functions.setdefault(found.group(1), [])
        elif found := _FIRST.match(line):
            pending = (int(found.group(1), 16), found.group(2))
        elif pending and (found := _SECOND.match(line)):
            bits = int(found.group(1), 16)
            fields = (bits >> 41 & 15, bits >> 46 & 7, bits >> 49 & 7, bits >> 52 & 63)
            current.append(Instruction(*pending, *fields))
            pending = None
    return functions


def find_tools(cache: Path) -> Path:
    """The folder of both programs. Installs them into `cache` if there are none."""
    on_path = shutil.which("cuobjdump")
    if on_path and shutil.which("nvdisasm"):
        return Path(on_path).parent
    for folder in (*map(Path, sys.path), cache):
        for found in folder.glob("nvidia/*/bin/cuobjdump"):
            if (found.parent / "nvdisasm").is_file():
                return found.parent
    print(f"installing {' and '.join(PACKAGES)} into {cache}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(cache), *PACKAGES]
    subprocess.run(command, check=True)
    for found in cache.glob("nvidia/*/bin/cuobjdump"):
        return found.parent
    raise SystemExit(f"{cache}: pip installed no cuobjdump")


class Disassembler:
    def __init__(self, tools: Path) -> None:
        self.tools = tools
        self.variables = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}

    def run(self, folder: Path, *arguments: str) -> str:
        command = [str(self.tools / "cuobjdump"), *arguments]
        done = subprocess.run(command, cwd=folder, env=self.variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def kernels(self, file: Path) -> dict[str, list[Instruction]]:
        """The kernels for Hopper of a library or a cubin, by name."""
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            if file.suffix != ".cubin":
                self.run(folder, "-xelf", ARCH, str(file.resolve()))
            cubins = sorted(folder.glob("*.cubin")) or [file.resolve()]
            result = {}
            for cubin in cubins:
                symbols = _symbols(cubin)
                if not symbols:
                    continue
                for symbol, body in parse(self.run(folder, "-sass", "-fun", ",".join(symbols), str(cubin))).items():
                    if name := kernel_name(symbol):
                        result[name] = body
        return result


def _symbols(cubin: Path) -> list[str]:
    """The kernels that a cubin has. Their names stand in its section headers."""
    names: Iterable[bytes] = re.findall(rb"\.text\.(\w+)\0", cubin.read_bytes())
    return [name.decode() for name in names if kernel_name(name.decode())]
