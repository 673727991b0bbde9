"""explain: which kernel an attention call takes, and why not a faster one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .functional import Window, op_masked_score, window_sides

__all__ = ["Explanation", "KernelChoice", "Refusal", "explain"]


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
            lines += [f"            not {refusal.kernel}: {refusal.reason}" for refusal in choice.refused]
        return "\n".join(lines)


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
        name: KernelChoice(
            kernel=answer[name]["kernel"],
            refused=tuple(Refusal(kernel, reason) for kernel, reason in answer[name]["refused"]),
            workspace_bytes=answer[name]["workspace_bytes"],
        )
        for name in ("forward", "backward")
    }
    return Explanation(passes["forward"], passes["backward"], answer["device"], answer["capability"])
