"""explain and explain_varlen: which kernels an attention call takes, and why not a faster one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._checks import check_types, flag, integer, number, require_tensors
from ._jagged import any_nested, jagged_explanation
from ._keywords import check_constructor
from ._load import OPS
from ._score import has_mask, score_arguments
from ._torch.sdpa_choice import sdpa_choice
from ._warn import warn
from .options import SDPA, VARLEN, SdpaOptions, VarlenOptions, op_arguments
from .varlen import varlen_arguments, wants_lse

__all__ = [
    "Explanation",
    "KernelChoice",
    "Refusal",
    "SavedSoftmax",
    "SequenceChoice",
    "VarlenExplanation",
    "VarlenPass",
    "explain",
    "explain_varlen",
]


_NO_SCORES = "none: there are no scores"


@check_constructor
@dataclass(frozen=True)
class Refusal:
    """A kernel that comes before the chosen one in the table, and why it does not take the problem."""

    kernel: str
    reason: str


@check_constructor
@dataclass(frozen=True)
class KernelChoice:
    """The kernel that one pass, forward or backward, runs."""

    kernel: str  # "none" for a call without batch entries, heads, rows or keys: it has no scores to compute
    refused: tuple[Refusal, ...]  # fastest first
    workspace_bytes: int  # what the pass allocates besides its results, for torch's current number of threads


@check_constructor
@dataclass(frozen=True)
class SavedSoftmax:
    """The softmax that a recorded forward saves for its backward: see :func:`scaledot.save_for_backward`."""

    keys: int  # how many keys of each row, from the first, the softmax is saved of
    bytes: int
    reason: str  # why these are not all keys; empty if they are
    output_low_bytes: int  # of what rounding took off the output; 0: it is not saved

    def __str__(self) -> str:
        if self.output_low_bytes:
            return f"{_low_part(self.output_low_bytes)}; no softmax: {self.reason}"
        if not self.keys:
            return f"no softmax: {self.reason}"
        share = f"the softmax of {self.keys} keys, {_readable(self.bytes)}"
        return f"{share}; not of all: {self.reason}" if self.reason else share


@check_constructor
@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`; printing it gives a readable summary."""

    forward: KernelChoice
    backward: KernelChoice
    device: str
    capability: str  # of the CPU: see scaledot.cpu_capability(); on CUDA whether the kernels were tested on hardware
    sdpa: str | None = None  # what F.scaled_dot_product_attention does with the same call, in words; None: not known
    saved: SavedSoftmax | None = None  # for the backward
    skips_masked: bool = False  # whether tiles of scores that score_mod masks are skipped

    def __str__(self) -> str:
        lines = [f"scaledot on {self.device} ({self.capability})"]
        for name, choice in (("forward", self.forward), ("backward", self.backward)):
            if choice.kernel == "none":
                lines.append(f"  {name:<8}  {_NO_SCORES}")
                continue
            lines.append(f"  {name:<8}  {choice.kernel}, {_readable(choice.workspace_bytes)} of workspace")
            lines += _reasons(choice.refused)
        if self.skips_masked:
            lines.append("  skips     tiles that score_mod masks")
        if self.saved is not None and (self.saved.keys or self.saved.output_low_bytes):
            lines.append(f"  saves     {self.saved}")
        if self.sdpa is not None:
            lines.append(f"  F.sdpa    {self.sdpa}")
        return "\n".join(lines)

    @property
    def kept(self) -> SavedSoftmax | None:
        """The former name of `saved`. It warns."""
        warn("Explanation.kept is now Explanation.saved", FutureWarning)
        return self.saved


@check_constructor
@dataclass(frozen=True)
class SequenceChoice:
    """The kernel of those sequences of a packed call that take it for the same reasons."""

    kernel: str
    refused: tuple[Refusal, ...]  # fastest first
    sequences: int  # how many


@check_constructor
@dataclass(frozen=True)
class VarlenPass:
    """The kernels that one pass over packed sequences runs."""

    kernels: tuple[SequenceChoice, ...]  # the longest sequence's first; sequences without heads, rows or keys need none
    workspace_bytes: int  # the most that the pass holds at a time besides its results, for torch's number of threads


