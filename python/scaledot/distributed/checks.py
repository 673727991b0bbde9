"""Checks that the arguments of all ranks fit together. If not, every rank raises an error, and none hangs.

The ranks first exchange a digest of their arguments, in one message of fixed size. If a rank refuses its own arguments
it says so in this message, and the others do not wait for it. The arguments themselves are exchanged only if something
is wrong, for the text of the error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import transport

_REFUSED = -1


def agree(
    name: str,
    facts: Mapping[str, object],
    refusal: Exception | None,
    numbers: Sequence[int],
    groups: Sequence[Any],
    device: torch.device,
) -> Tensor:
    """Checks that `facts` are the same on all ranks, and exchanges `numbers`.

    Args:
        name: the function's, for the error.
        facts: what has to be the same on all ranks, by the names of the arguments; compared by repr().
        refusal: the error in this rank's own arguments, if any.
        numbers: equally many on all ranks; they may differ.
        groups: those through which all ranks are reached.

    Returns:
        (..., len(numbers)) int64: the `numbers` of each rank; leading dimensions as for transport.gather_numbers.

    Raises:
        `refusal`, on the rank that passed it; RuntimeError on all others. ValueError on all ranks if facts differ.
    """
    digest = _REFUSED if refusal is not None else _digest(facts)
    known = transport.gather_numbers([digest, *numbers], groups, device)
    digests = known[..., 0]
    if bool((digests == digests.flatten()[0]).all()) and refusal is None:
        return known[..., 1:]

    others: list[tuple[int, dict[str, str], str | None]] = [
        (dist.get_rank(), {key: repr(value) for key, value in facts.items()}, None if refusal is None else str(refusal))
    ]
    for group in groups:
        rows: list[Any] = [None] * dist.get_world_size(group)
        with transport.explained("asking the other ranks for their arguments"):
            dist.all_gather_object(rows, others, group=group)
        others = [entry for row in rows for entry in row]
    if refusal is not None:
        raise refusal
    refused = [(rank, text) for rank, _, text in others if text is not None]
    if refused:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(refused))
        raise RuntimeError(f"{name}: another rank refused its arguments: {said}")
    raise ValueError(f"{name}: {_differences([(rank, said) for rank, said, _ in others])}")


def _digest(facts: Mapping[str, object]) -> int:
    text = "\n".join(f"{key}={value!r}" for key, value in facts.items())
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _differences(known: list[tuple[int, dict[str, str]]]) -> str:
    """query shape: got (2, 4) on ranks 0, 1 and (2, 5) on rank 2; needs ..."""
    parts = []
    for key in dict.fromkeys(key for _, facts in known for key in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in sorted(known):
            ranks.setdefault(facts.get(key, "nothing"), []).append(rank)
        if len(ranks) > 1:
            got = " and ".join(
                f"{value} on rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}" for value, of in ranks.items()
            )
            parts.append(f"{key}: got {got}; needs the same on every rank")
    return "; ".join(parts)
