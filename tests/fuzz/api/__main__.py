"""python -m fuzz.api: replays the corpus, then draws calls until the time is up.

Prints counts, or the smallest call that fails.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
import traceback
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import InMemoryExampleDatabase

from call_sources import Call
from fuzz.api import corpus_files
from fuzz.api.judge import judge
from strategies import CALLS

ROUND = 100  # calls; each round has its own seed
APART = 10**9  # between the seeds of the first rounds of two processes
OFTEN = 100  # rounds between two lines that say how far it is


class FailedError(Exception):
    """The smallest call that failed."""

    def __init__(self, call: Call, error: BaseException) -> None:
        super().__init__(str(error))
        self.call = call
        self.trace = "".join(traceback.format_exception(error, limit=-3))


def play(number: int, counts: Counter[str]) -> None:
    """One round. Raises FailedError."""
    last: list[Call] = []

    @seed(number)
    @settings(
        max_examples=ROUND,
        deadline=None,
        database=InMemoryExampleDatabase(),
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(call=CALLS)
    def one(call: Call) -> None:
        last[:] = [call]
        counts[f"{call.name}: {judge(call)}"] += 1

    try:
        one()
    except Exception as error:
        raise FailedError(last[0], error) from None


def report(failed: FailedError) -> None:
    print(f"FAILED: {failed}\n\nThe call, as a program:\n\n{failed.call.program()}\n\n{failed.trace}", flush=True)


def replay() -> int:
    """Judges the calls of the corpus. Returns their number."""
    calls = corpus_files.calls()
    for name, call in calls.items():
        try:
            judge(call)
        except Exception as error:
            report(FailedError(call, error))
            sys.exit(f"This call is in the corpus: {name}.json")
    return len(calls)


def work(first: int, minutes: float) -> tuple[Counter[str], int]:
    """Rounds from number `first` on. Returns the counts of their calls, and how many failed: 1 ends the work."""
    torch.set_num_threads(1)  # the tensors are small
    end, number = time.monotonic() + 60 * minutes, first
    counts: Counter[str] = Counter()
    begin = time.process_time()
    while time.monotonic() < end:
        try:
            play(number, counts)
        except FailedError as failed:
            report(failed)
            print(f"Kept as {corpus_files.add(failed.call).name} in the corpus. It was found with --seed {number}.")
            return counts, 1
        number += 1
        if (number - first) % OFTEN == 0:
            rate = counts.total() / (time.process_time() - begin)
            print(f"{counts.total()} calls, {rate:.0f} per second of CPU time", flush=True)
    return counts, 0


def work_side_by_side(processes: int, first: int, minutes: float) -> int:
    """Starts this program several times, with seeds far apart, and prints what they print and the total."""
    command = [sys.executable, "-W", "ignore", "-m", "fuzz.api", "--minutes", str(minutes), "--seed"]
    children = [
        subprocess.Popen([*command, str(first + k * APART)], stdout=subprocess.PIPE, text=True)
        for k in range(processes)
    ]
    outputs = [child.communicate()[0] for child in children]
    print("\n".join(outputs))
    total = sum(int(number) for number in re.findall(r"^(\d+) calls, from seed", "".join(outputs), re.MULTILINE))
    failed = sum(child.returncode != 0 for child in children)
    print(f"{total} calls in {processes} processes; {failed or 'none'} failed")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bash tests/fuzz/run api", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(APART), help="of the first round")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.processes > 1:
        return work_side_by_side(given.processes, given.seed, given.minutes)
    replayed = replay()
    counts, failed = work(given.seed, given.minutes)
    counts["corpus"] += replayed
    for name, count in sorted(counts.items()):
        print(f"{count:>7}  {name}")
    print(f"{counts.total()} calls, from seed {given.seed}; {failed or 'none'} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
