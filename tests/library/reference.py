"""The oracle: attention in plain differentiable torch, in float64, with every matrix in memory.

It follows the documentation of :func:`scaledot.scaled_dot_product_attention` line by line, and shares no code with the
ops, their masks or their random generator. It is slow and needs several matrices of the size of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scaledot import BlockMask

__all__ = ["attention", "dequantised", "philox_keep_mask"]


def attention(
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
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    masked_score: float = -math.inf,
    block_mask: BlockMask | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    dropout_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    pairwise: bool | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, weights), all in `dtype`; arguments as for :func:`scaledot.scaled_dot_product_attention`,
    and:

    Args:
        dropout_mask: bool, True = kept; needed if dropout_p > 0. It has the shape of the weights, or one batch
            dimension in place of all, as :func:`philox_keep_mask` and the op dropout_mask give it.
        k_scale, v_scale: what key and value, which may have 8 bits, are multiplied by: (), (Hkv,) or (..., Hkv).
        pairwise: multiply rows with keys pair by pair. A NaN or inf in a masked key or in a gradient then does not
            spread by 0 * NaN, as it does in a matrix product. This needs memory for Lq * Lk * D elements. Default: True
            if an input has a NaN or inf. Pass True if an incoming gradient may have one.
    """
    key, value = dequantised(key, k_scale, dtype), dequantised(value, v_scale, dtype)
    two_dimensional = query.dim() == key.dim() == value.dim() == 2
    if two_dimensional:
        query, key, value = query[None], key[None], value[None]
    if pairwise is None:
        pairwise = not all(bool(torch.isfinite(t).all()) for t in (query, key, value))
    q, k, v = _broadcast(query.to(dtype), key.to(dtype), value.to(dtype), enable_gqa)
    shape = (*q.shape[:-1], k.shape[-2])  # (..., H, Lq, Lk)
    distance = _distance(shape[-2], shape[-1], causal_alignment, q.device)

    masked = ~_attends(distance, is_causal, window).expand(shape)
    if block_mask is not None:
        shown = block_mask.to_dense()
        while shown.dim() > len(shape):  # dimensions of size 1 in front
            shown = shown.squeeze(0)
        masked = masked | ~shown
    replaced = torch.zeros_like(masked)
    if attn_mask is not None:
        mask = attn_mask.expand(shape)
        if mask.dtype != torch.bool:
            masked = masked | (mask == -math.inf)
        elif masked_score == -math.inf:
            masked = masked | ~mask
        else:
            replaced = ~mask & ~masked

    if scale is None:
        scale = 1 / math.sqrt(max(q.shape[-1], 1))  # of a width of 0, every score is 0
    score = _dot(q, k, ~(masked | replaced), pairwise) * scale
    if score_mod is not None:
        score = _changed(score, score_mod)
        masked = masked | ((score == -math.inf) & ~replaced)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if alibi_slopes is not None:
        score = score - alibi_slopes.to(dtype)[..., None, None] * distance.abs()
    if relative_bias is not None:
        reach = relative_bias.shape[-1] // 2
        bias = relative_bias.to(dtype)[..., reach + distance.clamp(-reach, reach)]
        masked = masked | (bias == -math.inf)
        score = score + bias
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        score = score + mask.to(dtype)
    score = torch.where(replaced, masked_score, score)

    probability, lse = _softmax(score, masked)
    weights = probability
    if dropout_p > 0:
        if dropout_mask is None:
            raise ValueError("dropout_mask: got None; needs a mask, because dropout_p > 0")
        kept = probability / (1 - dropout_p) if dropout_p < 1 else 0.0 * probability
        weights = torch.where(dropout_mask.reshape(shape), kept, 0.0)
    output = _weighted_sum(weights, v, ~masked, pairwise)
    if two_dimensional:
        return output.squeeze(-3), lse.squeeze(-2), weights.squeeze(-3)
    return output, lse, weights


