"""Results so large that malloc maps them anew at every call are marked for transparent huge pages."""

from __future__ import annotations

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


@pytest.mark.parametrize(("length", "large"), [(1024, True), (256, False)])
def test_large_weights_use_huge_pages(length: int, large: bool) -> None:
    _, weights = scaledot.scaled_dot_product_attention(*inputs(length), return_weights=True)
    assert weights.shape == (8, length, length)
    assert asks_for_large_pages(weights) == large


def test_a_large_mask_gradient_uses_huge_pages() -> None:
    mask = torch.zeros(8, 1024, 1024, requires_grad=True)
    scaledot.scaled_dot_product_attention(*inputs(1024), attn_mask=mask).sum().backward()
    assert mask.grad is not None
    assert asks_for_large_pages(mask.grad)
