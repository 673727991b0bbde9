"""Context-parallel attention: the bytes that it sends, and its errors if ranks disagree, end or are late."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import context_parallel
from cases import Case
from context_parallel import ALL, BOTH, RING, mesh_of
from ranks import Ranks
from scaledot.distributed import context_parallel_attention, positions, ring, shard, transport, unshard

# ------------------------------------------------------------------------------------------------------------ bytes
SIZES: dict[str, Any] = {"batch": (2,), "heads": 4, "kv_heads": 2, "enable_gqa": True, "head_dim": 8, "value_dim": 12}
POSITION = 2 * 2 * (8 + 12)  # elements in the keys and values of a position
AGREEMENT = 5 * 8 * 3  # bytes: a digest, two lengths and a seed, to three ranks


def sent(four: Ranks, method: Any, placement: str, length: int, **options: Any) -> list[dict[str, Any]]:
    case = Case("traffic", **SIZES, query_length=length, key_length=length, **options)
    return four.run(context_parallel.solve, case, "2x2" if method == BOTH else "4", method, placement)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_a_ring_without_masks(four: Ranks, dtype: str, size: int) -> None:
    """Each rank sends three blocks of keys a pass. Gradients, of at least 4 bytes, travel three ranks on and back."""
    for answer in sent(four, RING, "contiguous", 64, dtype=dtype):
        block = 16 * POSITION
        assert answer["forward"] == {"agreement": AGREEMENT, "keys_values": 3 * block * size}
        gradients = 4 * block * max(size, 4)
        assert answer["sent"] == {
            "agreement": AGREEMENT, "keys_values": 2 * 3 * block * size, "gradients": gradients,
        }  # fmt: skip


def test_a_causal_ring(four: Ranks) -> None:
    """contiguous: the block of rank r goes to the 3 - r ranks after it; each but the last passes it on.

    zigzag: first chunks go to all ranks, the second chunk of rank r only to the r ranks before it.
    """
    answers = sent(four, RING, "contiguous", 64, causal=True)
    block = 16 * POSITION * 4
    # Rank r sends its own block and passes on the r blocks before it; the last rank sends none.
    assert [a["forward"].get("keys_values", 0) for a in answers] == [block, 2 * block, 3 * block, 0]
    # The gradients of block b travel on to rank 3, and from there back to rank b.
    assert [a["sent"].get("gradients", 0) for a in answers] == [block, 2 * block, 3 * block, 3 * block]
    answers = sent(four, RING, "zigzag", 64, causal=True)
    chunk = 8 * POSITION * 4
    first = [3, 3, 3, 3]  # sends of first chunks, by rank: each makes three hops
    second = [2, 2, 1, 1]  # second chunks: those of ranks 1, 2, 3 take the routes 1-0, 2-0-1 and 3-0-1-2
    expected = [(a + b) * chunk for a, b in zip(first, second, strict=True)]
    assert [a["forward"]["keys_values"] for a in answers] == expected
    assert sum(expected) == (4 * 3 + 1 + 2 + 3) * chunk


def test_a_window_sends_only_what_is_in_reach(four: Ranks) -> None:
    """64 positions over four ranks. A window of 16 to the left reaches the block before.

    One of 17 also reaches the block before that one, which is then sent whole.
    """
    block = 16 * POSITION * 4
    for left, blocks in ((0, [0, 0, 0, 0]), (16, [1, 1, 1, 0]), (17, [1, 2, 2, 0]), (48, [1, 2, 3, 0])):
        answers = sent(four, RING, "contiguous", 64, window=(left, 0))
        assert [a["forward"].get("keys_values", 0) for a in answers] == [n * block for n in blocks], left
    # To both sides: block b goes to rank b + 1, and from there to rank b - 1, skipping the ranks between.
    answers = sent(four, RING, "contiguous", 64, window=(3, 3))
    assert [a["forward"]["keys_values"] for a in answers] == [block, block, 2 * block, 2 * block]
    # zigzag over eight chunks, each of which reaches the one before: the first chunk of rank r goes to rank r + 1, and
    # the second one to rank r - 1; chunks 3 and 4 are both rank 3's.
    answers = sent(four, RING, "zigzag", 64, window=(8, 0))
    assert [a["forward"]["keys_values"] for a in answers] == [block // 2, block, block, block // 2]


def test_padding_travels_with_the_keys(four: Ranks) -> None:
    for answer in sent(four, RING, "contiguous", 64, mask="bool", mask_shape="B11K"):
        assert answer["forward"]["keys_values"] == 3 * (16 * POSITION * 4 + 2 * 16)


def test_all_to_all(four: Ranks) -> None:
    """A rank keeps one head of its 16 positions. Two KV heads for four ranks: each of the other three gets one."""
    position = 4 * 2  # bytes of a number, for both sequences of the batch
    query, key, output = 8 * position * 16, (8 + 12) * position * 16, 12 * position * 16
    for answer in sent(four, ALL, "contiguous", 64):
        lse = position * 16  # returned too; its gradient is sent back
        assert answer["forward"]["exchange"] == 3 * (query + key + output + lse)
        assert answer["sent"] == {"agreement": AGREEMENT, "exchange": 2 * 3 * (query + key + output + lse)}


def test_both(four: Ranks) -> None:
    """2 x 2: half of the heads of a rank's 16 positions go to the other rank of its all_to_all.

    Then half of the KV heads of 32 positions travel round a ring of two.
    """
    for answer in sent(four, BOTH, "contiguous", 64):
        heads = 4 * 2 * 16
        assert answer["forward"]["exchange"] == heads * (2 * (8 + 12 + 1) + (8 + 12))
        assert answer["forward"]["keys_values"] == 32 * 2 * (8 + 12) * 4
        assert answer["sent"]["gradients"] == 2 * 32 * 2 * (8 + 12) * 4


def run_positions() -> bool:
    mesh = mesh_of("2x2")
    for placement in ("zigzag", "contiguous"):
        for length in (0, 3, 37):
            x = torch.arange(length).reshape(1, length, 1).float()
            local = shard(x, mesh, 1, placement)
            assert torch.equal(local.flatten().long(), positions(length, mesh, placement))
            assert torch.equal(unshard(local, mesh, 1, placement), x)
            assert torch.equal(unshard(shard(x, mesh, -2, placement), mesh, -2, placement), x)
    return True


def test_shard_and_unshard(four: Ranks) -> None:
    assert all(four.run(run_positions))


def run_bad_unshard(kind: str) -> None:
    mesh = mesh_of("4")
    if kind == "grad":
        unshard(torch.ones(1, 4, requires_grad=True), mesh, 1)
    elif kind == "shapes":
        unshard(torch.ones(1 + dist.get_rank() % 2, 4), mesh, 1)
    else:
        unshard(torch.ones(1, 4 + dist.get_rank()), mesh, 1)


@pytest.mark.parametrize(
    ("kind", "said"), [("grad", "detach()"), ("lengths", "placement 'zigzag'"), ("shapes", "on ranks 0, 2 and")]
)
def test_bad_unshard(four: Ranks, kind: str, said: str) -> None:
    for error, text in four.errors(run_bad_unshard, kind):
        assert error == "ValueError"
        assert "tensor: " in text
        assert said in text


# ---------------------------------------------------------------------------------------------------- disagreement
def good() -> dict[str, Any]:
    return {
        "query": torch.ones(2, 4, 6, 8),
        "key": torch.ones(2, 2, 6, 8),
        "value": torch.ones(2, 2, 6, 8),
        "mesh": mesh_of("4"),
        "placement": "contiguous",
        "enable_gqa": True,
    }


def run_different(changes: dict[str, Any], ranks: list[int]) -> None:
    arguments = good()
    if dist.get_rank() in ranks:
        for name, value in changes.items():
            arguments[name] = value.clone() if isinstance(value, Tensor) else value
    context_parallel_attention(**arguments)


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({n: torch.ones(2, h, 6, 8).double() for n, h in (("query", 4), ("key", 2), ("value", 2))}, "query"),
    "batch": ({n: torch.ones(3, h, 6, 8) for n, h in (("query", 4), ("key", 2), ("value", 2))}, "query"),
    "heads": ({n: torch.ones(2, 4, 6, 8) for n in ("key", "value")}, "key"),
    "value_dim": ({"value": torch.ones(2, 2, 6, 9)}, "value"),
    "causal": ({"is_causal": True}, "is_causal"),
    "window": ({"window": (4, 0)}, "window"),
    "scale": ({"scale": 0.5}, "scale"),
    "dropout_p": ({"dropout_p": 0.5}, "dropout_p"),
    "softcap": ({"softcap": 3.0}, "softcap"),
    "slopes": ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
    "key_mask": ({"key_mask": torch.ones(2, 6, dtype=torch.bool)}, "key_mask"),
    "method": ({"method": "all_to_all"}, "method"),
    "placement": ({"placement": "zigzag"}, "placement"),
    "grad": ({"query": torch.ones(2, 4, 6, 8, requires_grad=True).clone()}, "requires_grad"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_disagree_all_say_so(four: Ranks, name: str) -> None:
    changes, named = DIFFERENT[name]
    if name == "grad":
        changes = {"query": torch.nn.Parameter(torch.ones(2, 4, 6, 8))}
    errors = four.errors(run_different, changes, [2])
    assert len(set(errors)) == 1
    kind, text = errors[0]
    assert kind == "ValueError"
    assert f"{named}: got " in text
    assert "on ranks 0, 1, 3 and" in text
    assert "on rank 2; needs the same on every rank" in text


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "attn_mask": ({"attn_mask": torch.ones(6, 6)}, "ValueError", "attn_mask: cannot be sharded"),
    "return_weights": ({"return_weights": True}, "ValueError", "return_weights: cannot be sharded"),
    "3-D": ({"query": torch.ones(4, 6, 8)}, "ValueError", "query: got shape (4, 6, 8)"),
    "no tensor": ({"key": [1.0]}, "TypeError", "key: got a list"),
    "mixed dtypes": ({"key": torch.ones(2, 2, 6, 8).double()}, "TypeError", "key: got dtype torch.float64"),
    "lengths": ({"value": torch.ones(2, 2, 5, 8)}, "ValueError", "value: got shape"),
    "value heads": ({"value": torch.ones(2, 4, 6, 8)}, "ValueError", "value: got 4 heads"),
    "no gqa": ({"enable_gqa": False}, "ValueError", "key: got 2 heads"),
    "window": ({"window": (-1, 0)}, "ValueError", "window: got a left side of -1"),
    "window pair": ({"window": 3}, "TypeError", "window: got 3"),
    "dropout": ({"dropout_p": 1.5}, "ValueError", "dropout_p: got 1.5"),
    "softcap": ({"softcap": -1.0}, "ValueError", "softcap: got -1"),
    "scale": ({"scale": float("nan")}, "ValueError", "scale: got nan"),
    "alignment": ({"causal_alignment": "middle"}, "ValueError", "causal_alignment: got 'middle'"),
    "placement": ({"placement": "striped"}, "ValueError", "placement: got 'striped'"),
    "key_mask dtype": ({"key_mask": torch.ones(2, 6)}, "TypeError", "key_mask: got dtype torch.float32"),
    "key_mask shape": ({"key_mask": torch.ones(2, 7) > 0}, "ValueError", "key_mask: got shape (2, 7)"),
    "relative": ({"relative_bias": torch.ones(4, 7)}, "ValueError", "relative_bias: got a value; needs None"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, "ValueError", "alibi_slopes: got shape (3,)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_of_one_rank_is_an_error_of_all(four: Ranks, name: str) -> None:
    changes, kind, said = BAD[name]
    errors = four.errors(run_different, changes, [1])
    assert errors[1][0] == kind
    assert said in errors[1][1]
    for rank in 0, 2, 3:
        assert errors[rank][0] == "RuntimeError"
        assert f"another rank refused its arguments: rank 1: {errors[1][1]}" in errors[rank][1]


EVERYWHERE: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "spiral"}, "method: got 'spiral'"),
    "pair": ({"method": BOTH}, "mesh: got 1 dimensions"),
    "order": ({"method": ("all_to_all", "ring")}, "method: got ('all_to_all', 'ring')"),
    "mesh": ({"mesh": "cpu"}, "mesh: got 'cpu', a str"),
    "heads": ({n: torch.ones(2, 6, 6, 8) for n in ("query", "key", "value")} | {"method": ALL}, "query: got 6 heads"),
    "KV heads": (
        {"query": torch.ones(2, 12, 6, 8)} | {n: torch.ones(2, 6, 6, 8) for n in ("key", "value")} | {"method": ALL},
        "key: got 6 heads",
    ),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_bad_methods(four: Ranks, name: str) -> None:
    changes, said = EVERYWHERE[name]
    for _, text in four.errors(run_different, changes, [0, 1, 2, 3]):
        assert said in text


def run_wrong_lengths() -> None:
    arguments = good() | {"placement": "zigzag"}
    if dist.get_rank() == 3:
        arguments["key"] = arguments["value"] = torch.ones(2, 2, 9, 8)
    context_parallel_attention(**arguments)


def test_zigzag_needs_the_lengths_that_shard_gives(four: Ranks) -> None:
    for kind, text in four.errors(run_wrong_lengths):
        assert kind == "ValueError"
        assert "key: rank 0 of the mesh's first dimension holds 6 of 27 positions" in text


def run_any_lengths() -> bool:
    """contiguous takes any lengths, in the order of ranks."""
    rank = dist.get_rank()
    lengths = [5, 0, 9, 2]
    whole = [torch.randn(2, h, 16, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2)]
    begin = sum(lengths[:rank])
    for method in RING, ALL:
        local = [t[:, :, begin : begin + lengths[rank]] for t in whole]
        found = context_parallel_attention(
            *local, mesh_of("4"), is_causal=True, enable_gqa=True, method=method, placement="contiguous"
        )
        wanted = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(found, wanted[:, :, begin : begin + lengths[rank]])
    return True


def test_contiguous_takes_any_lengths(four: Ranks) -> None:
    assert all(four.run(run_any_lengths))


# ------------------------------------------------------------------------------------------------ ranks that end
def run_in_flight() -> list[str]:
    """The events of one forward, in order: receives posted, sends, waits and computations."""
    events: list[str] = []
    post, wait, forward = transport.post, transport.wait, ring._forward

    def logged_post(sends: Any, receives: Any, *rest: Any) -> Any:
        events.extend(["send"] * len(sends) + ["receive"] * len(receives))
        return post(sends, receives, *rest)

    def logged_wait(works: Any) -> None:
        events.append("wait")
        wait(works)

    def logged_forward(*arguments: Any, **options: Any) -> Any:
        events.append("compute")
        return forward(*arguments, **options)

    local = [shard(torch.randn(1, 2, 32, 8), mesh_of("4"), 2, "contiguous") for _ in range(3)]
    with (
        mock.patch.object(transport, "post", logged_post),
        mock.patch.object(transport, "wait", logged_wait),
        mock.patch.object(ring, "_forward", logged_forward),
    ):
        context_parallel_attention(*local, mesh_of("4"), placement="contiguous")
    return events


def test_receives_and_sends_are_posted_before_computing(four: Ranks) -> None:
    for events in four.run(run_in_flight):
        first = "".join(f"{event} " for event in events)
        assert first.startswith("receive send compute wait receive send compute wait ")
        assert events.count("compute") == events.count("receive") + 1 == events.count("send") + 1 == 4
        assert events.index("compute") > events.index("receive")
        # Each step posts the receive for the next one before it computes.
        receives = [k for k, event in enumerate(events) if event == "receive"]
        computes = [k for k, event in enumerate(events) if event == "compute"]
        assert all(receive < compute for receive, compute in zip(receives, computes, strict=False))


def short_group(seconds: float) -> DeviceMesh:
    """All ranks in a new group, with this timeout."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, "cpu")


