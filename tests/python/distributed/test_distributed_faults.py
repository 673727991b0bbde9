"""A rank that is killed, stopped, cut off, or makes another call ends the others with a sentence. Nothing is left.

These are a few of the scenarios. `bash tests/faults/run` plays a fault at every point of each method.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from faults import many, network, stage
from faults.scenario import LONG, Point, Scenario, clean_runs

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)

CHOSEN = [
    Scenario("ring", "kill", Point("forward", 5), 1),
    Scenario("ring", "stop", Point("backward", 7), 0),
    Scenario("ring", "no backward", Point("between"), 2),
    Scenario("all_to_all", "pause", Point("forward", 2), 1),
    Scenario("all_to_all", "raise", Point("backward", 3), 0),
    Scenario("both", "kill", Point("between"), 3),
    Scenario("both", "pause", Point("backward", 9), 2),
    Scenario("both", "other is_causal", Point("before"), 1),
]


ON_NETWORK = [
    Scenario("ring", "delay", Point("before"), 0, True, LONG),
    Scenario("all_to_all", "loss of 5%", Point("before"), 0, True, LONG),
    Scenario("both", "rank cut off for a time", Point("backward", 9), 2, True),
    Scenario("ring", "link cut", Point("forward", 4), 1, True),
    Scenario("both", "rank cut off", Point("between"), 0, True),
]


def play(chosen: list[Scenario]) -> None:
    """All at the same time, because most of it is waiting for the group's timeout."""
    played = list(stage.run_all(chosen, len(chosen)))
    clean: dict[tuple[str, int, int], str | None] = {}
    for scenario, found in played:
        if scenario.fault == "none":
            clean |= stage.digests_of(scenario, found)
    assert not [f"{scenario}: {said}" for scenario, found in played for said in stage.faults_of(scenario, found, clean)]


def test_faults() -> None:
    play(CHOSEN)


@pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not()))
def test_faults_of_the_network() -> None:
    play([*clean_runs(on_network=True), *ON_NETWORK])


def test_short_runs_in_groups_of_their_own() -> None:
    assert many.run(6) == (6, [])


def test_wrong_answers_are_noticed() -> None:
    """Other bits than without a fault, a loss that lost nothing, an error that says nothing, and a late one."""
    lossy = Scenario("all_to_all", "loss of 1%", Point("before"), 0, True)
    found = stage.Answers(left=dict.fromkeys(range(2), (0, [], [])), exits=dict.fromkeys(range(2), 0))
    found.answers = dict.fromkeys(range(2), (0.1, "", "", "bits", {}))
    found.packets["lost"] = 1
    clean = dict.fromkeys(stage.digests_of(lossy, found), "bits")
    assert stage.faults_of(lossy, found, clean) == []
    assert len(stage.faults_of(lossy, found, dict.fromkeys(clean, "other bits"))) == 2
    found.packets.clear()
    assert stage.faults_of(lossy, found, clean) == ["no packet was lost"]
    cut = Scenario("all_to_all", "link cut", Point("forward", 1), 0, True)
    assert len(stage.faults_of(cut, found, clean)) == 2  # results that nobody sent
    found.answers = dict.fromkeys(range(2), (0.1, "RuntimeError", "Connection closed by peer", None, {}))
    assert len(stage.faults_of(cut, found, clean)) == 2
    sentence = "scaledot.distributed: waiting for another rank failed"
    found.answers = {0: (5.1, "RuntimeError", sentence, None, {}), 1: (99.0, "RuntimeError", sentence, None, {})}
    assert len(stage.faults_of(cut, found, clean)) == 1
