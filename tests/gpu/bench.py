"""The bench of the CUDA kernels: this library against each of torch's backends, in one run, with the bars to meet.

    python -m gpu.bench [--results results.jsonl] [--table bench.md] [--total 90] [--device cuda]

A row is one workload. Its results are first compared with torch's. Then the candidates are timed in turn, several
times; the median counts. Operations are those of the matrix products: 2 B H Lq Lk (D + Dv) for a forward,
2 B H Lq Lk (3 D + 2 Dv) for a backward, half of that if causal. A training forward is recorded for a backward, and
"both" are a training forward and its backward. The peers of packed sequences are F.sdpa on jagged nested tensors, with
each backend, and varlen_attn of torch.nn.attention.varlen. The peers of a cache in pages are F.sdpa on the same keys
and values, neither in pages nor quantised, which have cost it nothing to make.

The rows that matter most come first. They run in forked processes, ten in each, with a limit for each row. Rows of a
family of which a call hung or faulted before are left out (families.py). The table is rewritten after every row. It is
for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import scaledot
from gpu import families
from gpu.families import Family
from gpu.jobs import Crew, Tell
from gpu.lines import Lines
from gpu.machine import gpu_state
from gpu.workloads import LARGEST, Work, works

Call = Callable[[], list[Tensor]]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS = ("default", *BACKENDS, "varlen")  # torch's own choice, its backends, and its function for packed sequences
ROUNDS = 7  # readings of each candidate
READING = 0.012  # seconds
PAGE = 16  # rows of a page of a cache
MAX_OVER_PLAIN = 1.3  # time with an option over time without it; not for weights, which take a separate pass
MIN_OF_COPY = 0.8  # bytes that decoding reads per second, over the bandwidth of a copy
ROW = 30.0  # seconds for one row
ROWS_A_PROCESS = 10
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}  # |ours - torch| / |torch|


class Problem:
    """The tensors of a workload, and its call in this library and in torch."""

    def __init__(self, work: Work, device: str) -> None:
        self.work = work
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=work.dtype)

        self.offsets: Tensor | None = None
        if work.is_packed:
            self.offsets = torch.tensor([0, *work.lengths], device=device).cumsum(0)
            self.cu_seq = self.offsets.int()
            of_rows = of_keys = (sum(work.lengths), work.heads)
        elif work.cache:
            of_rows, of_keys = (work.batch * work.queries, work.heads), (work.batch, work.keys, work.heads)
        else:
            of_rows, of_keys = ((work.batch, work.heads, length) for length in (work.queries, work.keys))
        self.query, self.key = randn(*of_rows, work.head_dim), randn(*of_keys, work.head_dim)
        self.value, self.grad = randn(*of_keys, work.value_dim), randn(*of_rows, work.value_dim)
        if work.cache:
            self.make_cache(work.cache, generator)
        self.left = max(work.keys // 4 - 1, 1)
        self.mask: Tensor | None = None
        self.band: Tensor | None = None  # the window as a boolean mask, for torch
        if work.kind == "window":
            i, j = (torch.arange(n, device=device) for n in (work.queries, work.keys))
            self.band = (j <= i[:, None]) & (j >= i[:, None] - self.left)
        if work.kind in ("float_mask", "bias"):
            heads = () if work.kind == "float_mask" else (1, work.heads)
            self.mask = randn(*heads, work.queries, work.keys)
        self.wanted = [self.query, self.key, self.value]
        if work.kind == "bias":
            assert self.mask is not None
            self.wanted.append(self.mask)
        if work.direction != "forward":
            for tensor in self.wanted:
                tensor.requires_grad_()
        self.options: dict[str, Any] = {"is_causal": work.is_causal}
        self.nested = [self.as_nested(tensor) for tensor in self.wanted] if work.is_packed else []
        if work.kind == "dropout":
            self.options["dropout_p"] = 0.1
        self.as_varlen = self.varlen_call() if work.is_packed or work.cache else None

    def our_options(self) -> dict[str, Any]:
        more = {"window": {"window": (self.left, 0)}, "weights": {"return_weights": True}}.get(self.work.kind, {})
        return {**self.options, **more}

    def as_nested(self, tensor: Tensor) -> Tensor:
        """(batch, heads, lengths, width), in the same memory. It knows the lengths, so no call waits to read them."""
        least, most = min(self.work.lengths), max(self.work.lengths)
        jagged = torch.nested.nested_tensor_from_jagged(tensor, self.offsets, min_seqlen=least, max_seqlen=most)
        return jagged.transpose(1, 2)

    def make_cache(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        """Keys and values as `dtype`, in pages in a random order. `key` and `value` become what they stand for."""
        work, device = self.work, self.query.device
        pages = work.batch * work.keys // PAGE
        table = torch.randperm(pages, generator=generator, device=device)
        counts = torch.full((work.batch,), work.keys, dtype=torch.int32, device=device)
        self.pools: list[Tensor] = []
        self.cache_options = {"block_table": table.view(work.batch, -1).int(), "seqused_k": counts}
        for name in ("key", "value"):
            stored = getattr(self, name)
            if dtype in LARGEST:
                scale = stored.abs().amax().float() / LARGEST[dtype]
                scaled = stored.float() / scale
                stored = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
                setattr(self, name, (stored.float() * scale).to(work.dtype))
                self.cache_options[f"{name[0]}_scale"] = scale
            bytes_of_pages = stored.view(torch.uint8).reshape(pages, PAGE, work.heads, -1)
            self.pools.append(bytes_of_pages[table.argsort()].view(dtype))

    def varlen_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of our varlen_attention."""
        if not self.work.cache:
            return self.packed_arguments(), self.options
        starts = torch.arange(self.work.batch + 1, dtype=torch.int32, device=self.query.device) * self.work.queries
        arguments = (self.query, *self.pools, starts, None, self.work.queries, self.work.keys)
        return arguments, {**self.options, **self.cache_options}

    def packed_arguments(self) -> tuple[Any, ...]:
        """The first arguments of our varlen_attention and of torch's varlen_attn, which takes int32 only."""
        longest = max(self.work.lengths)
        return self.query, self.key, self.value, self.cu_seq, self.cu_seq, longest, longest

    def ours(self) -> Any:
        if self.as_varlen:
            arguments, options = self.as_varlen
            return scaledot.varlen_attention(*arguments, **options)
        return scaledot.scaled_dot_product_attention(self.query, self.key, self.value, self.mask, **self.our_options())

    def torchs(self) -> Any:
        """The same call in torch. Torch cannot return weights, so those are computed from the formula."""
        if self.work.kind == "weights":
            scores = self.query @ self.key.transpose(-2, -1) / math.sqrt(self.work.head_dim)
            weights = torch.softmax(scores, -1)
            return weights @ self.value, weights
        if self.offsets is not None:
            return F.scaled_dot_product_attention(*self.nested, **self.options).transpose(1, 2).values()
        if self.work.cache:
            query = self.query.unflatten(0, (self.work.batch, self.work.queries))
            inputs = (tensor.transpose(1, 2) for tensor in (query, self.key, self.value))
            return F.scaled_dot_product_attention(*inputs, **self.options).transpose(1, 2).flatten(0, 1)
        mask = self.mask if self.band is None else self.band
        return F.scaled_dot_product_attention(self.query, self.key, self.value, mask, **self.options)

    def torchs_varlen(self) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(*self.packed_arguments(), window_size=(-1, 0 if self.work.is_causal else -1))

    def kernel(self) -> str:
        """The name of its last kernel."""
        direction = "backward" if self.work.direction in ("backward", "both") else "forward"
        if self.as_varlen:
            arguments, options = self.as_varlen
            packed = scaledot.explain_varlen(*arguments, **options)
            return str(getattr(packed, direction).kernels[0].kernel)
        plan = scaledot.explain(self.query, self.key, self.value, self.mask, **self.our_options())
        return str(getattr(plan, direction).kernel)

    def candidate(self, call: Callable[[], Any], context: Callable[[], Any] = nullcontext) -> Call:
        """The timed call of one implementation. Runs it once, and passes its exceptions on."""
        if self.work.direction in ("forward", "training"):

            def forward() -> list[Tensor]:
                with context():
                    results = call()
                return list(results) if isinstance(results, tuple) else [results]

            forward()
            return forward
        if self.work.direction == "both":

            def both() -> list[Tensor]:
                with context():
                    output = call()
                return list(torch.autograd.grad(output, self.wanted, self.grad))

            both()
            return both
        with context():
            output = call()
        output = output[0] if isinstance(output, tuple) else output

        def backward() -> list[Tensor]:
            return list(torch.autograd.grad(output, self.wanted, self.grad, retain_graph=True))

        backward()
        return backward