def dequantised(stored: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """stored * scale: keys or values (..., Hkv, L, D) of any dtype, with a scale of (), (Hkv,) or (..., Hkv)."""
    numbers = stored.to(dtype)
    return numbers if scale is None else numbers * scale.to(dtype)[..., None, None]


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All three with the same batch dimensions and the same number of heads."""
    if enable_gqa:
        heads = query.shape[-3] if query.dim() > 2 else 1
        key, value = (t.repeat_interleave(heads // t.shape[-3], -3) if t.dim() > 2 else t for t in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (t.expand(*lead, *t.shape[-2:]) for t in (query, key, value))
    return query, key, value


def _distance(query_length: int, key_length: int, causal_alignment: str, device: torch.device) -> Tensor:
    """(Lq, Lk): the position of the key minus the aligned position of the row."""
    first = {"upper_left": 0, "lower_right": key_length - query_length}[causal_alignment]
    rows = torch.arange(first, first + query_length, device=device)
    return torch.arange(key_length, device=device) - rows[:, None]


def _attends(
    distance: Tensor,
    is_causal: bool,
    window: tuple[int | None, int | None] | None,
) -> Tensor:
    """(Lq, Lk) bool: the keys that each row may attend to by position."""
    attends = torch.ones_like(distance, dtype=torch.bool)
    left, right = window or (None, None)
    if is_causal:
        attends &= distance <= 0
    if left is not None:
        attends &= distance >= -left
    if right is not None:
        attends &= distance <= right
    return attends


def _dot(query: Tensor, key: Tensor, live: Tensor, pairwise: bool) -> Tensor:
    """dot(query[i], key[j]) where live; elsewhere 0, without a gradient."""
    if not pairwise:
        return torch.where(live, query @ key.mT, 0.0)
    pair = live.unsqueeze(-1)
    rows = torch.where(pair, query.unsqueeze(-2), 0.0)
    return (rows * torch.where(pair, key.unsqueeze(-3), 0.0)).sum(-1)


def _changed(score: Tensor, score_mod: Callable[..., Tensor]) -> Tensor:
    """The score function of all scores, which have a dimension for batch entries."""
    scores = score.reshape(math.prod(score.shape[:-3]), *score.shape[-3:])
    places = [
        torch.arange(size, device=score.device).reshape(-1, *[1] * (3 - dim)) for dim, size in enumerate(scores.shape)
    ]
    return torch.as_tensor(score_mod(scores, *places)).to(score.dtype).expand(scores.shape).reshape(score.shape)


def _weighted_sum(weights: Tensor, value: Tensor, live: Tensor, pairwise: bool) -> Tensor:
    """sum_j weights[i, j] value[j] over the live j."""
    if not pairwise:
        return weights @ value
    pair = live.unsqueeze(-1)
    return (torch.where(pair, weights.unsqueeze(-1), 0.0) * torch.where(pair, value.unsqueeze(-3), 0.0)).sum(-2)


def _softmax(score: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, lse) of each row over the keys that are not masked; 0 and -inf if all are.

    Every function that would not be finite at a replaced value comes after `where`, so that no gradient is 0 * inf.
    """
    score = torch.where(masked, -math.inf, score)
    floor = score.new_full((*score.shape[:-1], 1), -math.inf)  # the maximum where there is no key
    largest = torch.cat([score, floor], -1).amax(-1, keepdim=True).detach()
    shift = torch.where(largest == -math.inf, 0.0, largest)  # a constant: any shift gives the same result
    mass = torch.where(masked, 0.0, torch.exp(torch.where(masked, 0.0, score - shift)))
    total = mass.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    weights = torch.where(masked, 0.0, mass / total)
    lse = torch.where(empty, -math.inf, shift + torch.log(total))
    return weights, lse.squeeze(-1)


_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_keep_mask(
    seed: Tensor | Sequence[int], batch: int, heads: int, query_length: int, key_length: int, dropout_p: float
) -> Tensor:
    """(batch, heads, Lq, Lk) bool: the weights that dropout keeps, by Philox4x32-7 (Salmon et al., SC 2011).

    Args:
        seed: two integers, as in the op's dropout_seed: the generator's key (64 bits), and an offset of which the low
            32 bits count.

    The counter of (batch, head, row, column) is (16 * (column // 64) + column % 16, row, batch * heads + head, offset).
    It gives four words. A column uses word column % 64 // 16, and is kept if that is at least dropout_p * 2^32.
    """
    key, stream = (int(number) for number in seed)
    column = torch.arange(key_length)
    counters = torch.broadcast_tensors(
        torch.div(column, 64, rounding_mode="floor") * 16 + column % 16,
        torch.arange(query_length)[:, None],
        torch.arange(batch * heads)[:, None, None],
        torch.tensor(stream & _WORD),
    )
    words = torch.stack(_philox(list(counters), [key & _WORD, key >> 32 & _WORD]))
    chosen = words.gather(0, (column % 64 // 16).expand(words.shape[1:])[None])[0]
    return (chosen >= int(dropout_p * 2**32)).reshape(batch, heads, query_length, key_length)


def _philox(counter: list[Tensor], key: list[int]) -> list[Tensor]:
    """Seven rounds, on 32-bit words in int64 tensors."""
    for number in range(7):
        # int64 products wrap modulo 2^64, so both halves are right whatever the sign.
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        round_key = [(k + number * weyl) & _WORD for k, weyl in zip(key, _WEYL, strict=True)]
        counter = [
            (second >> 32 & _WORD) ^ counter[1] ^ round_key[0],
            second & _WORD,
            (first >> 32 & _WORD) ^ counter[3] ^ round_key[1],
            first & _WORD,
        ]
    return counter
