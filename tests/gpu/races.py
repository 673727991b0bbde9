"""Every kernel of the forward and the backward a thousand times, beside other work: all results have the bits of the
first run.

    python tests/gpu/races.py [--runs 1000] [--seconds 60]

Blocks that add to the same rows, and warps that share memory, run in another order each time. A missing barrier or an
unordered addition changes a bit sooner or later. The runs take turns on two streams, so that two of them overlap: they
must share no memory. Matrix products on a third stream take multiprocessors away at random moments. It fails if a bit
differs, and if the time ends before all runs are done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import scaledot

Call = Callable[[], list[Tensor]]
COMPARED_TOGETHER = 100  # runs between two looks at the result of the comparison, each of which waits for the device


def calls(device: str, length: int) -> dict[str, Call]:
    """The workloads by name. Each call returns the output and all gradients."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    def dense(
        dim: int,
        dtype: torch.dtype,
        value_dim: int = 0,
        mask: bool = False,
        rows: int = length,
        infinite: bool = False,
        **options: object,
    ) -> Call:
        query, key = randn(2, 8, rows, dim, dtype=dtype), randn(2, 2, length + 200, dim, dtype=dtype)
        value = randn(2, 2, length + 200, value_dim or dim, dtype=dtype)
        wanted = [query, key, value]
        if mask:
            wanted.append(randn(8, rows, length + 200, dtype=dtype))
        if infinite:  # for the kernels that compute once more where results are not finite
            with torch.no_grad():
                value[:, :, rows // 2] = torch.inf

        def call() -> list[Tensor]:
            torch.manual_seed(7)  # the same dropout in each run
            results = scaledot.scaled_dot_product_attention(*wanted, enable_gqa=True, **options)
            results = results if isinstance(results, tuple) else (results,)
            return [*results, *torch.autograd.grad(results, wanted, [result.detach() for result in results])]

        return call

    def packed(dim: int, dtype: torch.dtype, value_dim: int = 0, dropout_p: float = 0) -> Call:
        lengths = torch.tensor([0, length, length + 1, length + 1, 3 * length], dtype=torch.int32, device=device)
        query, key = randn(3 * length, 8, dim, dtype=dtype), randn(3 * length, 2, dim, dtype=dtype)
        wanted = [query, key, randn(3 * length, 2, value_dim or dim, dtype=dtype)]
        options = {"is_causal": True, "enable_gqa": True, "dropout_p": dropout_p}

        def call() -> list[Tensor]:
            torch.manual_seed(7)
            output = scaledot.varlen_attention(*wanted, lengths, lengths, 2 * length, 2 * length, **options)
            return [output, *torch.autograd.grad(output, wanted, output.detach())]

        return call

    def paged(dim: int, dtype: torch.dtype) -> Call:
        rows, size = torch.tensor([length, 1, 2 * length], device=device), 16
        first, pages = torch.cat([rows.new_zeros(1), rows.cumsum(0)]).int(), (2 * length + size - 1) // size
        query = randn(int(rows.sum()), 8, dim, dtype=dtype).detach()
        key, value = (randn(3 * pages, size, 2, dim, dtype=dtype).detach() for _ in range(2))
        table = torch.arange(3 * pages, dtype=torch.int32, device=device).flip(0).view(3, pages)
        options = {"is_causal": True, "causal_alignment": "lower_right", "enable_gqa": True}

        def call() -> list[Tensor]:
            arguments = (query, key, value, first, None, 2 * length, 2 * length)
            return [scaledot.varlen_attention(*arguments, seqused_k=rows.int(), block_table=table, **options)]

        return call

    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for dim in (64, 128, 256):
            found[f"plain d{dim} {name}"] = dense(dim, dtype)
            found[f"causal d{dim} {name}"] = dense(dim, dtype, is_causal=True)
        found[f"d192/128 {name}"] = dense(192, dtype, value_dim=128, is_causal=True)
        found[f"dropout, mask with a gradient {name}"] = dense(64, dtype, mask=True, dropout_p=0.2)
        found[f"d128, infinite value {name}"] = dense(128, dtype, infinite=True, is_causal=True)
        found[f"d128, one query {name}"] = dense(128, dtype, rows=1)
        found[f"d128, weights {name}"] = dense(128, dtype, is_causal=True, return_weights=True)
        for dim in (64, 128):
            found[f"packed d{dim} {name}"] = packed(dim, dtype)
            found[f"pages d{dim} {name}"] = paged(dim, dtype)
        found[f"packed d192/128 {name}"] = packed(192, dtype, value_dim=128)
        found[f"packed d64, dropout {name}"] = packed(64, dtype, dropout_p=0.2)
    return found


class OtherWork:
    """Matrix products on another stream of a CUDA device; nothing elsewhere."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.matrix = torch.randn(1024, 1024, device=device)

    def go_on(self) -> None:
        if self.stream is not None and self.stream.query():
            with torch.cuda.stream(self.stream):
                for _ in range(4):
                    torch.mm(self.matrix, self.matrix)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def runs_with_other_bits(call: Call, runs: int, work: OtherWork, end: float) -> tuple[int, int]:
    """How many of the runs differ from the first, and how many were done before `end`."""
    first = [bits(t).clone() for t in call()]
    contexts: list[Any] = [nullcontext()]
    if work.stream is not None:
        torch.cuda.synchronize()  # the other streams read what the current one has made
        contexts = [torch.cuda.stream(torch.cuda.Stream()) for _ in range(2)]
    counts = [torch.zeros((), dtype=torch.int64, device=first[0].device) for _ in contexts]

    def differ() -> int:
        if work.stream is not None:
            torch.cuda.synchronize()
        return sum(int(count) for count in counts)

    for done in range(1, runs):
        if done % COMPARED_TOGETHER == 0 and (differ() or time.monotonic() > end):
            return differ(), done
        work.go_on()
        turn = done % len(contexts)
        with contexts[turn]:
            wrong = [(bits(a) != b).any() for a, b in zip(call(), first, strict=True)]
            counts[turn] += torch.stack(wrong).any()
    return differ(), runs


def main(device: str = "cuda", runs: int = 1000, seconds: float = 60, length: int = 500) -> int:
    end, failed, work = time.monotonic() + seconds, False, OtherWork(device)
    for name, call in calls(device, length).items():
        differ, done = runs_with_other_bits(call, runs, work, end)
        failed |= differ > 0 or done < runs
        print(f"{name:<40} {done} runs, {differ} with other bits", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    raise SystemExit(main(runs=arguments.runs, seconds=arguments.seconds))
