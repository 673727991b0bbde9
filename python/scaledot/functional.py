"""scaled_dot_product_attention: torch.nn.functional's function with the options that it lacks."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

__all__ = ["scaled_dot_product_attention"]

Window = tuple[int | None, int | None]

_sdpa = torch.ops.scaledot.sdpa.default  # looked up once: the look-up takes longer than a call's own Python
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def window_sides(window: object) -> tuple[int | None, int | None]:
    """The two sides of a `window` argument; TypeError if it is no pair of integers and Nones.

    Which numbers are allowed is checked with all other values, below the op.
    """
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            f"window: got {window!r}; needs a pair (left, right) of integers, None for a side without a limit"
        )
    return _window_side(window[0], "left"), _window_side(window[1], "right")


def _window_side(side: Any, name: str) -> Any:
    if side is None or (isinstance(side, (int, torch.SymInt)) and not isinstance(side, bool)):
        return side
    try:
        if isinstance(side, bool):  # an index to Python, a mistake here
            raise TypeError
        return operator.index(side)
    except TypeError:
        raise TypeError(
            f"window: its {name} side is {side!r}, a {type(side).__name__}; needs an integer, or None"
        ) from None


def draw_seed(query: Tensor | None = None) -> Tensor:
    """The dropout seed of one call, int64 of shape (2,): from the default generator of query's GPU, for which
    nobody waits and which CUDA graphs can replay, otherwise from the CPU's."""
    device = query.device if query is not None and query.is_cuda else "cpu"
    return torch.randint(_INT64_MIN, _INT64_MAX, (2,), dtype=torch.int64, device=device)


def op_masked_score(masked_score: float) -> float | None:
    """What the op takes for a `masked_score`: None stands for -inf, which a schema's default cannot spell."""
    if masked_score is None:
        raise TypeError("masked_score: got None; needs a number (-math.inf hides a masked key entirely)")
    return None if masked_score == -math.inf else masked_score