@check_constructor
@dataclass(frozen=True)
class VarlenExplanation:
    """The result of :func:`explain_varlen`; printing it gives a readable summary."""

    forward: VarlenPass
    backward: VarlenPass | None  # None: keys and values have no gradient, as they are in pages or quantised
    device: str
    capability: str  # as in Explanation
    quantised: str | None = None  # the dtype of keys and values if it is one of 8 bits
    output_low_bytes: int = 0  # as in SavedSoftmax

    def __str__(self) -> str:
        lines = [f"scaledot on {self.device} ({self.capability}), packed sequences"]
        if self.quantised is not None:
            lines[0] += f", keys and values in {self.quantised}"
        for name, one in (("forward", self.forward), ("backward", self.backward)):
            if one is None:
                cache = "in pages" if self.quantised is None else f"in {self.quantised}"
                lines.append(f"  {name:<8}  none: keys and values {cache} have no gradient")
                continue
            workspace = f"{_readable(one.workspace_bytes)} of workspace"
            lines.append(f"  {name:<8}  {workspace if one.kernels else _NO_SCORES}")
            for choice in one.kernels:
                lines.append(f"            {choice.kernel} for {choice.sequences} of them")
                lines += _reasons(choice.refused)
        if self.output_low_bytes:
            lines.append(f"  saves     {_low_part(self.output_low_bytes)}")
        return "\n".join(lines)


def _low_part(size: int) -> str:
    return f"what rounding took off the output, {_readable(size)}"


def _reasons(refused: tuple[Refusal, ...]) -> list[str]:
    """A line for each reason, with all kernels that it holds for."""
    kernels: dict[str, list[str]] = {}
    for refusal in refused:
        kernels.setdefault(refusal.reason, []).append(refusal.kernel)
    return [f"            not {', '.join(names)}: {reason}" for reason, names in kernels.items()]


def _readable(size: int) -> str:
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


@SDPA.sign
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
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Unpack[SdpaOptions],
) -> Any:
    """Which kernels ``scaled_dot_product_attention(<the same arguments>)`` would run, without running them.

    It reads no element of the tensors and draws no random number. On a CPU it also says what
    ``F.scaled_dot_product_attention`` would do with the same arguments: its fused kernel, its slower path, or nothing,
    because it lacks an option.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_weights, return_lse: these and the
            options as for :func:`scaledot.scaled_dot_product_attention`. `return_lse` makes no difference: every kernel
            computes lse.

    Returns:
        An :class:`Explanation`. Print it, or read its fields: `forward` and `backward` (kernel, refused, workspace
        bytes), `device`, `capability`, `sdpa`, `saved` and `skips_masked`. For nested tensors a
        :class:`VarlenExplanation`.

    It raises what the call itself would raise.

    Example:
        >>> query = torch.randn(1, 8, 512, 64)
        >>> print(scaledot.explain(query, query, query, is_causal=True))   # doctest: +SKIP
        scaledot on cpu (avx512)
          forward   avx512, 2.2 MiB of workspace
                    not amx_bf16_decode, amx_bf16: cpu_capability() is below amx_bf16
                    not avx512_decode: more than 16 query rows share a KV head
                    not avx512_bf16: cpu_capability() is below avx512_bf16
          backward  avx512, 2.9 MiB of workspace
                    not amx_bf16_decode, amx_bf16: cpu_capability() is below amx_bf16
                    not avx512_decode: more than 32 query rows share a KV head
                    not avx512_bf16: cpu_capability() is below avx512_bf16
          F.sdpa    its fused kernel
    """
    arguments = op_arguments("explain", options, SDPA)
    require_tensors(query=query, key=key, value=value)
    if any_nested(query, key, value):
        return jagged_explanation(
            explain_varlen,
            query,
            key,
            value,
            attn_mask,
            return_weights,
            options,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
        )
    dropout_p, scale = number("dropout_p", dropout_p), number("scale", scale, optional=True)
    if dropout_p:
        # Any seed gives the same answer. Drawing one would change the random numbers of the user's program.
        arguments["dropout_seed"] = torch.zeros(2, dtype=torch.int64, device="cpu")
    flag("return_lse", return_lse)
    if "score_mod" in arguments:
        arguments.update(score_arguments(arguments.pop("score_mod"), query, key, value, arguments))
    answer = _answer(
        OPS.explain.default,
        (query, key, value),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=flag("is_causal", is_causal),
        scale=scale,
        enable_gqa=flag("enable_gqa", enable_gqa),
        return_weights=flag("return_weights", return_weights),
        **arguments,
    )
    passes = {
        name: KernelChoice(answer[name]["kernel"], _refusals(answer[name]), answer[name]["workspace_bytes"])
        for name in ("forward", "backward")
    }
    lacking = {_option_of(name) for name in arguments} - {"dropout_seed"}
    if not is_causal or query.shape[-2] == key.shape[-2]:
        lacking.discard("causal_alignment")  # makes no difference, or comes with another option that torch lacks
    lacking |= {name for name, asked in (("return_weights", return_weights), ("return_lse", return_lse)) if asked}
    sdpa = sdpa_choice(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, sorted(lacking))
    return Explanation(
        passes["forward"],
        passes["backward"],
        answer["device"],
        answer["capability"],
        sdpa,
        SavedSoftmax(**answer["saved"]),
        "score_program" in arguments and has_mask(arguments["score_program"]),
    )


