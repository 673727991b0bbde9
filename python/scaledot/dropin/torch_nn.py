"""torch.nn.MultiheadAttention with this package's kernels, and `convert`, which puts it into a model."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import attention_with_average_weights, scaled_dot_product_attention
from .attend import attend

__all__ = ["MultiheadAttention", "convert"]

Model = TypeVar("Model", bound=nn.Module)


class MultiheadAttention(nn.MultiheadAttention):
    """The same arguments, parameters, state_dict and results as torch.nn.MultiheadAttention, in training and in
    eval mode.

    What differs: a row that may attend to nothing has zero weights, and so out_proj's bias as its output, instead
    of NaN; asking for weights does not change how the output is computed; nested inputs work in training and in
    cross-attention.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        _keep_being_called(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights); weights is None unless need_weights.

        Args:
            query: (L, N, E), or (N, L, E) with batch_first, or (L, E) without a batch. Or, with batch_first and
                without masks, a nested tensor; then key and value are nested as well.
            key, value: the same with S for L, and kdim and vdim for E.
            key_padding_mask: (N, S), without a batch (S). bool: True = do NOT attend; or floating: added to the
                scores.
            attn_mask: (L, S) or (N * num_heads, L, S), bool or floating in the same way.
            average_attn_weights: weights are (N, L, S), the mean over the heads, not (N, num_heads, L, S).
            is_causal: a hint that attn_mask, which must be given too, is the causal mask.

        Returns:
            output like query; weights after dropout, without N if there is no batch, zero where nested inputs
            are padded.

        Raises:
            ValueError: shapes that do not fit. TypeError: a mask that is neither bool nor floating.
            RuntimeError: is_causal without attn_mask.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is only a hint that attn_mask is causal: it needs attn_mask, got None")
        if query.is_nested or key.is_nested or value.is_nested:
            if key_padding_mask is not None or attn_mask is not None:
                raise ValueError("key_padding_mask and attn_mask cannot be given together with nested inputs")
            return self._forward_nested(query, key, value, need_weights, average_attn_weights)
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        # As torch does: the hint replaces the mask only here. They differ if the hint is wrong or keys are added.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        mask = _sdpa_mask(None if is_causal else attn_mask, key_padding_mask, q, k)
        k, v, mask = self._add_keys(k, v, mask)

        weights: Tensor | None = None
        dropout_p = self.dropout if self.training else 0.0
        if not 0.0 <= dropout_p < 1.0:  # all weights are dropped, whatever the masks; or nn.Dropout raises
            output, weights = attend(q, k, v, dropout=nn.Dropout(dropout_p))
        elif need_weights and average_attn_weights:
            output, weights = attention_with_average_weights(q, k, v, mask, dropout_p)
        elif need_weights:
            output, weights = scaled_dot_product_attention(q, k, v, mask, dropout_p, return_weights=True)
        else:
            output = scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
        output = F.linear(self._merge_heads(output, batched), self.out_proj.weight, self.out_proj.bias)
        if weights is None or not need_weights:
            return output, None
        if average_attn_weights and weights.dim() == 4:
            weights = weights.mean(dim=1)
        return output, weights if batched else weights.squeeze(0)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        dims = query.dim()
        if dims not in (2, 3):
            raise ValueError(f"query needs 3 dimensions, or 2 without a batch, got the shape {tuple(query.shape)}")
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.dim() != dims or x.size(-1) != width:
                raise ValueError(
                    f"{name} needs {dims} dimensions, as query has, the last of size {width}, got {tuple(x.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value needs the batch and length of key {tuple(key.shape)}, got the shape {tuple(value.shape)}"
            )
        if dims == 3:
            batch = 0 if self.batch_first else 1
            if key.size(batch) != query.size(batch):
                raise ValueError(
                    f"key needs the batch size of query, {query.size(batch)} in dimension {batch}, got the shape "
                    f"{tuple(key.shape)}"
                )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value projected to embed_dim; in as few matrix products as there are different inputs."""
        bias = self.in_proj_bias
        if not self._qkv_same_embed_dim:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            q = F.linear(query, self.q_proj_weight, biases[0])
            k = F.linear(key, self.k_proj_weight, biases[1])
            return q, k, F.linear(value, self.v_proj_weight, biases[2])
        weight = self.in_proj_weight
        if query is key and key is value:
            q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
            return q, k, v
        sizes = [self.embed_dim, 2 * self.embed_dim]
        w_q, w_kv = weight.split(sizes)
        b_q, b_kv = (None, None) if bias is None else bias.split(sizes)
        q = F.linear(query, w_q, b_q)
        if key is value:
            k, v = F.linear(key, w_kv, b_kv).chunk(2, dim=-1)
        else:
            w_k, w_v = w_kv.chunk(2)
            b_k, b_v = (None, None) if b_kv is None else b_kv.chunk(2)
            k, v = F.linear(key, w_k, b_k), F.linear(value, w_v, b_v)
        return q, k, v

    def _split_heads(self, x: Tensor) -> Tensor:
        """(N, L, E), (L, N, E) or (L, E) -> (N, num_heads, L, head_dim), a view; N = 1 without a batch"""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _merge_heads(self, x: Tensor, batched: bool) -> Tensor:
        """The inverse of _split_heads"""
        if not batched:
            return x.squeeze(0).transpose(0, 1).flatten(1)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(2)

    def _add_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Appends the keys and values of add_bias_kv and add_zero_attn, which no mask hides."""
        length = k.size(2)
        if self.bias_k is not None and self.bias_v is not None:
            shape = (k.size(0), self.num_heads, 1, self.head_dim)
            k = torch.cat([k, self._split_heads(self.bias_k).expand(shape)], dim=2)
            v = torch.cat([v, self._split_heads(self.bias_v).expand(shape)], dim=2)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        added = k.size(2) - length
        if mask is not None and added:
            mask = F.pad(mask, (0, added), value=1.0 if mask.dtype == torch.bool else 0.0)
        return k, v, mask

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Pads, attends to what is not padding, and cuts the padding off again."""
        if not (query.is_nested and key.is_nested and value.is_nested and self.batch_first):
            raise ValueError("a nested input needs query, key and value to be nested, and batch_first=True")
        query_lengths, key_lengths, value_lengths = ([x.size(0) for x in t.unbind()] for t in (query, key, value))
        if value_lengths != key_lengths:
            raise ValueError(f"value needs the lengths of key {key_lengths}, got {value_lengths}")
        q = torch.nested.to_padded_tensor(query, 0.0)
        k = q if key is query else torch.nested.to_padded_tensor(key, 0.0)
        v = k if value is key else torch.nested.to_padded_tensor(value, 0.0)
        output, weights = self.forward(
            q, k, v, _padding(key_lengths, k), need_weights, average_attn_weights=average_attn_weights
        )
        rows = [x[:length] for x, length in zip(output.unbind(), query_lengths, strict=True)]
        if weights is not None:
            padding = _padding(query_lengths, q).unsqueeze(2)
            weights = weights.masked_fill(padding if average_attn_weights else padding.unsqueeze(1), 0.0)
        return torch.nested.as_nested_tensor(rows, layout=query.layout), weights


def convert(model: Model) -> Model:
    """Makes every torch.nn.MultiheadAttention inside `model` (or `model` itself) a `MultiheadAttention`, in place.

    The modules stay the objects that they are and only change their class: parameters and whoever shares them,
    buffers, hooks, device, dtype and train or eval mode are untouched. In eval mode torch's encoder layers then
    call the module instead of their own fused path. Subclasses of torch.nn.MultiheadAttention are left alone, since
    what they compute is their own. Warns if there is nothing to convert.

    Returns: `model`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = False
    for module in model.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            _keep_being_called(module)
        found = found or isinstance(module, MultiheadAttention)
    if not found:
        warnings.warn(f"convert found no torch.nn.MultiheadAttention in {type(model).__name__}", stacklevel=2)
    return model


