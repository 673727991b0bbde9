"""python -m fuzz.api: replays the corpus, then draws calls until the time is up.

Prints counts, or the smallest call that fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import InMemoryExampleDatabase

from fuzz.api import corpus_files
from fuzz.api.judge import judge
from strategies import CALLS, Call

ROUND = 100  # calls; each round has a seed of its own


class FailedError(Exception):
    """The smallest call that failed."""

    def __init__(self, call: Call, error: BaseException) -> None:
        super().__init__(str(error))
        self.call = call


def play(number: int, calls: int, counts: Counter[str]) -> None:
    """One round. Raises FailedError."""
    last: list[Call] = []

    @seed(number)
    @settings(
        max_examples=calls,
        deadline=None,
        database=InMemoryExampleDatabase(),
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(call=CALLS)
    def one(call: Call) -> None:
        last[:] = [call]
        counts[f"{call.function.partition('(')[0]}: {judge(call)}"] += 1

    try:
        one()
    except Exception as error:
        raise FailedError(last[0], error) from error


def report(failed: FailedError) -> None:
    print(f"FAILED: {failed}\n\nThe call, as a program:\n\n{failed.call.program()}\n")
    if failed.__cause__ is not None:
        traceback.print_exception(failed.__cause__, limit=-3, file=sys.stdout)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bash tests/fuzz/run api", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the first round")
    given = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    for name, call in corpus_files.calls().items():
        try:
            judge(call)
        except Exception as error:
            report(FailedError(call, error))
            print(f"This call is in the corpus: {name}.json")
            return 1
        counts["corpus"] += 1
    end, number = time.monotonic() + 60 * given.minutes, given.seed
    while time.monotonic() < end:
        try:
            play(number, ROUND, counts)
        except FailedError as failed:
            report(failed)
            print(f"Kept as {corpus_files.add(failed.call).name} in the corpus. It was found with --seed {number}.")
            return 1
        number += 1
    for name, count in sorted(counts.items()):
        print(f"{count:>7}  {name}")
    print(f"{counts.total()} calls, from seed {given.seed}; none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
