"""A rank that is killed, stopped, or makes another call ends the others with a sentence; nothing is left behind.

These are a few of the scenarios. `bash tests/faults/run` plays a fault at every point of each method.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from faults import many, stage
from faults.scenario import Point, Scenario

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


def test_faults() -> None:
    """All at the same time, because most of it is waiting for the group's timeout."""
    wrong = [
        f"{scenario}: {said}"
        for scenario, found in stage.run_all(CHOSEN, len(CHOSEN))
        for said in stage.faults_of(scenario, found)
    ]
    assert not wrong


def test_short_runs_in_groups_of_their_own() -> None:
    assert many.run(6) == (6, [])
