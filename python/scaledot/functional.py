"""scaled_dot_product_attention: torch.nn.functional's function with the options that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic
from typing_extensions import Unpack

from ._checks import check_types, flag, number, require_tensors
from ._jagged import any_nested, jagged_attention
from ._load import OPS
from ._score import ScoreMod, score_arguments
from ._seed import draw_seed
from ._torch.dtensor import any_dtensor
from ._torch.out import check_plain_out
from ._zero_one_mask import warn_of_zero_one_mask
from .options import SDPA, SdpaOptions, op_arguments

__all__ = ["scaled_dot_product_attention"]

_sdpa = OPS.sdpa.default  # looked up once: the look-up takes longer than a call's own Python
_sdpa_out = OPS.sdpa_out.default  # into a tensor of the caller
_sdpa_output = OPS.sdpa_output.default  # the same with three of its arguments, with which small calls are faster
_override: Callable[..., Any] = handle_torch_function  # its own type does not match overloads


# fmt: off
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    return_weights: Literal[False] = False, return_lse: Literal[False] = False, **options: Unpack[SdpaOptions],
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    return_weights: Literal[True], return_lse: Literal[True], **options: Unpack[SdpaOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    return_weights: Literal[True], return_lse: Literal[False] = False, **options: Unpack[SdpaOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    return_weights: Literal[False] = False, return_lse: Literal[True], **options: Unpack[SdpaOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[SdpaOptions],
) -> Any: ...
# fmt: on
@SDPA.sign
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
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Unpack[SdpaOptions],
) -> Tensor | tuple[Tensor, ...]:
    r"""softmax(scale * query key^T + masks) value, fused, with its gradients.

    The first eight arguments are those of :func:`torch.nn.functional.scaled_dot_product_attention`, in the same order
    and with the same meaning. For row i of the query and key j, let distance(i, j) = j - i ("upper_left") or
    j - (i + Lk - Lq) ("lower_right")::

        x = scale * dot(query[i], key[j])
        s = softcap * tanh(x / softcap)  if softcap  else  x
        s = s - alibi_slopes[head] * |distance(i, j)|
        s = s + relative_bias[head, M + clamp(distance(i, j), -M, M)]
        s = s + attn_mask[i, j]                                    (floating mask)
        s = s  if attn_mask[i, j]  else  masked_score              (boolean mask)
        s = -inf  where is_causal or window exclude distance(i, j), block_mask hides (i, j), or key_indices lacks j
        weights[i] = dropout(softmax(s[i]))        output = weights value
        lse[i] = log(sum_j exp(s[i, j]))

    Nested tensors of layout torch.jagged hold sequences of different lengths: query (B, H, j, D), which is
    ``transpose(1, 2)`` of (B, j, H, D), and key and value (B, Hkv, k, D). Here j and k differ from sequence to
    sequence. Nothing is padded (:func:`scaledot.varlen_attention` computes them). Results are jagged as query is.

    A key that is masked to -inf has weight 0, and a NaN or inf in it does not reach the row. A row that may attend to
    nothing has output, weights and gradients of 0 and an lse of -inf. A NaN or inf in anything that is attended to
    reaches the results.

    Args:
        query: (..., H, Lq, D); also (H, Lq, D) and (Lq, D). float32, float64, bfloat16 or float16, with any strides.
        key: (..., Hkv, Lk, D). Batch dimensions of query, key and value broadcast; so do head counts of 1.
        value: (..., Hkv, Lk, Dv); Dv may differ from D.
        attn_mask: any shape that broadcasts to (..., H, Lq, Lk); it is not expanded in memory. Boolean: True = may
            attend. Floating: added to the score. A mask that requires grad gets a gradient of its shape and dtype,
            computed in float32 (float64 for a float64 query). Composes with `is_causal` and `window`.
        dropout_p: in [0, 1]. Each weight becomes 0 with this probability; the others are multiplied by
            1 / (1 - dropout_p). With 1, all weights and the output are 0. The seed is drawn from torch's default
            generator, the CPU's or that of query's GPU. Which weights are dropped depends on the seed alone, not on
            device, thread count or kernel (Philox4x32-7, Salmon et al., SC 2011).
        is_causal: row i attends to keys with distance(i, j) <= 0.
        scale: a finite number; default 1 / sqrt(D).
        enable_gqa: H may be a multiple of Hkv; query head h then attends to key and value head h // (H // Hkv).
        causal_alignment: the diagonal from which distances count. "upper_left" aligns row 0 with key 0, as torch does.
            "lower_right" aligns the last row with the last key, as decoding with a cache needs.
        window: (left, right), integers of at least 0, or None for no limit. Row i attends to keys with
            -left <= distance(i, j) <= right (sliding window; Beltagy et al., "Longformer", 2020).
        softcap: > 0. Limits scores to (-softcap, softcap) by tanh, before masks (Gemma 2, 2024).
        alibi_slopes: (H,) or (B, H), one slope a head (Press et al., "Train Short, Test Long", 2022).
        relative_bias: floating, any shape that broadcasts to (..., H, 2 M + 1): a number for each distance from -M to
            M, added to the score; -inf masks the key. Distances beyond have the number of the nearer end. A distance
            is positive for keys after the row's own position, and counts from the diagonal of `causal_alignment`. It
            gets a gradient of its shape and dtype, computed in float32 (float64 for a float64 query), the same bits
            every time. Nothing of size Lq * Lk is stored. (Shaw et al., 2018; Raffel et al., "T5", 2020.)
        masked_score: the score of a key where a boolean `attn_mask` is False. With -inf the key does not take part at
            all. A finite number, as in masked_fill(mask, -1e9), is an ordinary score: a row without any True attends
            to all its keys alike.
        block_mask: a :class:`scaledot.BlockMask`, or a ``torch.nn.attention.flex_attention.BlockMask``, for these
            lengths; its batch and head dimensions may be 1. Blocks of keys that are hidden from blocks of rows are
            skipped: time and memory fall with the share of blocks that are left. A mask of torch's is converted in
            the first call that gets it, and again if it has changed (`BlockMask.from_torch`). Composes with all other
            masks.
        score_mod: a function ``score_mod(score, b, h, q_idx, kv_idx) -> score`` of 0-d tensors, as FlexAttention takes
            (Dong et al., 2024): pointwise torch operations, torch.where, comparisons, and loads ``captured[b, h, ...]``
            from tensors that it captures. It gets scale * dot(query[i], key[j]), before any mask; -inf hides the key.
            Captured floating tensors get gradients, the same bits every time, in memory linear in L. The function is
            traced once for each kind of what it captures, and no compiler runs. CPU only; not with `softcap`,
            `alibi_slopes` and `relative_bias`, which :mod:`scaledot.score_mods` has as functions. No second
            derivative, and no forward mode.
        key_indices: int32 or int64 (..., H or Hkv or 1, Lq, K): the keys that each row attends to, in any order. A
            negative entry is none; a key that is listed twice counts twice. Time and memory grow with K, not with Lk,
            forward and backward; gradients have the same bits every time (sparse attention with lists of keys:
            DeepSeek-AI, "DeepSeek-V3.2", 2025). Composes with `is_causal`, `window`, `softcap`, dropout and
            `enable_gqa`. CPU only; not with `attn_mask`, `block_mask`, `alibi_slopes`, `relative_bias` and `score_mod`.
            No second derivative, and no forward mode.
        out: memory for the output, which is written there and returned; no other is allocated for it. It has the
            output's shape and dtype, and any strides of which the last is 1. It may be a slice of a larger tensor, but
            shares no memory with the other arguments. For calls that record no gradient: under torch.no_grad() or
            torch.inference_mode(), or where no argument requires one. lse and weights are new tensors.
        return_weights: also return the weights, (..., H, Lq, Lk), as they multiplied the values (after dropout). They
            are differentiable, and need memory of this size. With `key_indices` they are (..., H, Lq, K), in the order
            of the lists.
        return_lse: also return lse, (..., H, Lq), float32 (float64 for float64). It is differentiable.

    Returns:
        output (..., H, Lq, Dv), or (output, weights), (output, lse) or (output, weights, lse) as asked for. Output and
        weights have query's dtype.

    Raises:
        ValueError: shapes or devices that do not fit together; a number outside its range, also in key_indices;
            attn_mask, block_mask, masked_score, score_mod, key_indices, out or return_weights with nested tensors;
            score_mod with softcap, alibi_slopes or relative_bias; key_indices with those or a mask that it does not
            compose with; an `out` that overlaps itself or another argument, or where a gradient is recorded.
        TypeError: an argument of a wrong Python type, such as a NumPy array, or 1 for a bool; dtypes or layouts that
            are not supported (sparse, quantised, nested of layout torch.strided); mixed dtypes; an unknown keyword.
        IndexError: score_mod reads a captured tensor out of bounds.
        NotImplementedError: a tensor on a device without kernels; a score_mod with an operation that kernels lack;
            score_mod or key_indices on a GPU.

    Every error message is one line that names the argument, what it got and what it needs.

    Example:
        >>> import torch, scaledot
        >>> query, key, value = torch.randn(3, 2, 8, 128, 64).unbind()   # batch 2, 8 heads, 128 positions
        >>> output, weights = scaledot.scaled_dot_product_attention(
        ...     query, key, value, is_causal=True, window=(31, 0), return_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128, 128]))
    """
    # The op's further arguments. Those at their default are left out: each that is passed costs time.
    score_mod = options.pop("score_mod", None) if options else None  # it is no tensor, and takes long to check for one
    arguments = op_arguments("scaled_dot_product_attention", options, SDPA) if options else {}
    tensors = (query, key, value, attn_mask, *options.values())  # others than tensors have no override, and do no harm
    if has_torch_function_variadic(*tensors):
        return _override(
            scaled_dot_product_attention,
            tensors,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_weights=return_weights,
            return_lse=return_lse,
            **_with(options, score_mod),
        )
    plain = type(query) is type(key) is type(value) is Tensor
    if not plain:
        require_tensors(query=query, key=key, value=value)
        if any_nested(query, key, value):
            return jagged_attention(
                query,
                key,
                value,
                attn_mask,
                return_weights,
                return_lse,
                _with(options, score_mod),
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
    if attn_mask is not None:
        arguments["attn_mask"] = attn_mask
    if type(dropout_p) is not float and type(dropout_p) is not int:
        dropout_p = number("dropout_p", dropout_p)
    if dropout_p != 0.0:
        arguments["dropout_p"] = dropout_p
        arguments["dropout_seed"] = draw_seed(query)
    if is_causal is not False:
        flag("is_causal", is_causal)
    if scale is not None:
        arguments["scale"] = number("scale", scale, optional=True)
    if enable_gqa is not False:
        arguments["enable_gqa"] = flag("enable_gqa", enable_gqa)
    if return_weights is not False:
        arguments["return_weights"] = flag("return_weights", return_weights)
    if return_lse is not False:
        flag("return_lse", return_lse)
    if plain and not arguments and score_mod is None and not return_lse and not is_compiling():
        output = _sdpa_output(query, key, value, is_causal)
        return output
    if is_causal is not False:
        arguments["is_causal"] = is_causal
    if score_mod is not None:
        arguments.update(score_arguments(score_mod, query, key, value, arguments))
    if "out" in arguments:
        check_plain_out(arguments["out"], query, key, value)
    if not plain and any_dtensor(query, key, value):
        from ._torch.dtensor.sdpa import place

        query, key, value, arguments = place(query, key, value, arguments)
    try:
        if "out" in arguments:
            output = arguments["out"]
            others = {name: argument for name, argument in arguments.items() if name != "out"}
            # By its place: torch.compile refuses some layouts of an argument that is passed as out=.
            lse, weights = _sdpa_out(output, query, key, value, **others)
        else:
            output, lse, weights = _sdpa(query, key, value, **arguments)
    except RuntimeError as error:
        check_types(error, arguments)
        raise
    if attn_mask is not None and not is_compiling():
        warn_of_zero_one_mask(attn_mask)  # after the op, which refuses a mask that cannot be read
    if return_weights:
        return (output, weights, lse) if return_lse else (output, weights)
    return (output, lse) if return_lse else output


def _with(options: SdpaOptions, score_mod: ScoreMod | None) -> SdpaOptions:
    return options if score_mod is None else {**options, "score_mod": score_mod}


def attention_with_average_weights(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """:func:`scaled_dot_product_attention`, and the mean of its weights over the heads, (..., Lq, Lk).

    The weights of each head are not stored, unless the mean gets a gradient.
    """
    tensors = (query, key, value, attn_mask)
    if has_torch_function_variadic(*tensors):
        output, weights = handle_torch_function(attention_with_average_weights, tensors, *tensors, dropout_p)
        return output, weights
    if type(query) is not Tensor and any_dtensor(query, key, value):  # heads may be on several ranks
        output, weights = scaled_dot_product_attention(*tensors, dropout_p, return_weights=True)
        return output, weights.mean(-3)
    seed = draw_seed(query) if dropout_p else None
    output, _, weights = _sdpa(
        *tensors, dropout_seed=seed, dropout_p=dropout_p, return_weights=True, average_weights=True
    )
    return output, weights
