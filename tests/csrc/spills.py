"""Fails if ptxas reports that a CUDA kernel spills registers, or that it serialises the kernel's wgmma instructions.

    python tests/csrc/spills.py [--nvcc nvcc] [--arch sm_80] [FILE.cu ...]

Compiles each file (default: csrc/cuda/generic/*.cu) for one architecture and prints registers, stack and spills of
every kernel. (A stack without spills is an array that is meant to be in memory.)
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def readable(mangled: str) -> str:
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"\(anonymous namespace\)::|scaledot::|^void |\(.*\)$", "", name)


def kernels(nvcc: str, source: Path, arch: str) -> tuple[list[dict[str, str]], list[str]]:
    """ptxas's report for every kernel, and its warnings that `wgmma` instructions are serialised (C7510 and others)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++20", f"-I{ROOT / 'csrc'}", "--expt-relaxed-constexpr", "--extended-lambda", "-cubin"]
        command += [f"-arch={arch}", "-Xptxas", "-v", "-o", f"{folder}/out.cubin", str(source), "-DSCALEDOT_SM90A=1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    warnings = [line for line in done.stderr.splitlines() if "Potential Performance Loss" in line]
    return [match.groupdict() for match in ENTRY.finditer(done.stderr)], warnings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("sources", nargs="*", type=Path, default=sorted((ROOT / "csrc/cuda/generic").glob("*.cu")))
    arguments = parser.parse_args()
    seen = spilling = serialised = 0
    for source in arguments.sources:
        reports, warnings = kernels(arguments.nvcc, source, arguments.arch)
        print("".join(f"{line}\n" for line in warnings), end="")
        serialised += len(warnings)
        for kernel in reports:
            spills = int(kernel["stores"]) + int(kernel["loads"])
            print(
                f"{readable(kernel['name']):<72} {kernel['registers']:>4} registers {kernel['stack']:>4} stack "
                f"{spills:>5} bytes spilled"
            )
            seen += 1
            spilling += spills > 0
    if not seen:
        sys.exit("ptxas reported no kernel: has its output changed?")
    print(f"{seen} kernels, {spilling} of them spill, {serialised} warnings")
    return 1 if spilling or serialised else 0


if __name__ == "__main__":
    sys.exit(main())
