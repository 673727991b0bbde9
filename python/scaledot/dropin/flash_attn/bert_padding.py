"""flash-attn's module of this name: between padded batches (B, L, ...) and packed tokens (total, ...).

All functions are differentiable, any number of times. They synchronise a GPU, because the number of tokens is a shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._checks import integer, require_tensors
from ..._keywords import check_keywords

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


@check_keywords
def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor: ``input[indices]``.

    Args:
        input: (rows, ...), of any dtype.
        indices: (total,), int64.

    Returns:
        (total, ...).
    """
    require_tensors(input=input, indices=indices)
    return input[indices]


@check_keywords
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of :func:`index_first_axis`, with zeros in the other rows.

    Args:
        values: (total, ...), of any dtype.
        indices: (total,), int64, all different.
        first_axis_dim: the number of rows of the result.

    Returns:
        (first_axis_dim, ...).
    """
    require_tensors(values=values, indices=indices)
    first_axis_dim = integer("first_axis_dim", first_axis_dim)
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


@check_keywords
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one sequence after the other.

    Args:
        hidden_states: (B, L, ...), of any dtype.
        attention_mask: (B, L), bool or integer: 1 = a token, 0 = padding.
        unused_mask: (B, L), bool or integer: 1 = keep this place too, though it is no token.

    Returns:
        (tokens (total, ...), indices (total,) int64 of the tokens in the flattened batch, cu_seqlens (B + 1,) int32,
        max_seqlen, seqused (B,) int32). seqused does not count the places of `unused_mask`.
    """
    require_tensors(hidden_states=hidden_states, attention_mask=attention_mask)
    if unused_mask is not None:
        require_tensors(unused_mask=unused_mask)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    _check_mask("attention_mask", kept, hidden_states)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulative(lengths), int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


@check_keywords
def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of a padded batch whose rows hold several sequences each.

    Args:
        hidden_states: (B, L, ...), of any dtype.
        attention_mask_in_length: (B, L), integer: the lengths of the sequences of each row, then zeros.

    Returns:
        (tokens (total, ...), indices (total,) int64, cu_seqlens (sequences + 1,) int32, max_seqlen).
    """
    require_tensors(hidden_states=hidden_states, attention_mask_in_length=attention_mask_in_length)
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    lengths = attention_mask_in_length
    used = torch.arange(lengths.size(1), device=lengths.device) < lengths.sum(-1, keepdim=True)
    indices = used.flatten().nonzero().flatten()
    each = lengths[lengths != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _cumulative(each), int(each.max())


@check_keywords
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`, with zeros as padding.

    Args:
        hidden_states: (total, ...), of any dtype.
        indices: (total,), int64, from :func:`unpad_input`.
        batch: B.
        seqlen: L.

    Returns:
        (B, L, ...).
    """
    require_tensors(hidden_states=hidden_states, indices=indices)
    batch, seqlen = integer("batch", batch), integer("seqlen", seqlen)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _cumulative(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        shape = tuple(hidden_states.shape[:2])
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}; needs {shape}, the first two of hidden_states")
