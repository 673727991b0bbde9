"""explain and explain_varlen: which kernels an attention call takes, and why not a faster one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .functional import Window, op_masked_score, window_sides
from .varlen import varlen_window_sides

__all__ = [
    "Explanation",
    "KernelChoice",
    "Refusal",
    "SequenceChoice",
    "VarlenExplanation",
    "VarlenPass",
    "explain",
    "explain_varlen",
]


@dataclass(frozen=True)
class Refusal:
    """A kernel that stands before the chosen one in the table, and why it does not take the problem."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class KernelChoice:
    """What one pass, forward or backward, runs."""

    kernel: str
    refused: tuple[Refusal, ...]  # fastest first
    workspace_bytes: int  # what the pass allocates besides its results, for torch's current number of threads


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` answers; printing it gives a readable summary."""

    forward: KernelChoice
    backward: KernelChoice
    device: str
    capability: str  # of the CPU: see scaledot.cpu_capability(); on CUDA whether the kernels were tested on hardware

    def __str__(self) -> str:
        lines = [f"scaledot on {self.device} ({self.capability})"]
        for name, choice in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"  {name:<8}  {choice.kernel}, {_readable(choice.workspace_bytes)} of workspace")
            lines += _reasons(choice.refused)
        return "\n".join(lines)


@dataclass(frozen=True)
class SequenceChoice:
    """The kernel of those sequences of a packed call that take it for the same reasons."""

    kernel: str
    refused: tuple[Refusal, ...]  # fastest first
    sequences: int  # how many


@dataclass(frozen=True)
class VarlenPass:
    """What one pass over packed sequences runs."""

    kernels: tuple[SequenceChoice, ...]  # that of the longest sequence first; sequences without rows or keys need none
    workspace_bytes: int  # the most that the pass has at one time besides its results, for torch's number of threads


@dataclass(frozen=True)
class VarlenExplanation:
    """What :func:`explain_varlen` answers; printing it gives a readable summary."""

    forward: VarlenPass
    backward: VarlenPass | None  # None with a block_table: keys and values in pages have no gradient
    device: str
    capability: str  # as in Explanation

    def __str__(self) -> str:
        lines = [f"scaledot on {self.device} ({self.capability}), packed sequences"]
        for name, one in (("forward", self.forward), ("backward", self.backward)):
            if one is None:
                lines.append(f"  {name:<8}  none: keys and values in pages have no gradient")
                continue
            lines.append(f"  {name:<8}  {_readable(one.workspace_bytes)} of workspace")
            for choice in one.kernels:
                lines.append(f"            {choice.kernel} for {choice.sequences} of them")
                lines += _reasons(choice.refused)
        return "\n".join(lines)


def _reasons(refused: tuple[Refusal, ...]) -> list[str]:
    return [f"            not {refusal.kernel}: {refusal.reason}" for refusal in refused]


def _readable(size: int) -> str:
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: str = "upper_left",
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    masked_score: float = -math.inf,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Explanation:
    """Which kernels ``scaled_dot_product_attention(<the same arguments>)`` would run, without running them.

    Takes the arguments of :func:`scaledot.scaled_dot_product_attention` and raises what it would raise. Reads
    no element of the tensors and draws no random number. (`return_lse` changes nothing: every kernel computes
    lse.)

    Example:
        >>> print(scaledot.explain(query, key, value, is_causal=True))   # doctest: +SKIP
        scaledot on cpu (avx512)
          forward   avx512, 96.0 KiB of workspace
          backward  avx512, 1.5 MiB of workspace
    """
    left, right = window_sides(window)
    # Which seed makes no difference to the choice; drawing one would change what the user's program draws
    # next.
    seed = torch.zeros(2, dtype=torch.int64, device="cpu") if dropout_p else None
    text = torch.ops.scaledot.explain.default(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        seed,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal_alignment,
        left,
        right,
        softcap,
        op_masked_score(masked_score),
        "none",
        (),
        return_weights=return_weights,
    )
    answer = json.loads(text)
    passes = {
        name: KernelChoice(answer[name]["kernel"], _refusals(answer[name]), answer[name]["workspace_bytes"])
        for name in ("forward", "backward")
    }
    return Explanation(passes["forward"], passes["backward"], answer["device"], answer["capability"])


def _refusals(choice: dict[str, Any]) -> tuple[Refusal, ...]:
    return tuple(Refusal(kernel, reason) for kernel, reason in choice["refused"])


def explain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
    causal_alignment: str = "lower_right",
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> VarlenExplanation:
    """Which kernels ``varlen_attention(<the same arguments>)`` would run, without running them.

    On a CPU each sequence takes the kernel that suits its length, so there may be several; a GPU has one for all.
    Takes the arguments of :func:`scaledot.varlen_attention` and raises what it would raise. Of the tensors it reads
    the lengths alone, and these on a CPU alone; it draws no random number. For meta and fake tensors, which have no
    lengths, every sequence counts as one of `max_q` rows and `max_k` keys. (`return_aux` and `return_lse` change
    nothing: every kernel computes lse.)

    Example:
        >>> print(scaledot.explain_varlen(query, key, value, cu_seq, cu_seq, 512, 512))   # doctest: +SKIP
        scaledot on cpu (avx512), packed sequences
          forward   96.0 KiB of workspace
                    avx512 for 3 of them
                    not few_rows: ...
                    few_rows for 1 of them
          backward  1.5 MiB of workspace
                    avx512 for 4 of them
    """
    left, right = varlen_window_sides(window_size, window)
    text = torch.ops.scaledot.explain_varlen.default(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        seqused_k,
        block_table,
        alibi_slopes,
        None,  # which seed makes no difference
        max_q,
        max_k,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal_alignment,
        left,
        right,
        softcap,
        num_splits=num_splits,
    )
    answer = json.loads(text)
    forward, backward = (
        answer[name] and VarlenPass(_sequence_choices(answer[name]), answer[name]["workspace_bytes"])
        for name in ("forward", "backward")
    )
    return VarlenExplanation(forward, backward, answer["device"], answer["capability"])


def _sequence_choices(one: dict[str, Any]) -> tuple[SequenceChoice, ...]:
    return tuple(SequenceChoice(c["kernel"], _refusals(c), c["sequences"]) for c in one["kernels"])
