"""Checks every side of a workload against float64, times those that are right in turn, and makes tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from external.engines.ours import LAYOUTS, Run, exact
from external.engines.peers import Peer
from external.engines.workloads import Batch, Workload
from scaledot.compare.noise import is_noisy
from scaledot.compare.report import geomean, marked, ratio_of, time_of
from scaledot.compare.run import Pair
from scaledot.compare.timing import Effort, Timing, alternate

LIMITS = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}  # of the largest element, as in scaledot_bench
# Unfused attention rounds its scores. In bfloat16 eager's error is up to 1.4e-2 here, and OpenVINO's is the same.
PEER_LIMITS = {**LIMITS, "bfloat16": 2e-2}


@dataclass
class Result:
    """One workload in one dtype. Sides are named by layouts of scaledot, and by peers."""

    workload: Workload
    dtype: str
    errors: dict[str, float] = field(default_factory=dict)  # of the largest element
    problems: dict[str, str] = field(default_factory=dict)  # of sides that are wrong or raise
    refused: dict[str, str] = field(default_factory=dict)  # why a peer cannot run the workload
    timings: dict[str, Timing] = field(default_factory=dict)

    @property
    def passes(self) -> dict[str, Pair]:
        """Every peer with every layout, by `peer / layout`."""
        layouts = [side for side in self.timings if side in LAYOUTS]
        peers = [side for side in self.timings if side not in LAYOUTS]
        return {f"{p} / {layout}": Pair(self.timings[layout], self.timings[p]) for p in peers for layout in layouts}

    def as_json(self) -> dict[str, Any]:
        timings = {side: timing.as_json() for side, timing in self.timings.items()}
        ratios = {name: pair.ratio for name, pair in self.passes.items()}
        return {**asdict(self), "workload": str(self.workload), "timings": timings, "ratios": ratios}


def measure(workload: Workload, dtype: str, peers: Sequence[Peer], effort: Effort) -> Result:
    result, batch = Result(workload, dtype), Batch(workload, getattr(torch, dtype))
    oracle, right = exact(batch), {}

    def check(side: str, prepare: Callable[[Batch], Run]) -> None:
        try:
            run = prepare(batch)
            error = float((run.output(run.call()).double() - oracle).abs().max() / oracle.abs().max())
        except Exception as exception:
            result.problems[side] = f"{type(exception).__name__}: {' '.join(str(exception).split())[:200]}"
            return
        limit = (LIMITS if side in LAYOUTS else PEER_LIMITS)[dtype]
        result.errors[side] = error
        if error <= limit:
            right[side] = run
        else:
            result.problems[side] = f"wrong: error {error:.1e} of the largest element; needs at most {limit:.0e}"

    for layout, prepare in LAYOUTS.items():
        if workload.paged or layout != "pages":
            check(layout, prepare)
    for peer in peers:
        reason = peer.why_not(batch)
        if reason is None:
            check(peer.name, peer.prepare)
        else:
            result.refused[peer.name] = reason
    if set(right) - set(LAYOUTS):
        timings = alternate(tuple(run.call for run in right.values()), effort)
        result.timings = dict(zip(right, timings, strict=True))
    return result


def table(peer: str, dtype: str, results: Sequence[Result]) -> list[str]:
    """Markdown: the peer's time, and that divided by scaledot's for each layout; the geometric means."""
    of_dtype = [result for result in results if result.dtype == dtype]
    run = [result for result in of_dtype if peer in result.errors or peer in result.problems]
    rows = [f"| {peer}, {dtype} | its time | {' | '.join(LAYOUTS)} |", "|---|---|---|---|---|"]
    ratios: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for result in run:
        marks = {side: f"**{problem.partition(':')[0]}**" for side, problem in result.problems.items()}
        cells = [time_of(result.timings[peer].median) if peer in result.timings else marks[peer]]
        for layout in LAYOUTS:
            pair = result.passes.get(f"{peer} / {layout}")
            if pair is not None and pair.ratio is not None:
                ratios[layout].append(pair.ratio)
                cells.append(marked(ratio_of(pair.ratio), is_noisy(pair)).strip())
            else:
                cells.append(marks.get(layout, "-"))
        rows.append(f"| {result.workload} | {' | '.join(cells)} |")
    means = [ratio_of(geomean(values) if values else None) for values in ratios.values()]
    rows.append(f"| geometric mean | | {' | '.join(means)} |")
    for reason, count in Counter(r.refused[peer] for r in of_dtype if peer in r.refused).items():
        rows += ["", f"Not among what it runs: {count} ({reason})."]
    return rows if run else []


def problems(results: Sequence[Result]) -> list[str]:
    return [f"- {side}, {r.dtype}, {r.workload}: {problem}" for r in results for side, problem in r.problems.items()]
