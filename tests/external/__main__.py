"""python -m external [PART ...]: runs the suites of torch, ONNX, flash-attn and CUTLASS and prints the counts.

It exits with 1 on any failure.

With arguments, only the suites and checks whose name contains one of them run.
"""

from __future__ import annotations

import sys
import time

import torch

from external import suites
from external.tally import Tally, table


def main(wanted: list[str]) -> int:
    torch.set_num_threads(1)  # all cases are small
    tallies = []
    for suite in suites():
        for name, check in suite.CHECKS.items():
            if wanted and not any(part in f"{suite.SUITE}, {name}" for part in wanted):
                continue
            tally, start = Tally(suite.SUITE, name), time.monotonic()
            torch.manual_seed(0)
            check(tally)
            tallies.append(tally)
            print(f"{time.monotonic() - start:6.1f} s  {suite.SUITE}, {name}", file=sys.stderr, flush=True)
    print(table(tallies))
    return 1 if not tallies or any(t.failed or not t.passed + t.skipped.total() for t in tallies) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
