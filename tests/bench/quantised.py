"""Attention over a quantised cache against the same call over a bfloat16 cache, and against dequantising it first.

    python tests/bench/quantised.py [--threads 1] [--seconds 1]

Medians of the three timed in turn. SCALEDOT_CPU_CAPABILITY=avx2 excludes AVX-512.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import scaledot
from scaledot.compare.report import time_of
from scaledot.compare.timing import Effort, alternate

# Query rows, keys, query heads, KV heads.
SHAPES = {"decode 32:32": (1, 16384, 32, 32), "decode 32:8": (1, 16384, 32, 8), "prefill 32:8": (1024, 1024, 32, 8)}
CACHES = {"int8": torch.int8, "float8_e5m2": torch.float8_e5m2, "float8_e4m3fn": torch.float8_e4m3fn}
WIDTH = 128


@dataclass
class Work:
    """One causal sequence over a cache."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor

    @staticmethod
    def of(shape: tuple[int, int, int, int], cache: torch.dtype) -> Work:
        rows, keys, heads, kv_heads = shape
        factor = 40 if cache == torch.int8 else 1
        key, value = ((torch.randn(keys, kv_heads, WIDTH) * factor).to(cache) for _ in range(2))
        return Work(torch.randn(rows, heads, WIDTH).bfloat16(), key, value, torch.full((kv_heads,), 1 / factor))

    def attend(self, key: Tensor, value: Tensor, scale: Tensor | None = None) -> Any:
        lengths = len(self.query), len(key)
        bounds = (torch.tensor([0, n]) for n in lengths)
        return scaledot.varlen_attention(
            self.query, key, value, *bounds, *lengths, True, enable_gqa=True, k_scale=scale, v_scale=scale
        )

    def wide(self, stored: Tensor) -> Tensor:
        return stored.bfloat16() * self.scale.bfloat16()[:, None]

    def quantised(self) -> Any:
        return self.attend(self.key, self.value, self.scale)

    def dequantised_each_time(self) -> Any:
        return self.attend(self.wide(self.key), self.wide(self.value))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of each line")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{scaledot.cpu_capability()}, {arguments.threads} thread(s), D = {WIDTH}, bfloat16 queries")
    print(f"{'':<14}{'cache':<15}{'quantised':>12}{'bfloat16':>12}{'ratio':>7}{'dequantised':>14}{'ratio':>7}")
    for name, shape in SHAPES.items():
        for cache, dtype in CACHES.items():
            work = Work.of(shape, dtype)
            plain = Work(work.query, work.wide(work.key), work.wide(work.value), work.scale)
            calls = work.quantised, lambda plain=plain: plain.attend(plain.key, plain.value), work.dequantised_each_time
            ours, wide, both = (t.median for t in alternate(calls, Effort(arguments.seconds, 7)))
            text = f"{time_of(ours):>12}{time_of(wide):>12}{wide / ours:>7.2f}{time_of(both):>14}{both / ours:>7.2f}"
            print(f"{name:<14}{cache:<15}{text}")


if __name__ == "__main__":
    main()
