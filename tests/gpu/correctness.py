"""The tests of tests/python/project/test_cuda.py, in forked processes with a limit for each test.

    python -m gpu.correctness [--results results.jsonl] [--parallel 12] [--seconds 20] [pytest's arguments]

Each test is a line of JSON as soon as it has ended. After a CUDA error, whose context is of no further use, and after a
hang, the next test has a new process. Tests of a family of which a call hung or faulted are left out (families.py). It
needs pytest, and none of its plugins.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

from gpu import families
from gpu.families import Family
from gpu.jobs import Crew, Tell
from gpu.lines import Lines

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "python" / "project" / "test_cuda.py"
KEPT = 3000  # characters of the report of a failure
MAX_HANGS = 2  # of tests without a family, in one test function


def kernels_of(item: Any, case: Any) -> dict[str, str]:
    """By direction, the kernel that would run the case; empty where it cannot be told, as without a GPU."""
    try:
        plan = item.module.explain(case, item.module.on_gpu(case))
        return {direction: plan[direction]["kernel"] for direction in ("forward", "backward")}
    except Exception:
        return {}


def families_of(item: Any) -> list[Family]:
    """The families of the calls of a test, the one that it is about last; none if its parameters do not show them."""
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    function = item.originalname
    if function == "test_packed_sequences":
        return [Family("", "forward", "bfloat16", families.width(*given["dims"]), "packed")]
    if function == "test_quantised_cache":
        return [Family("", "forward", given["dtype"], "128", "quantised")]
    case = given.get("case")
    if case is None:
        return []
    general = case.mask != "none" or case.softcap is not None or case.dropout_p > 0 or case.alibi != "none"
    dims = (case.head_dim, case.value_dim or case.head_dim)
    positions = case.causal or case.window is not None
    kind = families.dense_kind(case.query_length, case.key_length, dims, masks_positions=positions, general=general)
    kernels = kernels_of(item, case)
    directions = ("forward",) if function == "test_forward" else ("forward", "backward")
    width = families.width(*dims)
    return [
        Family(kernels.get(direction, ""), direction, case.dtype, width, families.of_direction(kind, direction))
        for direction in directions
    ]


def device_is_lost() -> bool:
    """Whether CUDA refuses everything in this process from now on."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def verdict(reports: Sequence[pytest.TestReport]) -> dict[str, Any]:
    for report in reports:
        if report.failed:
            return {"result": "failed", "why": report.longreprtext[-KEPT:]}
    for report in reports:
        if report.skipped and not hasattr(report, "wasxfail"):
            return {"result": "skipped", "why": report.longrepr[2] if isinstance(report.longrepr, tuple) else ""}
    return {"result": "passed"}


class Forks:
    """A plugin that runs the collected tests in forked processes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.lines = arguments, Lines(arguments.results)
        self.results, self.hung = Counter[str](), Counter[str]()
        self.is_available, self.device_count = torch.cuda.is_available, torch.cuda.device_count

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Importing the tests asks for the GPUs. That would start CUDA in this process, and so in none of its forks."""
        torch.set_num_threads(1)  # threads of OpenMP do not outlive a fork
        torch.cuda.is_available = lambda: self.arguments.gpus > 0
        torch.cuda.device_count = lambda: self.arguments.gpus

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        a = self.arguments
        until = time.monotonic() + a.total
        crew = Crew(
            session.items,
            self.work,
            self.ended,
            skip=self.skip,
            parallel=a.parallel,
            seconds=a.seconds,
            jobs_a_process=math.inf,
            until=until,
        )
        crew.run()
        session.testscollected = len(session.items)
        session.testsfailed = sum(self.results[name] for name in ("failed", *families.UNSAFE))
        return True

    def skip(self, item: Any) -> str | None:
        if self.hung[item.originalname] >= MAX_HANGS:
            return f"{MAX_HANGS} other tests of {item.originalname} hung or faulted"
        return None

    def work(self, item: pytest.Item, tell: Tell) -> dict[str, Any]:
        torch.cuda.is_available, torch.cuda.device_count = self.is_available, self.device_count
        found = families_of(item)
        left_out = families.unsafe(self.arguments.results) if found else ()
        for family in found:
            if reason := families.reason(family, left_out):
                return {"result": "not run", "reason": reason}
        if found:
            tell(family=str(found[-1]))
        facts = verdict(runtestprotocol(item, nextitem=None, log=False))
        if device_is_lost():
            facts |= {"result": "error", "leave": True}
        return facts

    def ended(self, item: Any, facts: dict[str, Any]) -> None:
        self.results[facts["result"]] += 1
        if facts["result"] in families.UNSAFE and "family" not in facts:
            self.hung[item.originalname] += 1
        self.lines.add("correctness", test=item.name, **facts)
        if facts["result"] not in ("passed", "skipped"):
            last = (facts.get("why") or facts.get("reason") or "").strip().splitlines()[-1:]
            print(f"{facts['result']:<7} {item.name} {''.join(last)}".rstrip(), flush=True)

    def pytest_sessionfinish(self) -> None:
        print("correctness: " + ", ".join(f"{count} {name}" for name, count in self.results.most_common()))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("gpu.correctness", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--parallel", type=int, default=12, help="tests at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="for a test (default: %(default)s)")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds for all tests; the rest is not run")
    parser.add_argument("--gpus", type=int, default=1, help="how many there are; with 0, tests are skipped")
    parser.add_argument("--tests", default=str(TESTS), help="the file (default: %(default)s)")
    arguments, rest = parser.parse_known_args(words)
    forks = Forks(arguments)
    # Output is captured in each process: a file for it would be shared by all.
    options = ["-q", "--capture=sys", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--no-summary"]
    code = pytest.main([arguments.tests, "--rootdir", str(ROOT), *options, *rest], plugins=[forks])
    complete = forks.results.keys() <= {"passed", "skipped"}
    return int(code) or (0 if complete else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
