"""python -m scaledot compare --distributed: sharded attention against one process, and against the cost model.

    torchrun --nproc-per-node 4 -m scaledot compare --distributed

measures a forward and backward on the ranks that torchrun started. It prints how much each method sent, and how much of
the transfer time was hidden by computation. For comparison it prints the estimate of the cost model, from the kernel
and link measured here, and the scaling curve of the model to 1,024 ranks.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._load import OPS
from .._torch.inputs import QKV_GRADIENTS, backward_arguments
from ..compare.columns import Column, Columns, terminal_width
from ..functional import scaled_dot_product_attention
from ..merge import merge_states
from . import cost, ring, transport
from .attention import context_parallel_attention
from .placement import runs_of_ranks, shard, unshard
from .schedule import Reach, Schedule

_COLUMNS = [
    Column("method", 24, left=True),
    Column("forward", 9, drop=2),
    Column("step", 9),
    Column("one process", 11),
    Column("sent a step", 12),
    Column("waiting", 7, drop=1),
    Column("overlap", 7, drop=1),
    Column("model", 9, drop=3),
    Column("step/model", 10, drop=3),
]
RANKS = [2**k for k in range(11)]  # of the scaling curve
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class _Setting:
    """The case that is measured: one causal attention with a quarter as many KV heads as query heads."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.dtype_name = arguments.dtype[0]
        self.dtype = _DTYPES[self.dtype_name]
        self.heads, self.head_dim = arguments.heads, arguments.head_dim
        self.kv_heads = max(self.heads // 4, 1)
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads: got {self.heads}; needs a multiple of its quarter, {self.kv_heads}")
        self.length = arguments.length or (1024 if arguments.quick else 4096)
        self.repeats = 3 if arguments.quick else 9

    @property
    def work(self) -> cost.Work:
        dim = self.head_dim
        return cost.Work(1, self.heads, self.kv_heads, self.length, dim, dim, self.dtype.itemsize)

    def short(self, ranks: int) -> _Setting:
        """A copy with 16 positions a rank."""
        result = copy.copy(self)
        result.length = 16 * ranks
        return result

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, h, self.length, self.head_dim) for h in heads]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]


def _slowest(seconds: float) -> float:
    """The largest of all ranks' times."""
    largest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _timed(body: Callable[[], Any], repeats: int) -> float:
    """The time of the slowest rank in the fastest repeat, the one that other programs disturbed least."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        body()
        times.append(_slowest(time.perf_counter() - start))
    return min(times[1:])  # the first warms up


# ------------------------------------------------------------------------------------------------- kernel and link
def measure_kernel(setting: _Setting) -> cost.Kernel:
    """The kernel of this rank while all compute: two sizes give the time of a score and of a call, with merging."""
    query, key, value, grad = setting.tensors()
    ranks = dist.get_world_size()
    large = max(setting.length // (2 * ranks), 64)
    small = max(large // 4, 16)
    op, backward = OPS.sdpa.default, OPS.sdpa_backward.default
    seconds: dict[tuple[int, str], float] = {}
    options = backward_arguments({"enable_gqa": True})
    for size in (small, large):
        q, k, v, g = (t[:, :, :size].contiguous() for t in (query, key, value, grad))
        output, lse, _ = op(q, k, v, enable_gqa=True)
        state = output.float(), lse

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, state: tuple[Tensor, Tensor] = state) -> None:
            found, lse, _ = op(q, k, v, enable_gqa=True)
            merge_states(*state, found, lse)

        def gradients(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, g: Tensor = g, output: Tensor = output, lse: Tensor = lse
        ) -> None:
            arguments = options | {
                "grad_output": g, "query": q, "key": k, "value": v, "output": output, "lse": lse,
                "part": [0, 0, 0, 0, 0, q.shape[1]], "output_mask": QKV_GRADIENTS,
            }  # fmt: skip
            found = backward(**arguments)
            for t in found[:3]:
                t.float().add_(1.0)  # as the ring sums them

        for name, body in (("forward", forward), ("backward", gradients)):
            seconds[size, name] = _timed(body, setting.repeats)
    more = (large**2 - small**2) * setting.heads
    rates = {name: max(seconds[large, name] - seconds[small, name], 0.0) / more for name in ("forward", "backward")}
    overhead = max(seconds[small, "forward"] - small**2 * setting.heads * rates["forward"], 0.0)
    return cost.Kernel(rates["forward"], rates["backward"], overhead)


def measure_link(setting: _Setting) -> cost.Link:
    """The link when each rank sends to the next, all at once: a small message, a large one, and packing the latter."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    seconds = {}
    for size in (64, 4 << 20):
        data, arriving = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

        def exchange(data: Tensor = data, arriving: Tensor = arriving) -> None:
            out = transport.Message(data, (rank + 1) % ranks, 0)
            transport.wait(transport.post([out], [transport.Message(arriving, (rank - 1) % ranks, 0)], group, "link"))

        seconds[size] = _timed(exchange, 4 * setting.repeats)
    more = max(seconds[4 << 20] - seconds[64], 1e-9)
    heads = torch.zeros(4, 4 << 20, dtype=torch.uint8).view(4, 2, -1)
    copying = _timed(lambda: transport.pack([heads[:, 0]]), setting.repeats) / heads[:, 0].numel()
    return cost.Link(seconds[64], ((4 << 20) - 64) / more, copying)


