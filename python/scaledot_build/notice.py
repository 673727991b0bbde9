"""What a build says before it compiles."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path


def notice(archs: str, torch_has_cuda: bool) -> str:
    """What a build compiles, how long that takes, and how to compile less. `archs`: "sm_80;sm_90a", empty without CUDA
    kernels."""
    if archs:
        return (
            f"scaledot: compiling the CPU kernels, the ops, and CUDA kernels for {archs.replace(';', ', ')}. The CUDA "
            f"kernels for all GPUs take about 15 minutes on two cores, the rest a few. `SCALEDOT_CUDA=0 pip install .` "
            f"leaves them out. TORCH_CUDA_ARCH_LIST=native compiles for the GPUs of this machine only."
        )
    text = "scaledot: compiling the CPU kernels and the ops, which takes a few minutes on two cores."
    if torch_has_cuda and os.environ.get("SCALEDOT_CUDA", "auto") == "auto":
        text += " No CUDA kernels: nvcc was not found, which has to be on the PATH or in CUDACXX."
    return text


def show(text: str) -> None:
    """In the output of the build, and on the terminal if that is elsewhere: pip shows the output with -v only."""
    print(text, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{text}\n")


def archs_of(build: Path) -> str:
    """The architectures that a configured build compiles CUDA kernels for."""
    found = re.search(r'SCALEDOT_CUDA_ARCHS "(.*)"', (build / "generated" / "build_info.h").read_text())
    return found[1] if found else ""
