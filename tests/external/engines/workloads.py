"""The shapes to compare, as data, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scaledot.compare.shapes import Shape

# In the notation of `python -m scaledot compare`, BxHxLxD. The sequences of several shapes are packed into one call.
SERVING = (  # all causal: prefill, decoding, speculative decoding, chunks of a prefill, a mixed batch
    *("1x32:8x1024x128", "1x8:2x4096x128", "4x16x512x64", "16x16x128x64", "4x16x512x128"),
    *("1x32:8x1:8192x128", "16x32:8x1:2048x128", "8x32x1:4096x128", "32x32:8x1:512x64", "4x64:8x1:16384x128"),
    *("8x8:1x1:4096x128", "8x16:1x1:4096x256", "8x32:8x4:4096x128", "4x32:8x8:2000x128"),
    *("8x32:8x64:1024x128", "1x32:8x128:4096x128", "7x32:8x1:3000x128 + 1x32:8x512x128"),
)
PREFILL = ("1x8x512x64", "1x8x1024x64", "1x8x1024x128", "1x8x2304x128", "1x4x4096x64", "8x12x197x64", "64x8x32x64")
ONE_ROW = ("1x32x1:4096x128", "1x32x1:16384x128")
PAGE = 128


@dataclass(frozen=True)
class Workload:
    """`text`: shapes with the same heads and head width. `paged`: keys and values come from a cache."""

    text: str
    is_causal: bool = False
    paged: bool = False

    def __str__(self) -> str:
        return self.text + (", causal" if self.is_causal else "")

    @property
    def shapes(self) -> list[Shape]:
        return [Shape.parse(text) for text in self.text.split("+")]


WORKLOADS = (
    *(Workload(text, is_causal=True, paged=True) for text in SERVING),
    *(Workload(text, is_causal) for text in PREFILL for is_causal in (False, True)),
    *map(Workload, ONE_ROW),
)


class Batch:
    """The tensors of a workload: query (rows, H, D), key and value (keys, Hkv, D), one sequence after the other."""

    def __init__(self, workload: Workload, dtype: torch.dtype) -> None:
        self.workload, self.dtype, self.shape = workload, dtype, workload.shapes[0]
        self.rows = [shape.query_length for shape in workload.shapes for _ in range(shape.batch)]
        self.keys = [shape.key_length for shape in workload.shapes for _ in range(shape.batch)]
        self.row_bounds, self.key_bounds = (torch.tensor([0, *n]).cumsum(0).int() for n in (self.rows, self.keys))
        self.hides_keys = workload.is_causal and max(self.rows) > 1
        random = torch.Generator().manual_seed(0)
        sizes = (sum(self.rows), self.shape.heads), *[(sum(self.keys), self.shape.kv_heads)] * 2
        self.query, self.key, self.value = (
            torch.randn(*size, self.shape.head_dim, generator=random).to(dtype) for size in sizes
        )
        # The pages of each sequence, and where each key is, counted in slots. Page 0 is nobody's.
        counts = torch.tensor([-(-keys // PAGE) for keys in self.keys])
        first, self.pages = counts.cumsum(0) - counts + 1, 1 + int(counts.sum())
        page = torch.arange(int(counts.max()))
        self.table = torch.where(page < counts[:, None], first[:, None] + page, 0).int()
        self.slots = torch.cat(
            [start * PAGE + torch.arange(keys) for start, keys in zip(first, self.keys, strict=True)]
        )

    def dense(self) -> list[Tensor]:
        """Query, key and value as (B, H, L, D), if all sequences have the same lengths."""
        return [
            t.unflatten(0, (self.shape.batch, -1)).transpose(1, 2).contiguous()
            for t in (self.query, self.key, self.value)
        ]
