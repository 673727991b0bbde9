"""Rows that each rank holds, needs and sends: placements, the schedule of the ring, the counts of the cost model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scaledot.distributed import cost
from scaledot.distributed.placement import Run, runs_of_ranks, split_runs
from scaledot.distributed.schedule import UNBOUNDED, Reach, Schedule

LENGTHS = [0, 1, 3, 7, 8, 64, 101]
REACHES = [Reach(), Reach(right=0), Reach(left=9, right=0), Reach(left=3, right=4), Reach(diagonal=20, right=0)]


def positions(runs: list[Run]) -> list[int]:
    return [k for run in runs for k in range(*run)]


def seen(rows: list[int], keys: Run, reach: Reach) -> int:
    """Scores of these rows and keys that are not masked by position, counted one by one."""
    return sum(-reach.left <= j - (i + reach.diagonal) <= reach.right for i in rows for j in range(*keys))


def scores_of(schedule: Schedule, rank: int, step: int) -> int:
    """Scores of one head that a rank computes in a step, without those masked by position."""
    pairs = [(rows, keys) for keys in schedule.step(rank, step) for rows in schedule.pairs(rank, keys)]
    return sum(seen([*range(*rows.run)], keys.run, schedule.reach) for rows, keys in pairs)


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_position_is_in_one_place(length: int, ranks: int, placement: str) -> None:
    held = runs_of_ranks(length, ranks, placement)
    assert sorted(k for runs in held for k in positions(runs)) == list(range(length))
    sizes = [len(positions(runs)) for runs in held]
    assert max(sizes) - min(sizes) <= 2
    for parts, runs in itertools.product((1, 2, 3), held):
        split = split_runs(runs, parts)
        assert [k for piece in split for k in positions(piece)] == positions(runs)
        assert max(len(positions(p)) for p in split) - min(len(positions(p)) for p in split) <= 1


def test_zigzag_shares_a_causal_mask_out_evenly() -> None:
    schedules = {
        placement: Schedule(runs, runs, Reach(right=0))
        for placement in ("contiguous", "zigzag")
        for runs in [runs_of_ranks(800, 4, placement)]
    }
    work = {p: [sum(scores_of(s, rank, step) for step in range(4)) for rank in range(4)] for p, s in schedules.items()}
    assert len(set(work["zigzag"])) == 1
    assert sum(work["zigzag"]) == sum(work["contiguous"]) == 800 * 801 // 2
    assert max(work["contiguous"]) > 1.7 * max(work["zigzag"])


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_what_is_needed_arrives_and_nothing_else(ranks: int, placement: str, reach: Reach) -> None:
    rows, keys = runs_of_ranks(61, ranks, placement), runs_of_ranks(83, ranks, placement)
    schedule = Schedule(rows, keys, reach)

    def sees(rank: int, run: Run) -> int:
        return seen(positions(rows[rank]), run, reach)

    for rank in range(ranks):
        here = [chunk for step in range(ranks) for chunk in schedule.step(rank, step)]
        assert len(set(here)) == len(here)
        for chunk in (chunk for chunks in schedule.keys for chunk in chunks):
            assert (chunk in here) == (sees(rank, chunk.run) > 0)
        for step in range(ranks):
            assert scores_of(schedule, rank, step) == sum(sees(rank, chunk.run) for chunk in schedule.step(rank, step))
    for chunk in (chunk for chunks in schedule.keys for chunk in chunks):
        route = schedule.route(chunk)
        hops = [(schedule.before(rank, chunk), rank) for rank in route if rank != chunk.owner]
        senders = {chunk.owner, *route}
        assert sorted(hops) == sorted(
            (rank, schedule.after(rank, chunk)) for rank in senders if schedule.after(rank, chunk) is not None
        )


@pytest.mark.parametrize(("is_causal", "left"), [(True, UNBOUNDED), (False, UNBOUNDED), (True, 13), (False, 9)])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_the_cost_model_counts_what_the_schedule_has(placement: str, is_causal: bool, left: int) -> None:
    work = cost.Work(1, 8, 2, 103, 64, 64, is_causal=is_causal, left=left)
    runs = runs_of_ranks(work.length, 4, placement)
    schedule = Schedule(runs, runs, Reach(0, left, 0 if is_causal else UNBOUNDED))
    scores, calls, arriving = cost._steps(work, 4, placement)
    for rank, step in itertools.product(range(4), range(4)):
        here = schedule.step(rank, step)
        assert scores[step, rank] == scores_of(schedule, rank, step)
        assert calls[step, rank] == sum(len(schedule.pairs(rank, chunk)) for chunk in here)
        assert arriving[step, rank] == (sum(chunk.length for chunk in here) if step else 0)


def test_the_cost_model_by_hand() -> None:
    """No mask, four ranks: four steps of (L / 4)^2 scores, in which L / 4 positions arrive."""
    work = cost.Work(1, 4, 4, 400, 8, 8, itemsize=2, is_causal=False)
    kernel, link = cost.Kernel(1e-6, 2e-6, 0.0), cost.Link(1e-3, 1e6)
    block = 100 * 4 * 16 * 2  # bytes of a rank's keys and values
    transfer, compute = 1e-3 + block / 1e6, 4 * 100**2 * 1e-6
    found = cost.ring(work, 4, kernel, link, "contiguous")
    assert found.forward == pytest.approx(3e-3 + 3 * max(compute, transfer) + compute)
    gradients = 1e-3 + 2 * block / 1e6
    steps = [max(2 * compute, transfer), *[max(2 * compute, transfer + gradients)] * 2, max(2 * compute, gradients)]
    assert found.seconds == pytest.approx(found.forward + sum(steps) + gradients)
    assert found.sent == 2 * 3 * block + 4 * 2 * block
    one = cost.one(work, kernel)
    assert one.seconds == pytest.approx(4 * 400**2 * 3e-6)
    whole = cost.all_to_all(work, 4, kernel, link)
    assert whole is not None
    assert whole.seconds == pytest.approx(one.seconds / 4 + 24e-3 + 3e-3 + whole.sent / 1e6)
    assert whole.sent == 2 * 4 * 100 * 4 * 8 * 2 * 3 / 4
    copying = cost.all_to_all(work, 4, kernel, replace(link, copying=1e-6))
    assert copying is not None  # 2 copies of what is sent and of what stays
    assert copying.seconds == pytest.approx(whole.seconds + 2 * whole.sent * 4 / 3 * 1e-6)


def test_heads_limit_all_to_all_and_not_the_ring() -> None:
    work, kernel, link = cost.Work(1, 12, 4, 65536, 64, 64), cost.kernel_of(1e14, 64, 64), cost.Link(1e-5, 1e10)
    assert cost.all_to_all(work, 8, kernel, link) is None
    assert cost.all_to_all(work, 12, kernel, link) is not None
    best = cost.best(work, 8, kernel, link)
    assert best is not None
    assert best.name in ("ring 4 x all_to_all 2", "ring 2 x all_to_all 4")
    assert best.seconds < cost.one(work, kernel).seconds
