"""T5's relative positions as a small table of numbers, for scaledot.dropin.transformers."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._checks import described
from .._keywords import check_keywords
from ._own_attention import is_ours

__all__ = ["convert_relative_bias"]

_Model = TypeVar("_Model", bound=nn.Module)

_ARGUMENTS = ("query_length", "key_length", "device", "past_seen_tokens")  # of transformers' compute_bias


@check_keywords
def convert_relative_bias(model: _Model) -> _Model:
    """Makes T5 and its relatives pass their position bias as `relative_bias`, not as a matrix.

    transformers computes the bias (1, H, Lq, Lk) from an embedding of distances in buckets, once a call. All distances
    beyond ``relative_attention_max_distance`` share a bucket. After the conversion a module computes the number of each
    distance only, (1, H, 2 M + 1), and every layer adds it inside the kernel. Results and gradients, also the
    embedding's, are those of eager attention. A call with a single query computes the row of the bias as before.

    The conversion has an effect while the attention implementation is one that :func:`register` made. With any other
    the model runs as transformers wrote it. Parameters and the state dict do not change.

    Args:
        model: a model with T5's attention (T5, mT5, UMT5, Switch Transformers, Pop2Piano, UDOP, Pix2Struct). It is
            changed in place. Converting it again changes nothing.

    Returns:
        The model.

    Raises:
        TypeError: `model` is not a torch.nn.Module.
        ValueError: no module of the model has such a bias.

    Example:
        >>> scaledot.dropin.transformers.register()
        >>> sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        >>> config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        >>> model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="scaledot")
        >>> model = scaledot.dropin.transformers.convert_relative_bias(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {described(model)}; needs a torch.nn.Module")
    found = [module for module in model.modules() if _has_relative_bias(module)]
    if not found:
        raise ValueError(
            f"model: got a {type(model).__name__}, none of whose modules computes a bias from relative positions as "
            "transformers' T5Attention does; needs T5 or a relative of it"
        )
    for module in found:
        setattr(module, "compute_bias", types.MethodType(_compute_bias, module))  # noqa: B010 - mypy refuses `=`
    return model


def _has_relative_bias(module: nn.Module) -> bool:
    """Whether the module has T5Attention's compute_bias, and passes its result to an attention implementation."""
    compute = getattr(type(module), "compute_bias", None)
    if compute is None or not getattr(module, "has_relative_attention_bias", False):
        return False
    takes_implementations = hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")
    return takes_implementations and tuple(inspect.signature(compute).parameters)[1:] == _ARGUMENTS


def _compute_bias(
    self: Any,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: int | Tensor = 0,
) -> Tensor:
    """In place of T5Attention.compute_bias: (1, H, 2 M + 1), a number for each key minus row, or (1, H, Lq, Lk)."""
    whole = type(self).compute_bias
    if query_length == 1 or not is_ours(self.config._attn_implementation):
        matrix: Tensor = whole(self, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        return matrix
    # Row i is at position i + past_seen_tokens, and key j at position j.
    reach = max(query_length, key_length) - 1
    if isinstance(past_seen_tokens, int):
        reach = min(reach, self.relative_attention_max_distance + past_seen_tokens)
    # A row at position `reach` sees keys 0 to 2 * reach at the distances from -reach to reach.
    row: Tensor = whole(self, 1, 2 * reach + 1, device=device, past_seen_tokens=past_seen_tokens + reach)
    return row.squeeze(2)
