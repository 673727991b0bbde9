"""Attention as a user would write it in plain torch operations, in the dtype of the inputs.

tolerances.py allows a result two or three times the rounding error of this code. The formulas come from the
documentation, independently of reference.py and core/mask.h; in float64 all three must agree.
Shapes: query (..., H, Lq, D), key (..., Hkv, Lk, D), value (..., Hkv, Lk, Dv), as for torch's function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cases import Case, Cotangents, Inputs


def attends_by_position(case: Case, query_length: int, key_length: int) -> Tensor:
    """(Lq, Lk) bool: is_causal and window, by the distance from the diagonal of causal_alignment."""
    diagonal = key_length - query_length if case.causal_alignment == "lower_right" else 0
    row = torch.arange(query_length)[:, None] + diagonal
    column = torch.arange(key_length)[None, :]
    distance = column - row
    left, right = case.window or (None, None)
    attends = torch.ones(query_length, key_length, dtype=torch.bool)
    if case.causal:
        attends &= distance <= 0
    if left is not None:
        attends &= -distance <= left
    if right is not None:
        attends &= distance <= right
    return attends


def alibi_bias(case: Case, slopes: Tensor, query_length: int, key_length: int) -> Tensor:
    """(..., H, Lq, Lk): -slope * |distance|."""
    diagonal = key_length - query_length if case.causal_alignment == "lower_right" else 0
    row = torch.arange(query_length)[:, None] + diagonal
    distance = (torch.arange(key_length)[None, :] - row).abs()
    return -slopes[..., None, None] * distance


def relative_scores(case: Case, bias: Tensor, query_length: int, key_length: int) -> Tensor:
    """(..., H, Lq, Lk): the entry of each distance, from -reach to reach."""
    diagonal = key_length - query_length if case.causal_alignment == "lower_right" else 0
    row = torch.arange(query_length)[:, None] + diagonal
    entry = (torch.arange(key_length)[None, :] - row + case.relative_reach).clamp(0, 2 * case.relative_reach)
    return bias[..., entry]


def with_heads(case: Case, tensor: Tensor, heads: int) -> Tensor:
    """Repeats the key/value heads of grouped-query attention. Other head counts broadcast."""
    if case.enable_gqa and tensor.size(-3) != heads:
        return tensor.repeat_interleave(heads // tensor.size(-3), -3)
    return tensor


def attention(case: Case, inputs: Inputs, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, weights) in the inputs' dtype; `keep` is the dropout mask, (..., H, Lq, Lk) bool."""
    query, key, value = inputs.query, inputs.key, inputs.value
    if case.heads is not None:
        key, value = with_heads(case, key, query.size(-3)), with_heads(case, value, query.size(-3))
    query_length, key_length = query.size(-2), key.size(-2)
    scale = case.scale if case.scale is not None else 1 / math.sqrt(max(query.size(-1), 1))
    scores = query @ key.transpose(-2, -1) * scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if inputs.alibi_slopes is not None:
        bias = alibi_bias(case, inputs.alibi_slopes, query_length, key_length)
        scores = scores + (bias.squeeze(-3) if case.heads is None else bias).to(scores.dtype)
    if inputs.relative_bias is not None:
        relative = relative_scores(case, inputs.relative_bias, query_length, key_length)
        scores = scores + (relative.reshape(query_length, key_length) if case.heads is None else relative)
    mask = inputs.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, case.masked_score)
    elif mask is not None:
        scores = scores + mask
    attends = attends_by_position(case, query_length, key_length)
    shown = case.shown_by_blocks(inputs)
    if shown is not None:
        attends = attends & shown
    scores = torch.where(attends, scores, -math.inf)

    empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(torch.where(empty, 0.0, scores), -1).masked_fill(empty.squeeze(-1), -math.inf)
    weights = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, scores), -1))
    if keep is not None:
        weights = weights * keep / (1 - case.dropout_p)
    weights = weights.to(value.dtype)
    output = weights @ value
    lead = output.shape[:-2]  # of all three, even if only value has a batch dimension
    return output, lse.expand(*lead, -1), weights.expand(*lead, -1, -1)


def gradients(
    results: tuple[Tensor, Tensor, Tensor], cotangents: Cotangents, inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient of every input, zeros if nothing flows back. `results` may come from any implementation."""
    pairs = [
        (result, cotangent.to(result.dtype))
        for result, cotangent in zip(results, (cotangents.output, cotangents.lse, cotangents.weights), strict=True)
        if cotangent is not None and result.requires_grad
    ]
    grads = torch.autograd.grad(
        [result for result, _ in pairs], list(inputs.values()), [g for _, g in pairs], allow_unused=True
    )
    return {
        name: torch.zeros_like(t) if grad is None else grad
        for (name, t), grad in zip(inputs.items(), grads, strict=True)
    }
