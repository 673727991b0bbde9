"""python -m faults: plays all scenarios, then many short runs; prints counts and what was wrong.

--network plays the faults of the network instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from faults import many, network, stage
from faults.scenario import TIMEOUT, Scenario, clean_runs, network_scenarios, scenarios, slice_of


def play(on_network: bool, quick: bool, at_a_time: int) -> int:
    """Returns the number of scenarios that went wrong."""
    shared_before = set(os.listdir("/dev/shm"))
    wrong = 0

    def judged(scenario: Scenario, found: stage.Answers) -> None:
        nonlocal wrong
        said = stage.faults_of(scenario, found, clean)
        packets.update(found.packets)
        wrong += bool(said)
        for line in said:
            print(f"WRONG: {scenario}: {line}", flush=True)

    transfers: dict[tuple[str, int], tuple[int, int]] = {}
    clean: dict[tuple[str, int, int], str | None] = {}
    packets = Counter[str]()
    for scenario, found in stage.run_all(clean_runs(on_network), at_a_time):
        judged(scenario, found)
        clean |= stage.digests_of(scenario, found)
        for rank, (*_, counts) in sorted(found.answers.items()):
            transfers[scenario.method, rank] = (counts["forward"], counts["backward"])
    chosen = list((network_scenarios if on_network else scenarios)(transfers))
    if quick:
        chosen = slice_of(chosen)
    started, count, outcomes, longest = time.monotonic(), Counter[tuple[str, str]](), Counter[str](), 0.0
    for scenario, found in stage.run_all(chosen, at_a_time):
        judged(scenario, found)
        count[scenario.method, scenario.fault] += 1
        outcomes.update("error" if answer[1] else "results" for answer in found.answers.values())
        longest = max([longest, *(answer[0] for answer in found.answers.values() if answer[1])])
        if sum(count.values()) % 50 == 0:
            print(f"{sum(count.values())} of {len(chosen)}", file=sys.stderr, flush=True)
    for (method, fault), times in count.items():
        print(f"{method:<12} {fault:<24} {times:>5}")
    left = sorted(set(os.listdir("/dev/shm")) - shared_before)
    if left:
        wrong += 1
        print(f"WRONG: left in /dev/shm: {left}")
    print(
        f"{len(chosen)} scenarios in {time.monotonic() - started:.0f} s, {wrong} wrong; "
        f"answers: {outcomes['error']} errors, {outcomes['results']} results; "
        f"the last error came after {longest:.1f} s, with a timeout of {TIMEOUT:.0f} s"
    )
    if on_network:
        print(f"packets: {packets['sent']} sent, {packets['lost']} lost, {packets['cut']} cut off")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash tests/faults/run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--network", action="store_true", help="faults of the network; needs root and /dev/net/tun")
    parser.add_argument("--quick", action="store_true", help="one scenario for each method and fault")
    parser.add_argument("--runs", type=int, default=500, help="short runs after the scenarios")
    parser.add_argument("--at-a-time", type=int, default=6, help="scenarios that are played at the same time")
    arguments = parser.parse_args()
    reason = network.why_not() if arguments.network else None
    if reason is not None:
        print(f"tests/faults/run: {reason}", file=sys.stderr)
        return 2
    wrong = play(arguments.network, arguments.quick, arguments.at_a_time)
    if arguments.network:
        return 1 if wrong else 0
    runs, said = many.run(min(arguments.runs, 20) if arguments.quick else arguments.runs)
    print(f"{runs} short runs, {len(said)} wrong")
    for line in said:
        print(f"WRONG: {line}")
    return 1 if wrong or said else 0


if __name__ == "__main__":
    sys.exit(main())
