"""save_for_backward: whether calls keep their softmax, or what rounding took off their output, for the backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ._checks import flag
from ._load import OPS

__all__ = ["keep_weights", "save_for_backward"]


@contextmanager
def save_for_backward(enabled: bool) -> Iterator[None]:
    """Context manager: whether calls that are recorded keep more than their results for the backward.

    Short calls in float32 or float64 on a CPU keep their softmax. The backward then need not compute the scores again.
    This concerns calls that have dropout, an `attn_mask` that requires a gradient, or values whose width is not that of
    the query. They keep the softmax of their scores, before dropout, if it takes at most as many bytes as query, key,
    value and output together, and at most 64 MiB. If this holds for half of the keys or more, but not for all, these
    are kept. No softmax is kept with fewer than 16 rows or keys, with `softcap`, or where sizes are symbolic, as under
    ``torch.compile(dynamic=True)``. Weights that a call without dropout returns in float32 or float64 serve as kept
    ones.

    Calls in bfloat16 or float16 keep what rounding took off the output, in as many bytes as the output. The gradient of
    the query is then as exact as that of unfused attention. Otherwise it has an error from the rounded output, which
    the backward reads, and the error is large where keys and values have large means (Qiu and Yao, "Why Low-Precision
    Transformer Training Fails", 2025). It is not kept for up to 128 keys on a CPU, which do not need it, nor if weights
    are returned under ``torch.func`` transforms.

    :func:`scaledot.explain` says what a call keeps.

    The rule looks at sizes, dtype and options alone, so results are the same from run to run. They differ in rounding
    from those for which nothing is kept.

    This setting is that of the whole process, at the time of the forward; compiled code has that of its compilation. It
    is on at first, or off if the environment variable ``SCALEDOT_SAVE_FOR_BACKWARD`` is 0 when scaledot is imported.

    Args:
        enabled: False keeps nothing, which takes the least memory.

    Example:
        >>> with scaledot.save_for_backward(False):
        ...     output = scaledot.scaled_dot_product_attention(query, key, value)
    """
    before = OPS.save_for_backward(flag("enabled", enabled))
    try:
        yield
    finally:
        OPS.save_for_backward(before)


def keep_weights(enabled: bool) -> AbstractContextManager[None]:
    """The former name of :func:`save_for_backward`. It warns."""
    warnings.warn("scaledot.keep_weights is now scaledot.save_for_backward", FutureWarning, stacklevel=2)
    return save_for_backward(enabled)