def candidates(problem: Problem) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls "ours" and those of PEERS that have the workload, and why some of them refused it."""
    found, refused = {"ours": problem.candidate(problem.ours)}, {}
    peers: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {"default": (problem.torchs, nullcontext)}
    if problem.work.kind != "weights":
        for name, backend in BACKENDS.items():
            peers[name] = (problem.torchs, lambda backend=backend: sdpa_kernel(backend))
    if problem.work.is_packed:
        peers["varlen"] = (problem.torchs_varlen, nullcontext)
    for name, (call, context) in peers.items():
        try:
            found[name] = problem.candidate(call, context)
        except (RuntimeError, NotImplementedError, ImportError, TypeError) as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found, refused


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest |found - wanted| / |wanted| of the results; inf if a result has NaN."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        off = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


def reading(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Mean milliseconds of `repeats` calls in a row."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats * 1e3
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    for _ in range(repeats):
        call()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / repeats


def times(calls: dict[str, Callable[[], Any]], device: str, rounds: int = ROUNDS) -> dict[str, dict[str, float]]:
    """The median, smallest and largest reading of each call in milliseconds. The calls are timed in turn."""
    repeats, readings = {}, {name: [] for name in calls}  # type: dict[str, int], dict[str, list[float]]
    for name, call in calls.items():
        reading(call, 1, device)
        repeats[name] = max(1, min(200, round(READING * 1e3 / max(reading(call, 2, device), 1e-4))))
    for _ in range(rounds):
        for name, call in calls.items():
            readings[name].append(reading(call, repeats[name], device))
    return {
        name: {"ms": statistics.median(values), "least": min(values), "largest": max(values)}
        for name, values in readings.items()
    }


def ceilings(device: str) -> dict[str, Any]:
    """What the machine is, and what a copy and a matrix product reach on it."""
    cuda = device == "cuda"
    gpu = torch.cuda.get_device_name() if cuda else "no GPU"
    side = 8192 if cuda else 64
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    taken = times({"product": lambda: matrix @ matrix}, device)["product"]["ms"]
    return {
        "machine": f"{gpu}, torch {torch.__version__}, {time.strftime('%d %B %Y').lstrip('0')}",
        "state": gpu_state() if cuda else None,
        "copy_bytes_per_s": copy_bandwidth(device, 2**28 if cuda else 2**16),
        "product_tflops": 2 * side**3 / (taken * 1e-3) / 1e12,
    }


def copy_bandwidth(device: str, count: int) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    taken = times({"copy": lambda: target.copy_(source)}, device)["copy"]["ms"]
    return 2 * source.nbytes / (taken * 1e-3)


def measure(work: Work, device: str, left_out: Collection[Family] = ()) -> dict[str, Any]:
    """One row. If the workload cannot run, a result is wrong, or its family is left out, it has the reason and no
    times."""
    row: dict[str, Any] = {
        "name": work.name,
        "shape": [work.batch, work.heads, work.queries, work.keys, work.head_dim, work.value_dim],
        "bar_tflops": work.bar_tflops or None,
        "bar_ratio": work.bar_ratio or None,
    }
    problem = Problem(work, device)
    row["kernel"] = problem.kernel()
    if reason := families.reason(work.family(row["kernel"]), left_out):
        row["wrong"] = reason
        return row
    calls, row["refused"] = candidates(problem)
    others = [name for name in calls if name != "ours"]
    if others and work.kind != "dropout":  # dropout masks differ from torch's
        row["error"] = difference(calls["ours"](), calls[others[0]]())
        if row["error"] > MAX_ERROR[work.dtype]:
            row["wrong"] = f"results are {row['error']:.2e} from torch's"
            return row
    row["times"] = times(calls, device)
    ours = row["times"]["ours"]["ms"]
    row["tflops"] = {name: work.operations / (value["ms"] * 1e-3) / 1e12 for name, value in row["times"].items()}
    if others:
        best = min(others, key=lambda name: row["times"][name]["ms"])
        against = "default" if work.bar_ratio >= 2 and "default" in calls else best
        row["against"], row["ratio"] = against, row["times"][against]["ms"] / ours
    if work.bar_tflops or work.bar_ratio:
        row["met"] = row["tflops"]["ours"] >= work.bar_tflops and row.get("ratio", 0) >= work.bar_ratio
    return row


def over_plain(rows: list[tuple[Work, dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Rows with an option, and their time over the time of the same workload without it."""
    plain = {
        (w.direction, w.batch, w.queries, w.head_dim, w.dtype): row["times"]["ours"]["ms"]
        for w, row in rows
        if w.kind == "plain" and "times" in row
    }
    for w, row in rows:
        base = plain.get((w.direction, w.batch, w.queries, w.head_dim, w.dtype))
        if w.kind in ("float_mask", "bias", "dropout", "window", "weights", "cache") and base and "times" in row:
            yield row, row["times"]["ours"]["ms"] / base


