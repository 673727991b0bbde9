"""The workloads of the bench, the most important first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu import families
from gpu.families import Family

LARGEST = {torch.int8: 127.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fn: 448.0}
PRODUCTS = {
    "forward": (1, 1),
    "training": (1, 1),
    "backward": (3, 2),
    "both": (4, 3),
}  # of head_dim and value_dim columns


@dataclass(frozen=True)
class Work:
    kind: str  # plain, causal, float_mask, bias, dropout, weights, window, decode, cache, packed, packed_causal
    direction: str  # forward, training, backward, both
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype | None = None  # of keys and values in pages; None: they are not in pages
    bar_tflops: float = 0  # 0: none
    bar_ratio: float = 0  # minimum of torch's best time over ours; 0: none

    @property
    def name(self) -> str:
        dtype = "/".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.cache) if dtype)
        dims = f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.direction} {self.kind} d{dims} {dtype} {self.queries}x{self.keys}"

    @property
    def is_packed(self) -> bool:
        return self.kind.startswith("packed")

    @property
    def is_causal(self) -> bool:
        return self.kind in ("causal", "packed_causal")

    @property
    def operations(self) -> float:
        scores = self.batch * self.queries * self.keys
        if self.is_packed:
            scores = sum(length**2 for length in self.lengths)
        products = PRODUCTS[self.direction]
        columns = products[0] * self.head_dim + products[1] * self.value_dim
        return 2 * self.heads * scores * columns * (0.5 if self.is_causal else 1)

    def family(self, kernel: str) -> Family:
        """That of its last kernel."""
        direction = "backward" if self.direction in ("backward", "both") else "forward"
        dims = (self.head_dim, self.value_dim)
        general = self.kind in ("float_mask", "bias", "dropout")
        positions = self.is_causal or self.kind == "window"
        kind = families.dense_kind(self.queries, self.keys, dims, masks_positions=positions, general=general)
        if self.is_packed:
            kind = "packed"
        elif self.cache:
            kind = "pages" if self.cache == self.dtype else "quantised"
        dtype = str(self.dtype).removeprefix("torch.")
        return Family(kernel, direction, dtype, families.width(*dims), families.of_direction(kind, direction))

    @property
    def lengths(self) -> list[int]:
        """Of packed sequences: short and long ones in turn, batch * queries tokens in all."""
        return [self.queries // 2, 2 * self.queries - self.queries // 2] * (self.batch // 2)

    @property
    def bytes_read(self) -> float:
        columns = self.heads * (self.head_dim + self.value_dim)
        return self.batch * self.keys * columns * (self.cache or self.dtype).itemsize


def works(tokens: int = 16384, width: int = 2048, longest: int = 65536) -> list[Work]:
    """All workloads, the most important first: batch * length = tokens, heads * head_dim = width, decoding over
    `longest` keys."""

    def work(kind: str, direction: str, parts: int, dim: int, **more: Any) -> Work:
        length = tokens // parts
        return Work(kind, direction, parts, max(width // dim, 1), length, length, dim, dim, **more)

    short = [work("causal", direction, 16, 128) for direction in ("both", "training", "backward", "forward")]
    rows = [
        work("causal", "forward", 4, 128, bar_tflops=570, bar_ratio=1),
        work("plain", "forward", 1, 128, bar_tflops=620, bar_ratio=1),
        work("causal", "backward", 2, 128, bar_tflops=450, bar_ratio=0.95),
        *short[:2],
        work("causal", "both", 4, 128),
        Work("plain", "training", 1, 8, 128, 128, 128, 128),  # what a launch costs
        work("causal", "forward", 4, 64, bar_tflops=430, bar_ratio=1),
        work("causal", "backward", 2, 64),
        work("packed_causal", "forward", 8, 128, bar_ratio=1),
        work("plain", "forward", 4, 256),
        Work("decode", "forward", 1, width // 128, 1, longest, 128, 128),
        *short[2:],
    ]
    for dim, dense, causal in ((128, 620, 570), (64, 470, 430)):
        for parts in (1, 2, 4):
            rows += [work("plain", "forward", parts, dim, bar_tflops=dense, bar_ratio=1)]
            rows += [work("causal", "forward", parts, dim, bar_tflops=causal, bar_ratio=1)]
    rows += [work("plain", "backward", 2, 128, bar_tflops=500, bar_ratio=0.95)]
    rows += [work("causal", "backward", 2, 128, bar_tflops=450, bar_ratio=0.95)]
    rows += [work("plain", "backward", 4, 128), work("plain", "backward", 2, 64), work("causal", "backward", 2, 64)]
    rows += [work("plain", "backward", 2, 256), work("causal", "backward", 2, 256)]
    for direction in ("forward", "backward"):
        for kind in ("plain", "causal"):  # as DeepSeek-V3 trains
            rows += [replace(work(kind, direction, 4, 128, bar_ratio=1), head_dim=192)]
        rows += [work("packed", direction, 8, dim, bar_ratio=1) for dim in (64, 128)]
        rows += [work("packed_causal", direction, 8, 128, bar_ratio=1)]
        rows += [replace(work("packed_causal", direction, 8, 128), head_dim=192)]  # torch has no such kernel
    decode = Work("decode", "forward", 1, width // 128, 1, longest, 128, 128)
    rows += [decode, replace(decode, dtype=torch.float16)]
    rows += [replace(decode, cache=cache) for cache in (torch.bfloat16, torch.float8_e4m3fn, torch.int8)]
    rows += [work("cache", "forward", 4, 128, cache=cache) for cache in (torch.bfloat16, *LARGEST)]
    rows += [work("cache", "forward", 4, 64, cache=cache) for cache in (torch.bfloat16, torch.float8_e4m3fn)]
    for kind in ("float_mask", "bias", "dropout", "window"):
        rows += [work(kind, direction, 4, 128, bar_ratio=2) for direction in ("forward", "backward")]
    rows += [work("weights", "forward", 4, 128, bar_ratio=2)]
    for direction in ("forward", "backward"):
        rows += [work("plain", direction, 4, 128, dtype=torch.float32, bar_ratio=1.2)]
    once: dict[str, Work] = {}
    for row in rows:
        once.setdefault(row.name, row)
    return list(once.values())
