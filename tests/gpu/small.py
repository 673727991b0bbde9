"""Every kernel on a few small ragged problems, for compute-sanitizer, which would take an hour for large ones.

    python -m gpu.small [--results results.jsonl] [--total 40] [--device cuda]

The kernels for Hopper in bfloat16 come first. It stops when the time is up, and says how far it came.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import scaledot
from gpu import families
from gpu.families import Family
from gpu.lines import Lines

SHAPES = (  # heads, KV heads, rows, keys, columns of queries and of values
    (2, 2, 130, 200, 64, 64),  # aligned, as the kernels for Hopper need it
    (2, 1, 70, 140, 128, 128),
    (2, 1, 70, 140, 192, 128),
    (2, 1, 70, 140, 256, 256),
    (4, 2, 70, 133, 40, 24),  # several tiles, grouped heads
    (2, 2, 37, 65, 136, 136),  # several panels
    (2, 1, 1, 1300, 64, 64),  # split keys
)
CLUSTERS = ((128, 128), (192, 128), (256, 256))  # columns, which the forward for Hopper computes in clusters
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LENGTHS, LONGEST, TOTAL = (0, 70, 71, 71, 130), 70, 130  # of packed sequences

Call = tuple[str, Family, Callable[[], Any]]


class Calls:
    def __init__(self, device: str) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(1)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype).requires_grad_()

    def dense(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        heads, kv_heads, rows, keys, dim, value_dim = shape
        query, key = self.randn(2, heads, rows, dim, dtype=dtype), self.randn(2, kv_heads, keys, dim, dtype=dtype)
        value = self.randn(2, kv_heads, keys, value_dim, dtype=dtype)
        output = scaledot.scaled_dot_product_attention(query, key, value, enable_gqa=True, is_causal=rows > 100)
        torch.autograd.grad(output, [query, key, value], output)

    def with_every_option(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        heads, kv_heads, rows, keys, dim, value_dim = shape
        query, key = self.randn(2, heads, rows, dim, dtype=dtype), self.randn(2, kv_heads, keys, dim, dtype=dtype)
        value = self.randn(2, kv_heads, keys, value_dim, dtype=dtype)
        shown = torch.rand(keys, generator=self.generator).to(self.device) > 0.3
        for mask in (None, shown, self.randn(rows, keys), self.randn(keys)):
            output, weights, lse = scaledot.scaled_dot_product_attention(
                query, key, value, mask, dropout_p=0.1, is_causal=True, causal_alignment="lower_right",
                enable_gqa=True, softcap=5.0, return_weights=True, return_lse=True,
            )  # fmt: skip
            wanted = [query, key, value] + ([mask] if mask is not None and mask.requires_grad else [])
            torch.autograd.grad([output, weights, lse], wanted, [output, weights, lse])

    def clusters(self, dims: tuple[int, int]) -> None:
        shapes = ((256, dims[0]), (200, dims[0]), (200, dims[1]))
        query, key, value = (self.randn(2, 2, *shape, dtype=torch.bfloat16) for shape in shapes)
        scaledot.scaled_dot_product_attention(query, key, value)

    def cu_seq(self) -> torch.Tensor:
        return torch.tensor(LENGTHS, dtype=torch.int32, device=self.device)

    def packed(self, dims: tuple[int, int], dtype: torch.dtype) -> None:
        query, key, value = (self.randn(TOTAL, 2, width, dtype=dtype) for width in (dims[0], *dims))
        cu_seq = self.cu_seq()
        output = scaledot.varlen_attention(query, key, value, cu_seq, cu_seq, LONGEST, LONGEST, is_causal=True)
        torch.autograd.grad(output, [query, key, value], output)

    def pages(self, dtype: torch.dtype, stored: torch.dtype) -> None:
        key, value = (self.randn(6, 32, 2, 64, dtype=dtype).detach() for _ in range(2))
        if stored == torch.int8:
            key, value = ((10 * t).to(stored) for t in (key, value))
        table = torch.tensor([[3, 1, 5], [0, 0, 0], [2, 4, 0], [1, 2, 3]], dtype=torch.int32, device=self.device)
        used = torch.tensor([70, 1, 40, 96], dtype=torch.int32, device=self.device)
        query = self.randn(TOTAL, 4, 64, dtype=dtype).detach()
        options = {"is_causal": True, "enable_gqa": True, "seqused_k": used, "block_table": table}
        scaledot.varlen_attention(query, key, value, self.cu_seq(), None, LONGEST, 96, **options)

    def all(self) -> Iterator[Call]:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")

            def family(dims: tuple[int, int], kind: str, name: str = name) -> Family:
                return Family(dtype=name, width=families.width(*dims), kind=kind)

            for shape in SHAPES:
                text = f"{name} {' x '.join(map(str, shape))}"
                kind = families.dense_kind(*shape[2:4], shape[4:], masks_positions=shape[2] > 100, general=False)
                yield text, family(shape[4:], kind), lambda s=shape, d=dtype: self.dense(s, d)
            if dtype == torch.bfloat16:
                for dims in CLUSTERS:
                    yield f"{name} clusters {dims}", family(dims, "cluster"), lambda w=dims: self.clusters(w)
            if dtype in (torch.bfloat16, torch.float32):
                for dims in ((64, 64), *CLUSTERS):
                    yield f"{name} packed {dims}", family(dims, "packed"), lambda w=dims, d=dtype: self.packed(w, d)
                yield f"{name} pages", family((64, 64), "pages"), lambda d=dtype: self.pages(d, d)
                yield f"{name} quantised", family((64, 64), "quantised"), lambda d=dtype: self.pages(d, torch.int8)
            for shape in SHAPES:
                text = f"{name} {' x '.join(map(str, shape))}, every option"
                yield text, family(shape[4:], "general"), lambda s=shape, d=dtype: self.with_every_option(s, d)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("gpu.small", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds for all calls; the rest is not run")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args(words)
    lines, end = Lines(arguments.results), time.monotonic() + arguments.total
    left_out = families.unsafe(arguments.results)
    for name, family, call in Calls(arguments.device).all():
        reason = families.reason(family, left_out) or ("out of time" if time.monotonic() > end else None)
        if not reason:
            call()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
        lines.add("sanitizer", call=name, **({"result": "not run", "reason": reason} if reason else {"result": "ran"}))
        print(name, reason or "", flush=True)
    print("ran on", arguments.device)
    return 0


if __name__ == "__main__":
    # torch then gets the memory of each tensor from CUDA, so that memcheck sees where a tensor ends.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    sys.exit(main(sys.argv[1:]))
