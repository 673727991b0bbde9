"""Facts that a timing depends on: the machine, the versions, the number of threads."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import scaledot


def cpu_name() -> str:
    """The processor's model name, or the best description that the system has."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    """The facts for the head of the table, the plot's title and the JSON file."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": str(device),
        "name": gpu or cpu_name(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": scaledot.cpu_capability(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "scaledot": scaledot.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, or None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None