# fmt: off
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: str = ..., window: Window | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, masked_score: float = ...,
    return_weights: Literal[False] = False, return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: str = ..., window: Window | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, masked_score: float = ...,
    return_weights: Literal[True], return_lse: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: str = ..., window: Window | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, masked_score: float = ...,
    return_weights: Literal[True], return_lse: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: str = ..., window: Window | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, masked_score: float = ...,
    return_weights: Literal[False] = False, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    causal_alignment: str = ..., window: Window | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, masked_score: float = ...,
    return_weights: bool = False, return_lse: bool = False,
) -> Any: ...
# fmt: on
def scaled_dot_product_attention(
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
) -> Any:
    r"""softmax(scale * query key^T + masks) value, fused, with its gradients.

    The first eight arguments are those of :func:`torch.nn.functional.scaled_dot_product_attention`, in its
    order and with its meaning. For row i of the query and key j, with distance(i, j) = j - i ("upper_left")
    or j - (i + Lk - Lq) ("lower_right")::

        x = scale * dot(query[i], key[j])
        s = softcap * tanh(x / softcap)  if softcap  else  x
        s = s - alibi_slopes[head] * |distance(i, j)|
        s = s + attn_mask[i, j]                                    (floating mask)
        s = s  if attn_mask[i, j]  else  masked_score              (boolean mask)
        s = -inf  where is_causal or window exclude distance(i, j)
        weights[i] = dropout(softmax(s[i]))        output = weights value
        lse[i] = log(sum_j exp(s[i, j]))

    A key whose score is masked to -inf has weight 0, and a NaN or inf in it does not reach the row. A row
    that may attend to nothing has output, weights and gradients 0 and lse -inf. A NaN or inf in anything that
    is attended to is passed on.

    Args:
        query: (..., H, Lq, D); also (H, Lq, D) and (Lq, D). float32, float64, bfloat16 or float16, with any
            strides.
        key: (..., Hkv, Lk, D). Batch dimensions of query, key and value broadcast; so do head counts of 1.
        value: (..., Hkv, Lk, Dv); Dv may differ from D.
        attn_mask: of any shape that broadcasts to (..., H, Lq, Lk), without being expanded in memory:
            boolean, True = may attend, or floating, added to the score. A floating mask that requires grad
            gets a gradient of its own shape. Composes with `is_causal` and `window`.
        dropout_p: in [0, 1): each weight becomes 0 with this probability, the others are multiplied by
            1 / (1 - dropout_p). The seed is drawn from torch's default generator, the CPU's or that of query's GPU;
            which weights it drops does not depend on device, thread count or kernel (Philox4x32-7, Salmon et al.,
            SC 2011).
        is_causal: row i attends to keys with distance(i, j) <= 0.
        scale: a finite number; default 1 / sqrt(D).
        enable_gqa: H may be a multiple of Hkv: query head h attends to key and value head h // (H // Hkv).
        causal_alignment: which diagonal distances count from: "upper_left" (row 0 is aligned with key 0, as
            torch does) or "lower_right" (the last row is aligned with the last key, as decoding with a cache
            needs).
        window: (left, right), at least 0, None = unbounded: row i attends to keys with
            -left <= distance(i, j) <= right (sliding window; Beltagy et al., "Longformer", 2020).
        softcap: > 0: scores are squashed into (-softcap, softcap) by tanh, before masks (Gemma 2, 2024).
        alibi_slopes: (H,) or (B, H): Press et al., "Train Short, Test Long", 2022.
        masked_score: what a False in a boolean `attn_mask` scores. -inf: the key is not there at all. A
            finite number, as in masked_fill(mask, -1e9): it is an ordinary score, and rows with nothing else
            attend to all such keys alike.
        return_weights: also return the weights, (..., H, Lq, Lk), as they multiplied the values (after
            dropout). They are differentiable; this needs memory for them.
        return_lse: also return lse, (..., H, Lq), float32 (float64 for float64). It is differentiable.

    Returns:
        output (..., H, Lq, Dv), or (output, weights), (output, lse), (output, weights, lse) as asked for.
        Output and weights have the dtype of the query.

    Raises:
        ValueError: shapes or devices that do not fit together, a number outside its range.
        TypeError: dtypes or layouts that are not taken (sparse, nested, quantised), mixed dtypes, a `window`
            that is no pair.
        RuntimeError: an argument of another wrong Python type. All of them name the argument.

    Example:
        >>> import torch, scaledot
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64).unbind()   # batch 2, 8 heads, 128 positions
        >>> output, weights = scaledot.scaled_dot_product_attention(
        ...     query, key, value, is_causal=True, window=(31, 0), return_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128, 128]))
    """
    if has_torch_function_variadic(query, key, value, attn_mask, alibi_slopes):
        return handle_torch_function(
            scaled_dot_product_attention,
            (query, key, value, attn_mask, alibi_slopes),
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            causal_alignment=causal_alignment,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            masked_score=masked_score,
            return_weights=return_weights,
            return_lse=return_lse,
        )
    left, right = (None, None) if window is None else window_sides(window)
    arguments = (
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        draw_seed(query) if dropout_p else None,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal_alignment,
        left,
        right,
        softcap,
        op_masked_score(masked_score),
    )
    if type(query) is not Tensor and any_dtensor(query, key, value):
        return _on_dtensors(arguments, return_weights, return_lse)
    if return_weights:
        output, lse, weights = _sdpa(*arguments, return_weights=return_weights)
        return (output, weights, lse) if return_lse else (output, weights)
    output, lse, _ = _sdpa(*arguments)  # every argument passed costs time, so not those that have their default
    return (output, lse) if return_lse else output


def attention_with_average_weights(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`scaled_dot_product_attention` and the mean of its weights over the heads, (..., Lq, Lk).

    On a CPU the weights of each head are not stored, unless the mean has a gradient.
    """
    tensors = (query, key, value, attn_mask)
    if has_torch_function_variadic(*tensors):
        output, weights = handle_torch_function(attention_with_average_weights, tensors, *tensors, dropout_p)
        return output, weights
    if type(query) is not Tensor and any_dtensor(query, key, value):  # whose heads may be in different places
        output, weights = scaled_dot_product_attention(*tensors, dropout_p, return_weights=True)
        return output, weights.mean(-3)
    seed = draw_seed(query) if dropout_p else None
    output, _, weights = _sdpa(*tensors, None, seed, dropout_p, return_weights=True, average_weights=True)
    return output, weights


def any_dtensor(*tensors: Tensor) -> bool:
    """Without importing what makes them: where there is a DTensor, that has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def _on_dtensors(arguments: tuple[Any, ...], return_weights: bool, return_lse: bool) -> Any:
    from .distributed.sharding import on_dtensors

    query, key, value, attn_mask, alibi_slopes, seed = arguments[:6]
    lower_right = arguments[10] == "lower_right"
    placed, part = on_dtensors(query, key, value, attn_mask, alibi_slopes, seed, lower_right)
    output, lse, weights = _sdpa(*placed, *arguments[6:], "none", [], part, return_weights)
    results = [output, *([weights] if return_weights else []), *([lse] if return_lse else [])]
    return results[0] if len(results) == 1 else tuple(results)
