"""Each kernel once, in a process of its own: right, wrong (and where), an error, a crash, or a hang.

    python -m gpu.smoke [--results results.jsonl] [--parallel 6] [--seconds 20] [--only TEXT]

with PYTHONPATH=python:tests:tests/library, which `bash tests/gpu/run --steps smoke` sets. The smallest problems come
first. Each result is a line of JSON as soon as it is there.
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

import torch

from gpu import pattern, probe_calls
from gpu.jobs import Crew, Tell
from gpu.lines import Lines
from gpu.probes import Probe, probes

HOPPER = "sm90"  # the kernel that a Hopper GPU has to take for an aligned problem in 16 bits
GENERIC = "generic"  # with few rows


def told(probe: Probe, facts: dict[str, Any]) -> str:
    """A line for a reader."""
    text = f"{facts['result']:<7} {probe.name:<34}"
    text += f" {'/'.join(dict.fromkeys(facts.get('kernels', {}).values())):<10}"
    if facts["result"] in ("error", "crash", "hang"):
        text += f" in {facts.get('stage', 'the preparation')}"
        text += f": {facts['error'].strip().splitlines()[-1]}" if "error" in facts else ""
        text += f": {facts['ended']}" if "ended" in facts else ""
    if facts["result"] == "not run":
        text += f" {facts['reason']}"
    if facts.get("unexpected"):
        text += f" {facts['unexpected']}"
    wrong = {name: value for name, value in facts.items() if isinstance(value, dict) and value.get("wrong")}
    return text.rstrip() + "".join(f"\n        {pattern.said(name, value)}" for name, value in wrong.items())


def summary(results: Counter[str]) -> str:
    order = ("right", "wrong", "error", "crash", "hang", "not run")
    return ", ".join(f"{results[name]} {name}" for name in order if results[name]) or "no probe"


def unexpected_kernel(probe: Probe, facts: dict[str, Any], hopper: bool) -> str | None:
    """On a Hopper GPU: why the kernels of a probe are not those that it is there for."""
    found = facts.get("kernels", {}).get("forward")
    if not hopper or not found or probe.dtype.itemsize != 2 or not probe.aligned:
        return None
    wanted = GENERIC if probe.decodes else HOPPER
    return None if found.startswith(wanted) else f"the forward's kernel is {found}, not {wanted}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu.smoke", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--parallel", type=int, default=6, help="probes at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="for a probe (default: %(default)s)")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds for all probes; the rest is not run")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the probe of this name, else all with it in their name"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--hopper", action="store_true", help="the GPU has to run the kernels for Hopper")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    torch.set_num_threads(1)  # threads of OpenMP do not outlive a fork
    lines, results = Lines(arguments.results), Counter[str]()
    exact = [probe for probe in probes() if arguments.only == probe.name]
    chosen = exact or [probe for probe in probes() if arguments.only in probe.name]

    def work(probe: Probe, tell: Tell) -> dict[str, Any]:
        return probe_calls.run(probe, arguments.device, tell)

    def ended(probe: Probe, facts: dict[str, Any]) -> None:
        if problem := unexpected_kernel(probe, facts, arguments.hopper):
            facts |= {"unexpected": problem}
            facts["result"] = "wrong" if facts["result"] == "right" else facts["result"]
        results[facts["result"]] += 1
        lines.add("smoke", probe=probe.name, **facts)
        print(told(probe, facts), flush=True)

    until = time.monotonic() + arguments.total
    Crew(chosen, work, ended, parallel=arguments.parallel, seconds=arguments.seconds, until=until).run()
    print(f"smoke: {summary(results)}")
    return 0 if results.keys() <= {"right"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