class Table:
    """The rows so far. `ended` takes the facts of a workload, or, with None, those of `ceilings`."""

    def __init__(self, ended: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self.facts: dict[str, Any] = {"machine": "not known"}
        self.works: list[tuple[Work, dict[str, Any]]] = []
        self.told = ended

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in self.works]

    def ended(self, work: Work | None, facts: dict[str, Any]) -> None:
        if work is None:
            self.facts |= facts
            self.told(facts)
            return
        row = facts
        if "times" not in facts and "wrong" not in facts:
            why = facts.get("reason") or facts.get("ended") or (facts.get("error") or "").strip().splitlines()[-1:]
            row = {**facts, "name": work.name, "wrong": f"{facts['result']} {''.join(why)}".strip()}
        copied = self.facts.get("copy_bytes_per_s")
        if work.kind == "decode" and "times" in row and copied:
            row["of_copy"] = work.bytes_read / (row["times"]["ours"]["ms"] * 1e-3) / copied
            row["met"] = row["of_copy"] >= MIN_OF_COPY
        self.works.append((work, row))
        for other, factor in over_plain(self.works):
            other["over_plain"] = factor
            if "weights" not in other["name"]:
                other["met"] = other.get("met", True) and factor <= MAX_OVER_PLAIN
        self.told(row)


