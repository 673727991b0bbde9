"""How long each kernel of a forward and of a backward takes on the GPU, by torch's profiler.

    python -m gpu.kernel_times [--results results.jsonl] [--tokens 16384] [--device cuda]

The calls have bfloat16, causal masks and 2,048 columns in all heads together, and are of 16, 4 and 1 sequences.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import scaledot
from gpu import families
from gpu.families import Family
from gpu.jobs import Crew, Tell
from gpu.lines import Lines

WIDTH = 2048  # columns of all heads
DIMS = (128, 64, 256)
SEQUENCES = (16, 4, 1)
CALLS = 3  # that are profiled, after one that loads the kernels
SECONDS = 20.0  # for one call

Shape = tuple[int, int]  # sequences, head_dim


def short(name: str) -> str:
    """A kernel's name without its namespaces, arguments and return type."""
    name = re.sub(r"scaledot::|\(anonymous namespace\)::|<unnamed>::|void ", "", name)
    return name.split("(")[0][:120]


def times(shape: Shape, tokens: int, device: str) -> dict[str, dict[str, float]]:
    """By direction, the microseconds of each kernel (on a CPU, of each op) in one call, and of all: "total"."""
    batch, dim = shape
    size = (batch, max(WIDTH // dim, 1), tokens // batch, dim)
    leaves = [torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    found: dict[str, dict[str, float]] = {}

    def output() -> torch.Tensor:
        return scaledot.scaled_dot_product_attention(*leaves, is_causal=True)

    recorded = output()
    grad = torch.randn_like(recorded)

    def gradients() -> None:
        torch.autograd.grad(recorded, leaves, grad, retain_graph=True)

    for direction, call in (("forward", output), ("backward", gradients)):
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        with profile(activities=[activity]) as profiler:
            for _ in range(CALLS):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
        events = profiler.key_averages()
        taken = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        sums = {short(event.key): getattr(event, taken) / CALLS for event in events if getattr(event, taken) > 0}
        order = sorted(sums.items(), key=lambda pair: -pair[1])
        found[direction] = {"total": round(sum(sums.values()), 1), **{name: round(us, 1) for name, us in order}}
    return found


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("gpu.kernel_times", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=16384, help="of all sequences (default: %(default)s)")
    parser.add_argument("--total", type=float, default=60, help="seconds for all calls; the rest is not run")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    lines, left_out, failed = Lines(arguments.results), families.unsafe(arguments.results), []

    def skip(shape: Shape) -> str | None:
        return families.reason(Family("", "", "bfloat16", families.width(shape[1], shape[1]), "plain"), left_out)

    def work(shape: Shape, tell: Tell) -> dict[str, Any]:
        return {"result": "done", **times(shape, arguments.tokens, arguments.device)}

    def ended(shape: Shape, facts: dict[str, Any]) -> None:
        batch, dim = shape
        name = f"{batch} x {arguments.tokens // batch} d{dim} causal"
        lines.add("profile", call=name, **facts)
        if facts["result"] != "done":
            failed.append(name)
            print(f"{name}: {facts['result']} {facts.get('reason', facts.get('error', ''))}", flush=True)
            return
        for direction in ("forward", "backward"):
            kernels = facts[direction]
            print(f"{name} {direction}: {kernels['total']:.1f} us", flush=True)
            for kernel, taken in list(kernels.items())[1:]:
                print(f"    {taken:9.1f} us  {kernel}", flush=True)

    shapes = [(batch, dim) for dim in DIMS for batch in SEQUENCES]
    until = time.monotonic() + arguments.total
    Crew(shapes, work, ended, parallel=1, seconds=SECONDS, jobs_a_process=len(shapes), until=until, skip=skip).run()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
