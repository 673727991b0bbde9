"""Settings of the process: save_for_backward and row_invariant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, TypeVar

from ._checks import flag
from ._keywords import check_keywords
from ._load import OPS
from ._warn import warn

__all__ = ["keep_weights", "row_invariant", "save_for_backward"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@check_keywords
def save_for_backward(enabled: bool) -> AbstractContextManager[None]:
    """Sets whether calls that are recorded save more than their results for the backward.

    It holds from the call on. In a ``with`` statement it holds until the end, and on a decorated function in each call,
    as with ``torch.set_grad_enabled``.

    Short calls in float32 or float64 on a CPU save their softmax. The backward then need not compute the scores again.
    This concerns calls that have dropout, an `attn_mask` that requires a gradient, or values whose width is not that of
    the query. They save the softmax of their scores, before dropout, if it takes at most as many bytes as query, key,
    value and output together, and at most 64 MiB. If this holds for half of the keys or more, but not for all, these
    are saved. No softmax is saved with fewer than 16 rows or keys, with `softcap`, or where sizes are symbolic, as
    under ``torch.compile(dynamic=True)``. Where a call without dropout returns its weights in float32 or float64, the
    backward reads these instead.

    Calls in bfloat16 or float16 save the low part of the output: what rounding took off it, in as many bytes as the
    output. The gradient of the query is then as exact as that of unfused attention. Otherwise it has an error from the
    rounded output, which the backward reads, and the error is large where keys and values have large means (Qiu and
    Yao, "Why Low-Precision Transformer Training Fails", 2025). Up to 128 keys on a CPU do not need it and save nothing.

    :func:`scaledot.explain` says what a call saves.

    The rule looks at sizes, dtype and options alone, so results are the same from run to run. They differ in rounding
    from those of a call that saves nothing.

    This setting is that of the whole process, at the time of the forward; compiled code has that of its compilation. It
    is on at first, or off if the environment variable ``SCALEDOT_SAVE_FOR_BACKWARD`` is 0 when scaledot is imported.
    (The other value is 1; anything else warns.)

    Args:
        enabled: False saves nothing, which takes the least memory.

    Example:
        >>> with scaledot.save_for_backward(False):
        ...     output = scaledot.scaled_dot_product_attention(query, key, value)
    """
    return _Setting("save_for_backward", flag("enabled", enabled))


@check_keywords
def row_invariant(enabled: bool = True) -> AbstractContextManager[None]:
    """Sets whether a row gets the same bits in every call that has it.

    On a CPU the bits of a row's output, lse and weights then depend on the query of the row, on its keys and values,
    and on the options. They do not depend on the other rows, batch entries or sequences of the call, on the number of
    threads, or on whether tensors are dense, packed or paged. So decoding a token gives the bits that a prefill gives
    it, and a chunk of a prefill those of the whole. (Batch invariance: He et al., "Defeating Nondeterminism in LLM
    Inference", 2025.)

    It holds from the call on. In a ``with`` statement it holds until the end, and on a decorated function in each call.
    It is a setting of the whole process and off at first.

    Results are reproducible without it, too: the same call gives the same bits each time, for any number of threads.
    What it costs: calls with few query rows do not use the decode kernels, and do not split the keys among threads.
    With up to 4 rows in a KV group they take 1.1 to 2.7 times as long on one core, and longer on many cores
    (docs/cpu_kernels.md, "Row invariance"). Calls with more than 128 rows in a KV group cost the same.

    GPUs ignore it, and so do gradients.

    Args:
        enabled: False ends it.

    Example:
        >>> with scaledot.row_invariant():
        ...     output = scaledot.scaled_dot_product_attention(query, key, value)
    """
    return _Setting("row_invariant", flag("enabled", enabled))


class _Setting(ContextDecorator):
    """A setting that holds from now on, until the end of a with statement, or in each call of a decorated function."""

    def __init__(self, name: str, enabled: bool) -> None:
        self.name, self.enabled, self.set_to = name, enabled, getattr(OPS, name)
        self.before: bool = self.set_to(enabled)

    def __repr__(self) -> str:
        return f"<scaledot.{self.name}({self.enabled}), which holds from now on; in a with statement until its end>"

    def __enter__(self) -> None:
        self.set_to(self.enabled)

    def __exit__(self, *_: object) -> None:
        self.set_to(self.before)

    def _recreate_cm(self) -> _Setting:
        # A call of a decorated function restores what was set at the time of the call.
        return _Setting(self.name, self.enabled)

    def __call__(self, function: _Function) -> _Function:
        self.set_to(self.before)
        return super().__call__(function)


@check_keywords
def keep_weights(enabled: bool) -> AbstractContextManager[None]:
    """The former name of :func:`save_for_backward`. It warns."""
    warn("scaledot.keep_weights is now scaledot.save_for_backward", FutureWarning)
    return save_for_backward(enabled)
