"""What the machine and the build are, as a line of JSON. Fails if the library has no kernels for this GPU.

python -m gpu.machine [--results results.jsonl] [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import scaledot
from gpu.lines import Lines

HOPPER, HOPPER_CODE = (9, 0), "sm_90a"  # without the a there are no wgmma instructions
QUERY = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


def gpu_state() -> str | None:
    """The driver, clocks, power, temperature and reasons for lower clocks, as nvidia-smi says them."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def facts(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "library": str(Path(scaledot.__file__).parent),
        "build": scaledot.build_info(),
    }
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "capability": list(torch.cuda.get_device_capability()),
            "state": gpu_state(),
        }
    return found


def problem(found: dict[str, Any]) -> str | None:
    """Why the kernels of this build cannot be tested on this machine."""
    if "gpu" not in found:
        return None
    archs = found["build"]["cuda_archs"]
    if not archs:
        return "the library has no GPU kernels"
    if tuple(found["capability"]) == HOPPER and HOPPER_CODE not in archs:
        return f"the library has kernels for {', '.join(archs)}; needs {HOPPER_CODE}"
    return None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("gpu.machine", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args(words)
    found = facts(arguments.device)
    why = problem(found)
    Lines(arguments.results).add("import", **found, problem=why)
    for name, value in found.items():
        print(f"{name}: {value}")
    if why:
        print(f"import: {why}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