def line(row: dict[str, Any]) -> str:
    if "times" not in row:
        return f"{row['name']:<48} {row['wrong']}"
    ours = f"{row['times']['ours']['ms']:9.3f} ms {row['tflops']['ours']:7.1f} TFLOP/s"
    ratio = f"{row['ratio']:5.2f}x {row['against']}" if "ratio" in row else "nothing to compare with"
    more = "".join(f" {row[k]:.2f} {k}" for k in ("of_copy", "over_plain") if k in row)
    bar = "" if "met" not in row else "  bar met" if row["met"] else "  bar missed"
    return f"{row['name']:<48} {row['kernel']:<8} {ours} {ratio}{more}{bar}"


def text_of(table: Table) -> str:
    """The machine, and a row for each workload: TFLOP/s of each implementation, or why there are none."""
    names = ["ours", *PEERS]
    machine = table.facts["machine"]
    if "product_tflops" in table.facts:
        machine += f". A copy: {table.facts['copy_bytes_per_s'] / 1e12:.2f} TB/s read and written; a product of square "
        machine += f"matrices in bfloat16: {table.facts['product_tflops']:.1f} TFLOP/s"
    lines = [f'{machine}. In TFLOP/s; "-": the function or backend does not take the workload.', ""]
    lines += ["| workload | kernel | " + " | ".join(names) + " | ours over the best |", "|---" * (len(names) + 3) + "|"]
    for row in table.rows:
        if "times" in row:
            speeds = [f"{row['tflops'][name]:.1f}" if name in row["tflops"] else "-" for name in names]
            others = [reading["ms"] for name, reading in row["times"].items() if name != "ours"]
            best = f"{min(others) / row['times']['ours']['ms']:.2f}" if others else "-"
            lines.append(f"| {row['name']} | {row['kernel']} | {' | '.join(speeds)} | {best} |")
        else:
            lines.append(f"| {row['name']} | {row['wrong']} |" + " |" * (len(names) + 1))
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("gpu.bench", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--table", type=Path, help="a table in Markdown: TFLOP/s of ours and of torch's backends")
    parser.add_argument("--total", type=float, default=90, help="seconds for all rows (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, help="how many rows; default: all")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose name has a match of this expression")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=65536)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    lines, until = Lines(arguments.results), time.monotonic() + arguments.total

    def told(facts: dict[str, Any]) -> None:
        lines.add("bench", **facts)
        if "name" in facts:
            print(line(facts), flush=True)
        if arguments.table:
            arguments.table.write_text(text_of(table))

    table = Table(told)

    def work(job: Work | None, tell: Tell) -> dict[str, Any]:
        if job is None:
            return {"result": "ceilings", **ceilings(arguments.device)}
        tell(family=str(job.family("")))
        row = measure(job, arguments.device, families.unsafe(arguments.results))
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        return {"result": "wrong" if "wrong" in row else "measured", **row}

    rows = works(arguments.tokens, arguments.width, arguments.longest)
    jobs = [None, *[row for row in rows if re.search(arguments.only, row.name)][: arguments.rows]]
    Crew(jobs, work, table.ended, parallel=1, seconds=ROW, jobs_a_process=ROWS_A_PROCESS, until=until).run()
    if arguments.device == "cuda":
        lines.add("bench", state=gpu_state())
    return 1 if any("wrong" in row for row in table.rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