# ---------------------------------------------------------------------------------------------------- measurements
def _plans(ranks: int, setting: _Setting) -> list[tuple[str, Any, DeviceMesh]]:
    plans: list[tuple[str, Any, DeviceMesh]] = [("ring", "ring", init_device_mesh("cpu", (ranks,)))]
    if setting.heads % ranks == 0:
        plans.append(("all_to_all", "all_to_all", plans[0][2]))
    if ranks % 2 == 0 and ranks > 2 and setting.heads % 2 == 0:
        both = init_device_mesh("cpu", (ranks // 2, 2))
        plans.append((f"ring {ranks // 2} x all_to_all 2", ("ring", "all_to_all"), both))
    return plans


class _Call:
    """The attention of one method, on this rank's share."""

    def __init__(self, setting: _Setting, method: Any, mesh: DeviceMesh) -> None:
        *tensors, grad = [shard(t, mesh, 2) for t in setting.tensors()]
        self.leaves, self.grad = [t.requires_grad_() for t in tensors], grad
        self.method, self.mesh = method, mesh

    def forward(self) -> Tensor:
        query, key, value = self.leaves
        return context_parallel_attention(
            query, key, value, self.mesh, is_causal=True, enable_gqa=True, method=self.method
        )

    def step(self) -> None:
        """Forward and backward."""
        torch.autograd.grad(self.forward(), self.leaves, self.grad)


def _run(setting: _Setting, method: Any, mesh: DeviceMesh, wanted: Tensor) -> dict[str, Any]:
    call = _Call(setting, method, mesh)
    found = unshard(call.forward().detach(), mesh, 2)
    result: dict[str, Any] = {"error": float((found.double() - wanted.double()).abs().max())}
    waits: list[float] = []

    def alone() -> None:
        with torch.no_grad(), transport.measure() as traffic:
            call.forward()
        waits.append(traffic.waiting)

    result["forward"] = _timed(alone, setting.repeats)
    result["waiting"] = _slowest(min(waits[1:]))
    result["step"] = _timed(call.step, setting.repeats)
    with transport.measure() as traffic:
        call.step()
    result["sent"] = dict(traffic.sent)
    if method == "ring" and mesh.size() > 1:
        runs = runs_of_ranks(setting.length, mesh.size(), "zigzag")
        schedule = Schedule(runs, runs, Reach(right=0))
        rank, heads = mesh.get_local_rank(), setting.heads
        job = ring.Job(schedule, mesh.get_group(), rank, first_head=0, heads=heads, options={})
        key, value = (t.detach() for t in call.leaves[1:])
        transfers = _timed(lambda: ring.circulate(job, key, value), setting.repeats)
        result["transfers"] = transfers
        result["overlap"] = max(0.0, 1.0 - result["waiting"] / transfers)
    return result


def _estimate(setting: _Setting, name: str, ranks: int, kernel: cost.Kernel, link: cost.Link) -> cost.Estimate | None:
    if name == "ring":
        return cost.ring(setting.work, ranks, kernel, link)
    if name == "all_to_all":
        return cost.all_to_all(setting.work, ranks, kernel, link)
    return cost.both(setting.work, ranks // 2, 2, kernel, link)


def _fixed(setting: _Setting, name: str, method: Any, mesh: DeviceMesh, kernel: cost.Kernel, link: cost.Link) -> float:
    """Seconds of a step that do not depend on the length: Python and autograd. From a step with few positions."""
    short = setting.short(dist.get_world_size())
    estimate = _estimate(short, name, dist.get_world_size(), kernel, link)
    measured = _timed(_Call(short, method, mesh).step, 4 * setting.repeats)
    return 0.0 if estimate is None else max(measured - estimate.seconds, 0.0)


def _one_process(setting: _Setting) -> tuple[Tensor, float]:
    """The output, and the time for one process: the first rank computes everything while the others wait."""
    query, key, value, grad = setting.tensors()
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    times = []
    if dist.get_rank() == 0:
        for _ in range(setting.repeats):
            start = time.perf_counter()
            found = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            torch.autograd.grad(found, leaves, grad)
            times.append(time.perf_counter() - start)
    dist.barrier()
    return output.detach(), _slowest(min(times, default=0.0))


# ----------------------------------------------------------------------------------------------------- the command
def run(arguments: argparse.Namespace) -> int:
    """Runs the command on this rank; the first one prints."""
    if arguments.device.type != "cpu":
        raise ValueError(f"--device: got {arguments.device}; --distributed measures on cpu, with gloo")
    setting = _Setting(arguments)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        try:
            return _report(setting, arguments)
        finally:
            dist.destroy_process_group()


def _report(setting: _Setting, arguments: argparse.Namespace) -> int:
    ranks, first = dist.get_world_size(), dist.get_rank() == 0

    def say(text: str = "") -> None:
        if first:
            print(text, flush=True)

    say(
        f"{setting.heads} heads ({setting.kv_heads} of keys) of {setting.head_dim}, {setting.length} positions, "
        f"causal, {setting.dtype_name}; ranks: {ranks}, {torch.get_num_threads()} thread(s) each, gloo"
    )
    wanted, one = _one_process(setting)
    kernel, link = measure_kernel(setting), measure_link(setting) if ranks > 1 else cost.Link(0.0, 1e9)
    say(
        f"measured: {kernel.forward * 1e12:.0f} ps a score forward, {kernel.backward * 1e12:.0f} backward, "
        f"{kernel.overhead * 1e6:.0f} us a call; link {link.latency * 1e6:.0f} us, {link.bandwidth / 1e9:.2f} GB/s, "
        f"copies {1e-9 / max(link.copying, 1e-15):.2f} GB/s\n"
    )
    columns = Columns(_COLUMNS, terminal_width(), first=1)
    say(columns.heading()[0])
    say(columns.line(["one process", "", f"{one * 1e3:.1f} ms", "1.00x", *[""] * 5]))
    tolerance = 4 * float(torch.finfo(setting.dtype).eps) * float(wanted.double().abs().max())
    found, wrong = [], 0
    for name, method, mesh in _plans(ranks, setting):
        row = _run(setting, method, mesh, wanted)
        estimate = _estimate(setting, name, ranks, kernel, link)
        fixed = _fixed(setting, name, method, mesh, kernel, link)
        model = math.nan if estimate is None else estimate.seconds + fixed
        sent = sum(row["sent"].values())
        overlap = f"{row['overlap']:.0%}" if "overlap" in row else "-"
        right = row["error"] <= tolerance
        wrong += not right
        cells = [
            *(name, f"{row['forward'] * 1e3:.1f} ms", f"{row['step'] * 1e3:.1f} ms", f"{one / row['step']:.2f}x"),
            *(f"{sent / 2**20:.2f} MiB", f"{row['waiting'] / row['forward']:.0%}", overlap),
            *(f"{model * 1e3:.1f} ms", f"{row['step'] / model:.2f}x"),
        ]
        say(columns.line(cells) + ("" if right else f"   WRONG: error {row['error']:.1e}"))
        found.append({"method": name, "model": model, "fixed": fixed, **row})
    say("\nmodel: with the time of a step of 16 positions a rank that the model does not explain (Python, autograd)")
    say("waiting: share of the forward; overlap: share of the forward's transfers, timed alone, that was hidden")

    curve = scaling(arguments, setting, kernel)
    say("\n" + "\n".join(_table(curve, arguments, kernel, setting)))
    if first and arguments.json is not None:
        readings = {"ranks": ranks, "one_process": one, "kernel": vars(kernel), "link": vars(link), "methods": found}
        readings["scaling"] = {str(n): {e.name: e.seconds for e in row} for n, row in curve.items()}
        arguments.json.write_text(json.dumps(readings, indent=1) + "\n")
        say(f"\nreadings: {arguments.json}")
    if first and arguments.plot is not None:
        draw(curve, arguments.plot, _title(arguments, setting))
        say(f"\nplot: {arguments.plot}")
    return 1 if wrong else 0


# -------------------------------------------------------------------------------------------------- the scaling curve
def scaling(arguments: argparse.Namespace, setting: _Setting, measured: cost.Kernel) -> dict[int, list[cost.Estimate]]:
    """The estimates of the model for 1 to 1,024 ranks, one for each method that is possible."""
    work = cost.Work(1, 32, 8, arguments.curve_length, 128, 128)
    kernel = measured
    if arguments.tflops is not None:
        kernel = cost.kernel_of(arguments.tflops * 1e12, 128, 128)
    else:  # of another width
        ratio = 128 / setting.head_dim
        kernel = cost.Kernel(measured.forward * ratio, measured.backward * ratio, measured.overhead)
    link = cost.Link(arguments.latency * 1e-6, arguments.bandwidth * 1e9)
    curve = {}
    for ranks in RANKS:
        tried: list[cost.Estimate | None]
        if ranks == 1:
            tried = [cost.one(work, kernel)]
        else:
            tried = [
                cost.ring(work, ranks, kernel, link),
                cost.all_to_all(work, ranks, kernel, link),
                cost.best(work, ranks, kernel, link),
            ]
        curve[ranks] = [e for e in tried if e is not None]
    return curve


def _title(arguments: argparse.Namespace, setting: _Setting) -> str:
    speed = f"{arguments.tflops:g} TFLOP/s a rank" if arguments.tflops else "the kernel as measured"
    return (
        f"32 heads (8 of keys) of 128, {arguments.curve_length} positions, causal, bfloat16; {speed}, "
        f"links of {arguments.latency:g} us and {arguments.bandwidth:g} GB/s"
    )


def _table(
    curve: dict[int, list[cost.Estimate]], arguments: argparse.Namespace, kernel: cost.Kernel, setting: _Setting
) -> list[str]:
    whole = curve[1][0].seconds
    lines = ["model: " + _title(arguments, setting), "a forward and backward in ms, and its efficiency (1: as fast as "
             "so many ranks can be)", f"{'ranks':>6} {'ring':>18} {'all_to_all':>18} {'both':>18}"]  # fmt: skip
    for ranks, row in curve.items():
        cells = {_kind(e): f"{e.seconds * 1e3:.4g} ({whole / ranks / e.seconds:.2f})" for e in row}
        mesh = next((e.name for e in row if _kind(e) == "both"), "")
        text = " ".join(f"{cells.get(kind, '-'):>18}" for kind in ("ring", "all_to_all", "both"))
        if ranks > 1:
            lines.append(f"{ranks:>6} {text}  {mesh}")
        else:
            lines.append(f"{ranks:>6} {whole * 1e3:>12.4g} (1.00)")
    return lines


def _kind(estimate: cost.Estimate) -> str:
    return estimate.name if estimate.name in ("ring", "all_to_all", "one process") else "both"


def draw(curve: dict[int, list[cost.Estimate]], path: Path, title: str) -> None:
    """Plots efficiency over ranks, with a line for each method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    whole = curve[1][0].seconds
    styles = {"ring": ("#27548a", "o"), "all_to_all": ("#e08e45", "s"), "both": ("#5f9e78", "D")}
    for kind, (colour, marker) in styles.items():
        points = [(n, whole / n / e.seconds) for n, row in curve.items() for e in row if _kind(e) == kind]
        label = "ring x all_to_all, best mesh" if kind == "both" else kind
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=5, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [f"{n:,}" for n in RANKS])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("ranks")
    axes.set_ylabel("efficiency")
    axes.set_title(title, size=8)
    axes.grid(color="#e3e7ea")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