def outcome(attend: Callable[[], object]) -> tuple[float, str, str]:
    """The seconds that a call took, and the type and text of its error."""
    started = time.monotonic()
    try:
        attend()
    except Exception as error:
        return time.monotonic() - started, type(error).__name__, str(error)
    return time.monotonic() - started, "", ""


TIMEOUT, LEEWAY = 20.0, 20.0  # seconds: of the group, and more for busy machines


def run_dying(method: Any, victim: int, in_backward: bool) -> tuple[float, str, str]:
    mesh = short_group(TIMEOUT)
    local = [shard(torch.randn(1, 4, 30, 8), mesh, 2).requires_grad_() for _ in range(3)]
    output = context_parallel_attention(*local, mesh, method=method)  # with all ranks

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        mock.patch.object(ring, "_backward" if in_backward else "_forward", die).start()
    if in_backward:
        return outcome(lambda: output.sum().backward())
    return outcome(lambda: context_parallel_attention(*local, mesh, method=method))


@pytest.mark.parametrize(("method", "in_backward"), [(RING, True), (ALL, False)])
def test_a_rank_that_is_killed_ends_the_others_with_an_error(method: Any, in_backward: bool) -> None:
    ranks = Ranks(3 if method == RING else 2)
    try:
        ranks.start(run_dying, method, ranks.count - 1, in_backward)
        *others, victim = ranks.results()
        assert victim[1] == "Ended"
        for said, (seconds, kind, text) in others:
            assert (said, kind) == ("result", "RuntimeError")
            assert "has a rank of the group ended, or lost its connection?" in text
            assert seconds < TIMEOUT + LEEWAY
    finally:
        ranks.close()


def run_late() -> tuple[float, str, str]:
    mesh = short_group(4.0)
    local = [shard(torch.randn(1, 2, 8, 8), mesh, 2) for _ in range(3)]
    context_parallel_attention(*local, mesh)
    if dist.get_rank() == 3:
        time.sleep(10.0)
        return 0.0, "", "late"
    return outcome(lambda: context_parallel_attention(*local, mesh))


def test_a_late_rank_is_waited_for_until_the_timeout_of_the_group(four: Ranks) -> None:
    *others, _ = four.run(run_late)
    for seconds, kind, text in others:
        assert kind == "RuntimeError"
        assert "asking the other ranks for their arguments failed" in text
        assert seconds < 4.0 + LEEWAY