def _keep_being_called(module: nn.Module) -> None:
    """In eval mode nn.TransformerEncoderLayer does not call its attention module but hands its parameters to a
    fused op, unless a module inside it has a forward hook, which that would skip. So every module has one, which
    does nothing."""
    module.register_forward_pre_hook(_called)


def _called(module: nn.Module, args: tuple[Any, ...]) -> None:
    pass


def _padding(lengths: list[int], padded: Tensor) -> Tensor:
    """(N, L), True beyond a sequence's length; padded is (N, L, E)"""
    positions = torch.arange(padded.size(1), device=padded.device)
    return positions >= torch.tensor(lengths, device=padded.device).unsqueeze(1)


def _sdpa_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The two masks of nn.MultiheadAttention as one attn_mask of this package, broadcastable to (N, num_heads, L,
    S): bool with True = may attend if both are bool, else their sum, a bool one counting as 0 and -inf."""
    batch, heads, query_length, _ = q.shape
    key_length = k.size(2)
    masks = []
    if attn_mask is not None:
        _check_mask("attn_mask", attn_mask, (query_length, key_length), (batch * heads, query_length, key_length))
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(batch, heads, query_length, key_length)
        masks.append(attn_mask)
    if key_padding_mask is not None:
        shapes = [(batch, key_length), (key_length,)] if batch == 1 else [(batch, key_length)]
        _check_mask("key_padding_mask", key_padding_mask, *shapes)
        masks.append(key_padding_mask.view(batch, 1, 1, key_length))
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
    first, *second = (_additive(mask, q.dtype) for mask in masks)
    return first + second[0] if second else first


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _check_mask(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool (True = do not attend) or floating, got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        needed = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} needs the shape {needed}, got {tuple(mask.shape)}")
