"""Every kernel of the forward and the backward a thousand times, beside other work: all results have the bits of the
first run.

    python -m gpu.races [--results results.jsonl] [--runs 1000] [--total 60] [--device cuda]

Blocks that add to the same rows, and warps that share memory, run in another order each time. A missing barrier or an
unordered addition changes a bit sooner or later. The runs take turns on two streams, so that two of them overlap: they
must share no memory. Matrix products on a third stream take multiprocessors away at random moments. It fails if a bit
differs, and if the time ends before all runs are done. Calls run in a forked process, which is replaced if one faults
or hangs. Calls of a family of which one hung or faulted before are left out (families.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import scaledot
from gpu import families
from gpu.families import Family
from gpu.jobs import Crew, Tell
from gpu.lines import Lines

Call = Callable[[], list[Tensor]]
COMPARED_TOGETHER = 100  # runs between two looks at the result of the comparison, each of which waits for the device
SECONDS = 30.0  # for one workload


@dataclass(frozen=True)
class Workload:
    name: str
    family: Family
    make: Callable[[], Call]


def workloads(device: str, length: int) -> list[Workload]:
    """Each call returns the output and all gradients."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    def dense(
        dim: int,
        dtype: torch.dtype,
        value_dim: int = 0,
        mask: bool = False,
        rows: int = length,
        keys: int = length + 200,
        infinite: bool = False,
        **options: object,
    ) -> Call:
        query, key = randn(2, 8, rows, dim, dtype=dtype), randn(2, 2, keys, dim, dtype=dtype)
        value = randn(2, 2, keys, value_dim or dim, dtype=dtype)
        wanted = [query, key, value]
        if mask:
            wanted.append(randn(8, rows, keys, dtype=dtype))
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

    found: list[Workload] = []

    def add(name: str, dtype: torch.dtype, kind: str, make: Callable[..., Call], dim: int, **more: Any) -> None:
        dtype_name = str(dtype).removeprefix("torch.")
        family = Family(dtype=dtype_name, width=families.width(dim, more.get("value_dim", dim)), kind=kind)
        found.append(Workload(f"{name} {dtype_name}", family, lambda: make(dim, dtype, **more)))

    for dtype in (torch.bfloat16, torch.float32):
        for dim in (64, 128, 256):
            add(f"plain d{dim}", dtype, "plain", dense, dim)
            add(f"causal d{dim}", dtype, "plain", dense, dim, is_causal=True)
        add("d192/128", dtype, "plain", dense, 192, value_dim=128, is_causal=True)
        add("dropout, mask with a gradient", dtype, "general", dense, 64, mask=True, dropout_p=0.2)
        add("d128, infinite value", dtype, "plain", dense, 128, infinite=True, is_causal=True)
        add("d128, one query, many keys", dtype, "split", dense, 128, rows=1, keys=5 * length)
        add("d128, weights", dtype, "plain", dense, 128, is_causal=True, return_weights=True)
        for dim in (64, 128):
            add(f"packed d{dim}", dtype, "packed", packed, dim)
            add(f"pages d{dim}", dtype, "pages", paged, dim)
        add("packed d192/128", dtype, "packed", packed, 192, value_dim=128)
        add("packed d64, dropout", dtype, "packed", packed, 64, dropout_p=0.2)
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


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("gpu.races", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=1000, help="of each workload (default: %(default)s)")
    parser.add_argument("--total", type=float, default=60, help="seconds for all workloads (default: %(default)s)")
    parser.add_argument("--length", type=int, default=500, help="of queries (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    lines, results, failed = Lines(arguments.results), arguments.results, []
    end = time.monotonic() + arguments.total

    def skip(workload: Workload) -> str | None:
        return families.reason(workload.family, families.unsafe(results))

    def work(workload: Workload, tell: Tell) -> dict[str, Any]:
        tell(family=str(workload.family))
        other = OtherWork(arguments.device)
        differ, done = runs_with_other_bits(workload.make(), arguments.runs, other, end)
        verdict = "differs" if differ else "same" if done == arguments.runs else "same so far"
        return {"result": verdict, "runs": done, "differ": differ}

    def ended(workload: Workload, facts: dict[str, Any]) -> None:
        if facts["result"] != "same":
            failed.append(workload.name)
        lines.add("races", call=workload.name, **facts)
        more = f"{facts['runs']} runs, {facts['differ']} with other bits" if "runs" in facts else facts["result"]
        print(f"{workload.name:<40} {more} {facts.get('reason', '')}".rstrip(), flush=True)

    every = workloads(arguments.device, arguments.length)
    Crew(every, work, ended, parallel=1, seconds=SECONDS, jobs_a_process=len(every), until=end + 2, skip=skip).run()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
