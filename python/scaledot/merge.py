"""merge_states merges attention over two disjoint sets of keys; merge_sinks adds an attention sink."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._checks import require_tensors
from ._keywords import NoOptions, hide_unknown, unknown_keyword

__all__ = ["merge_sinks", "merge_states"]


@hide_unknown
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, **unknown: Unpack[NoOptions]
) -> tuple[Tensor, Tensor]:
    r"""The attention of a query over two disjoint sets of keys, given its attention over each set.

    ::

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    The rule is associative and commutative, so any number of parts can be merged in any order. It is the
    online softmax of Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018), applied to
    attention by Rabe and Staats ("Self-attention does not need O(n^2) memory", 2021).

    In a row where one side has nothing to attend to (its lse is -inf), the result is the other side's and that side's
    output is ignored. Where both sides have nothing, the result is 0 and -inf. Gradients there are 0, never NaN.
    Differentiable any number of times.

    Args:
        out_a, out_b: (..., Lq, Dv), of one shape; any floating dtypes.
        lse_a, lse_b: (..., Lq), as `return_lse` gives them.

    Returns:
        (out, lse): out in the dtype of `out_a`; lse in float32, or float64 if any input is float64. Both are
        computed in the dtype of lse.

    Raises:
        TypeError: an argument is not a floating tensor. ValueError: the shapes differ. RuntimeError: the devices
            differ.

    Example:
        >>> import torch, scaledot
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64).unbind()
        >>> first = scaledot.scaled_dot_product_attention(query, key[..., :50, :], value[..., :50, :], return_lse=True)
        >>> rest = scaledot.scaled_dot_product_attention(query, key[..., 50:, :], value[..., 50:, :], return_lse=True)
        >>> out, lse = scaledot.merge_states(*first, *rest)   # attention over all 128 keys
    """
    if unknown:
        raise unknown_keyword(merge_states, *unknown)
    _check_floating(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b: got shape {tuple(out_b.shape)}; needs {tuple(out_a.shape)}, that of out_a")
    _check_lse("lse_a", lse_a, "out_a", out_a)
    _check_lse("lse_b", lse_b, "out_a", out_a)
    tensors = (out_a, lse_a, out_b, lse_b)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    # Any shift gives the same result; the larger lse keeps exp in range. So it is a constant and needs no gradient.
    largest = torch.maximum(lse_a, lse_b).detach()
    shift = torch.where(largest == -math.inf, 0.0, largest)
    mass_a, mass_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    mass = mass_a + mass_b
    empty = mass == 0
    mass = torch.where(empty, 1.0, mass)  # before log and division, whose gradients at 0 are not finite
    lse = torch.where(empty, -math.inf, shift + torch.log(mass))
    part_a = (mass_a / mass).unsqueeze(-1) * _only_live(out_a.to(dtype), lse_a)
    part_b = (mass_b / mass).unsqueeze(-1) * _only_live(out_b.to(dtype), lse_b)
    return (part_a + part_b).to(out_a.dtype), lse


def _only_live(out: Tensor, lse: Tensor) -> Tensor:
    return torch.where((lse == -math.inf).unsqueeze(-1), 0.0, out)


# fmt: off
@overload
def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor, weights: None = None) -> tuple[Tensor, Tensor]: ...
@overload
def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
# fmt: on
@hide_unknown
def merge_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor, weights: Tensor | None = None, **unknown: Unpack[NoOptions]
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    r"""Attention with a sink: one more key in every row's softmax, with the score `sinks` and a value of zero.

    A sink adds exp(sink) to the denominator of the softmax, exp(lse), and nothing else. Every weight, and so the
    output, is multiplied by exp(lse) / (exp(lse) + exp(sink))::

        out_with = out * sigmoid(lse - sinks)
        weights_with = weights * sigmoid(lse - sinks)
        lse_with = log(exp(lse) + exp(sinks))

    This is `merge_states` with a state whose output is 0 and whose lse is the sink. A row with nothing to attend to
    (lse -inf) stays 0, and a sink of -inf changes nothing; gradients are 0 there, never NaN. Differentiable any number
    of times, also in `sinks`. Attention sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    2023. Learnt sinks, one a head: gpt-oss (OpenAI, 2025). A sink of score 0: Miller, "Attention is off by one", 2023.

    Args:
        out: (..., H, Lq, Dv), any floating dtype.
        lse: (..., H, Lq), as `return_lse` gives it.
        sinks: the scores of the sinks, on the scale of the scores after softcap. Any shape that broadcasts to that of
            lse; (H, 1) is one sink a head.
        weights: (..., H, Lq, Lk), as `return_weights` gives them, if they are wanted too. The results sum to less than
            1 in each row; the sink has the rest.

    Returns:
        (out, lse), or (out, lse, weights) if weights were given. out and weights keep their dtypes; lse is float32, or
        float64 if lse or sinks are float64. All are computed in the dtype of the returned lse.

    Raises:
        TypeError: an argument is not a floating tensor. ValueError: the shapes do not fit. RuntimeError: the devices
            differ.

    Example:
        >>> import torch, scaledot
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64).unbind()   # 8 heads
        >>> sinks = torch.zeros(8, requires_grad=True)
        >>> out, lse = scaledot.scaled_dot_product_attention(query, key, value, is_causal=True, return_lse=True)
        >>> out, lse = scaledot.merge_sinks(out, lse, sinks[:, None])
    """
    if unknown:
        raise unknown_keyword(merge_sinks, *unknown)
    _check_floating(out=out, lse=lse, sinks=sinks, **({} if weights is None else {"weights": weights}))
    _check_lse("lse", lse, "out", out)
    rows = tuple(lse.shape)
    if weights is not None and tuple(weights.shape[:-1]) != rows:
        raise ValueError(f"weights: got shape {tuple(weights.shape)}; needs {rows} and the number of keys")
    if not _broadcasts(sinks, rows):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}; needs one that broadcasts to {rows}, that of lse")
    dtype = torch.float64 if torch.float64 in (lse.dtype, sinks.dtype) else torch.float32
    lse, sinks = lse.to(dtype), sinks.to(dtype)
    empty = lse == -math.inf
    live = torch.where(empty, 0.0, lse)  # -inf - (-inf) is NaN; `share` and `merged` replace these rows again
    share = torch.where(empty, 0.0, torch.sigmoid(live - sinks))[..., None]
    merged = torch.where(empty, sinks, torch.logaddexp(live, sinks))
    with_sinks = (out * share).to(out.dtype)
    return (with_sinks, merged) if weights is None else (with_sinks, merged, (weights * share).to(weights.dtype))


def _check_floating(**tensors: Tensor) -> None:
    """Raises unless all are floating tensors on the device of the first, and the first has rows."""
    require_tensors(**tensors)
    (first, out), *_ = tensors.items()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: got dtype {tensor.dtype}; needs a floating tensor")
        if tensor.device != out.device:
            raise RuntimeError(f"{name}: got a tensor on {tensor.device}; needs {out.device}, where {first} is")
    if out.dim() == 0:
        raise ValueError(f"{first}: got a tensor without dimensions; needs the shape (..., Lq, Dv)")


def _check_lse(name: str, lse: Tensor, of: str, out: Tensor) -> None:
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"{name}: got shape {tuple(lse.shape)}; needs {tuple(out.shape[:-1])}, "
            f"that of {of} without its last dimension"
        )


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return tensor.dim() <= len(shape) and all(size in (1, whole) for size, whole in sizes)
