"""Results so large that malloc maps them anew at every call are marked for transparent huge pages.

Each test runs in a new process: NumPy marks its arrays too, and malloc may reuse their memory.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import scaledot

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)


def asks_for_large_pages(tensor: Tensor) -> bool:
    """Whether the pages in the middle of the tensor were marked by madvise(MADV_HUGEPAGE)."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"no mapping at {address:#x}")


def inputs(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, length, 8) for _ in range(3)]


def weights_of(length: int) -> Tensor:
    _, weights = scaledot.scaled_dot_product_attention(*inputs(length), return_weights=True)
    assert weights.shape == (8, length, length)
    return weights


def mask_gradient_of(length: int) -> Tensor:
    mask = torch.zeros(8, length, length, requires_grad=True)
    scaledot.scaled_dot_product_attention(*inputs(length), attn_mask=mask).sum().backward()
    assert mask.grad is not None
    return mask.grad


@pytest.mark.parametrize(
    ("result", "large"), [("weights_of(1024)", True), ("weights_of(256)", False), ("mask_gradient_of(1024)", True)]
)
def test_large_results_use_huge_pages(result: str, large: bool) -> None:
    code = f"from test_large_results import *; print(asks_for_large_pages({result}))"
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=here, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(large)
