"""keep_weights: whether short calls keep their softmax for the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._arguments import flag
from ._load import OPS

__all__ = ["keep_weights"]


@contextmanager
def keep_weights(enabled: bool) -> Iterator[None]:
    """Context manager: whether calls on a CPU keep their softmax for the backward where it is small.

    A call that is recorded for a backward keeps the softmax of its scores, before dropout, if that takes at most as
    many bytes as query, key, value and output together, and at most 64 MiB. If that holds for at least half of the keys
    only, it keeps those. The backward then need not compute the scores again. With fewer than 32 rows or keys, with
    `softcap` and with `return_weights` nothing is kept; float32 and float64 weights that a call without dropout returns
    serve as kept ones. :func:`scaledot.explain` says what a call keeps.

    The rule looks at sizes alone, so results are the same from run to run. They differ in rounding from those without
    kept weights. Where sizes are symbolic, as under ``torch.compile(dynamic=True)``, nothing is kept.

    This setting is that of the whole process, at the time of the forward; compiled code has that of its compilation. It
    is on at first, or off if the environment variable ``SCALEDOT_KEEP_WEIGHTS`` is 0 when scaledot is imported.

    Args:
        enabled: False keeps nothing, which takes the least memory.

    Example:
        >>> with scaledot.keep_weights(False):
        ...     output = scaledot.scaled_dot_product_attention(query, key, value)
    """
    before = OPS.keep_weights(flag("enabled", enabled))
    try:
        yield
    finally:
        OPS.keep_weights(before)