def _option_of(argument: str) -> str:
    """The option that an argument of the op belongs to."""
    if argument in ("blocks", "block_bits", "block_shape"):
        return "block_mask"
    if argument in ("score_program", "score_numbers", "score_integers"):
        return "score_mod"
    return "window" if argument.startswith("window") else argument


def _answer(op: Callable[..., str], tensors: tuple[Tensor, ...], **arguments: Any) -> dict[str, Any]:
    """The answer of one of the explaining ops."""
    try:
        answer: dict[str, Any] = json.loads(op(*tensors, **arguments))
    except RuntimeError as error:
        check_types(error, arguments)
        raise
    return answer


def _refusals(choice: dict[str, Any]) -> tuple[Refusal, ...]:
    return tuple(Refusal(kernel, reason) for kernel, reason in choice["refused"])


@VARLEN.sign
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
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> VarlenExplanation:
    """Which kernels ``varlen_attention(<the same arguments>)`` would run, without running them.

    On a CPU each sequence takes the kernel that suits its length, so there may be several; on a GPU one kernel runs
    all. It reads no tensors except the lengths, and these only on a CPU. It draws no random number. Meta and fake
    tensors have no lengths: every sequence then counts as one of `max_q` rows and `max_k` keys.

    Args:
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, return_aux, return_lse: these and the options
            as for :func:`scaledot.varlen_attention`. `return_aux` and `return_lse` make no difference: every kernel
            computes lse.

    Returns:
        A :class:`VarlenExplanation`. Print it, or read its fields.

    It raises what the call itself would raise.

    Example:
        >>> print(scaledot.explain_varlen(query, key, value, cu_seq, cu_seq, 512, 512))   # doctest: +SKIP
        scaledot on cpu (avx512), packed sequences
          forward   96.0 KiB of workspace
                    avx512 for 3 of them
                    not avx512_decode: more than 16 query rows share a KV head
                    avx512_decode for 1 of them
          backward  1.5 MiB of workspace
                    avx512 for 3 of them
                    not avx512_decode: more than 32 query rows share a KV head
                    avx512_decode for 1 of them
    """
    arguments = varlen_arguments("explain_varlen", options)  # without a dropout seed: any gives the same answer
    require_tensors(query=query, key=key, value=value)
    wants_lse(return_lse, return_aux)  # checks
    answer = _answer(
        OPS.explain_varlen.default,
        (query, key, value),
        cu_seq_q=cu_seq_q,
        cu_seq_k=cu_seq_k,
        max_q=integer("max_q", max_q),
        max_k=integer("max_k", max_k),
        is_causal=flag("is_causal", is_causal),
        **arguments,
    )
    forward, backward = (
        answer[name] and VarlenPass(_sequence_choices(answer[name]), answer[name]["workspace_bytes"])
        for name in ("forward", "backward")
    )
    return VarlenExplanation(
        forward,
        backward,
        answer["device"],
        answer["capability"],
        answer.get("quantised"),
        answer["output_low_bytes"],
    )


def _sequence_choices(one: dict[str, Any]) -> tuple[SequenceChoice, ...]:
    return tuple(SequenceChoice(c["kernel"], _refusals(c), c["sequences"]) for c in one["kernels"])
