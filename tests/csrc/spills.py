"""Fails if a CUDA kernel spills more registers than it may, or if ptxas serialises its wgmma instructions.

    python tests/csrc/spills.py [--nvcc nvcc] [--arch sm_80] [FILE.cu ...]
    python tests/csrc/spills.py [--leave-out NAME ...] FOLDER

Compiles each file (default: csrc/cuda/generic/*.cu) for one architecture, or reads the reports that a build left in
FOLDER (ptxas_report.py). Prints registers, stack and spills of every kernel. (A stack without spills is an array that
is meant to be in memory.)
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

# Bytes that a kernel may spill: these need a few more than 255 registers. Mask elements that are loaded together take
# most of them. Loaded one by one, each would wait for memory.
KNOWN = {
    ("sm_90a", "grad_key_value_kernel<GenericConfig<BFloat16, 128, false, true> >"): 80,
    ("sm_90a", "sm90_forward_kernel<Sm90ForwardConfig<BFloat16, 256, 256, true, false, false, 1> >"): 224,
    ("sm_90a", "sm90_forward_kernel<Sm90ForwardConfig<Float16, 256, 256, true, false, false, 1> >"): 224,
}


def readable(mangled: str) -> str:
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"\(anonymous namespace\)::|scaledot::|^void |\(.*\)$", "", name)


def compiled(nvcc: str, source: Path, arch: str) -> str:
    """The numbers that ptxas reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++20", f"-I{ROOT / 'csrc'}", "--expt-relaxed-constexpr", "--extended-lambda", "-cubin"]
        command += [f"-arch={arch}", "-Xptxas", "-v", "-o", f"{folder}/out.cubin", str(source), "-DSCALEDOT_SM90A=1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stderr


def kernels(report: str) -> tuple[list[dict[str, str]], list[str]]:
    """ptxas's words on every kernel, and its warnings that `wgmma` instructions are serialised (C7510 and others)."""
    warnings = [line for line in report.splitlines() if "Potential Performance Loss" in line]
    return [match.groupdict() for match in ENTRY.finditer(report)], warnings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="NAME", help="of files in FOLDER: not checked")
    parser.add_argument("sources", nargs="*", type=Path, default=sorted((ROOT / "csrc/cuda/generic").glob("*.cu")))
    arguments = parser.parse_args()
    seen = spilling = serialised = 0
    texts = []
    for source in arguments.sources:
        if source.is_dir():
            found = sorted(source.rglob("*.ptxas"))
            texts += [path.read_text() for path in found if path.name.split(".")[0] not in arguments.leave_out]
        else:
            texts.append(compiled(arguments.nvcc, source, arguments.arch))
    for text in texts:
        reports, warnings = kernels(text)
        print("".join(f"{line}\n" for line in warnings), end="")
        serialised += len(warnings)
        for kernel in reports:
            name, spills = readable(kernel["name"]), int(kernel["stores"]) + int(kernel["loads"])
            print(
                f"{kernel['arch']:<7} {name:<72} {kernel['registers']:>4} registers {kernel['stack']:>4} stack "
                f"{spills:>5} bytes spilled"
            )
            seen += 1
            spilling += spills > KNOWN.get((kernel["arch"], name), 0)
    if not seen:
        sys.exit("ptxas reported no kernel: has its output changed?")
    print(f"{seen} kernels, {spilling} of them spill more than they may, {serialised} warnings")
    return 1 if spilling or serialised else 0


if __name__ == "__main__":
    sys.exit(main())
