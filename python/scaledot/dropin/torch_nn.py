"""torch.nn.MultiheadAttention with scaledot's kernels, and `convert`, which puts it into a model."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.activation import _is_make_fx_tracing
from typing_extensions import Unpack

from .._checks import described, integer, number, require_tensors
from .._jagged import any_nested
from .._keywords import NoOptions, check_keywords, hide_unknown, unknown_keyword
from .._torch.fx import Proxy, record_module
from .._warn import warn
from ..functional import attention_with_average_weights, scaled_dot_product_attention
from ..modules import refuse_torchscript

__all__ = ["MultiheadAttention", "convert"]

Model = TypeVar("Model", bound=nn.Module)


class MultiheadAttention(nn.MultiheadAttention):
    """Replaces :class:`torch.nn.MultiheadAttention`: the same arguments, parameters, state_dict and results.

    There are four differences:

    - A row with nothing to attend to has zero weights, so its output is the bias of `out_proj`. torch returns NaN.
    - `need_weights` does not change how the output is computed.
    - Nested inputs also work in training and in cross-attention.
    - torch.jit.script is a NotImplementedError. torch.export, torch.compile and torch.jit.trace take the module.

    The arguments of the constructor are those of :class:`torch.nn.MultiheadAttention`.

    Example:
        >>> attention = scaledot.dropin.torch_nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> output, weights = attention(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    @check_keywords
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
            integer("embed_dim", embed_dim),
            integer("num_heads", num_heads),
            dropout=number("dropout", dropout),
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=integer("kdim", kdim, optional=True),
            vdim=integer("vdim", vdim, optional=True),
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        _keep_being_called(self)

    @hide_unknown
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
        **unknown: Unpack[NoOptions],
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `query` to `key` and `value`, as torch.nn.MultiheadAttention does.

        Args:
            query: (L, N, E), or (N, L, E) with batch_first, or (L, E) without a batch. With batch_first and without
                masks, it may be a nested tensor; then key and value must be nested too.
            key: as query, with S instead of L and kdim instead of E.
            value: as key, with vdim instead of kdim.
            key_padding_mask: (N, S), or (S) without a batch. If bool, True = do NOT attend. If floating, it is added to
                the scores.
            need_weights: whether to return the weights.
            attn_mask: (L, S) or (N * num_heads, L, S), bool or floating, with the same meaning.
            average_attn_weights: whether to return the mean of the weights over the heads.
            is_causal: a hint that `attn_mask`, which is required with it, is the causal mask.

        Returns:
            (output, weights). The output has the shape of `query`. The weights, after dropout, are (N, L, S) if
            averaged and (N, num_heads, L, S) if not, without N if there is no batch; None unless `need_weights`. For
            nested inputs they are zero at the padding.

        Raises:
            RuntimeError: `is_causal` without `attn_mask`.
            TypeError: a mask is neither bool nor floating.
            ValueError: a shape does not fit.
        """
        if isinstance(query, Proxy):
            masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return record_module(self, query, key, value, *masks, unknown=unknown)  # type: ignore[no-any-return]
        if unknown:
            raise unknown_keyword(MultiheadAttention.forward, *unknown)
        if is_causal and attn_mask is None:
            raise RuntimeError("attn_mask: got None; needs the causal mask, because is_causal is only a hint")
        require_tensors(query=query, key=key, value=value)
        if any_nested(query, key, value):
            for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
                if mask is not None:
                    raise ValueError(f"{name}: got a mask with nested inputs; needs None")
            return self._forward_nested(query, key, value, need_weights, average_attn_weights)
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        # The hint replaces the mask only here, as in torch. They differ if the hint is wrong or keys are added.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        merged = _sdpa_mask(None if is_causal else attn_mask, key_padding_mask, q, k)
        k, v, merged = self._add_keys(k, v, merged)

        weights: Tensor | None = None
        dropout_p = self.dropout if self.training else 0.0
        if need_weights and average_attn_weights:
            output, weights = attention_with_average_weights(q, k, v, merged, dropout_p)
        elif need_weights:
            output, weights = scaled_dot_product_attention(q, k, v, merged, dropout_p, return_weights=True)
        else:
            output = scaled_dot_product_attention(q, k, v, merged, dropout_p, is_causal)
        rows_outside = batched and not (
            self.batch_first and self._torch_is_fused(query, key, value, key_padding_mask, attn_mask)
        )
        merged_heads = self._merge_heads(output, batched, rows_outside)
        output = F.linear(merged_heads, self.out_proj.weight, self.out_proj.bias)
        if self.batch_first and rows_outside:
            output = output.transpose(0, 1)
        return output, weights if weights is None or batched else weights.squeeze(0)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript(self)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        dims = query.dim()
        if dims not in (2, 3):
            raise ValueError(f"query: got shape {tuple(query.shape)}; needs 3 dimensions, or 2 without a batch")
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.dim() != dims or x.size(-1) != width:
                raise ValueError(
                    f"{name}: got shape {tuple(x.shape)}; needs {dims} dimensions, as query has, the last of size "
                    f"{width}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value: got shape {tuple(value.shape)}; needs the batch size and length of key {tuple(key.shape)}"
            )
        if dims == 3:
            batch = 0 if self.batch_first else 1
            if key.size(batch) != query.size(batch):
                raise ValueError(
                    f"key: got shape {tuple(key.shape)}; needs the batch size of query, {query.size(batch)}, in "
                    f"dimension {batch}"
                )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects query, key and value to embed_dim, with one matrix product for each distinct input."""
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
        """(N, L, E), (L, N, E) or (L, E) -> (N, num_heads, L, head_dim), a view. Without a batch, N = 1."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _merge_heads(self, x: Tensor, batched: bool, rows_outside: bool) -> Tensor:
        """(N, num_heads, L, head_dim) -> (L, N, E), (N, L, E) or (L, E)."""
        if not batched:
            return x.squeeze(0).transpose(0, 1).flatten(1)
        return (x.permute(2, 0, 1, 3) if rows_outside else x.transpose(1, 2)).flatten(2)

    def _torch_is_fused(self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None) -> bool:
        """Whether torch's module would run its fused inference operator, whose output is (N, L, E) in memory.

        Its output is (L, N, E) otherwise, also with `batch_first`, and what was traced after it depends on that.
        """
        if self.training or not (query is key and key is value) or not torch.backends.mha.get_fastpath_enabled():
            return False
        weight, bias, output = self.in_proj_weight, self.in_proj_bias, self.out_proj
        if not self._qkv_same_embed_dim or bias is None or self.bias_k is not None or self.add_zero_attn:
            return False
        if self.num_heads % 2 or query.dtype != weight.dtype or torch.is_autocast_enabled() or _is_make_fx_tracing():
            return False
        if any(mask is not None and mask.is_floating_point() for mask in masks):
            return False
        tensors = (query, weight, bias, output.weight, output.bias)
        if torch.overrides.has_torch_function(tensors) or not all(t.is_cpu or t.is_cuda for t in tensors):
            return False
        return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))

    def _add_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Appends the keys and values of add_bias_kv and add_zero_attn. No mask hides them."""
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
        """Pads the nested inputs, attends with the padding masked, and removes the padding from the output."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not tensor.is_nested:
                raise ValueError(f"{name}: got a tensor that is not nested; needs query, key and value to be nested")
        if not self.batch_first:
            raise ValueError("batch_first: got False with nested inputs; needs True")
        query_lengths, key_lengths, value_lengths = ([x.size(0) for x in t.unbind()] for t in (query, key, value))
        if value_lengths != key_lengths:
            raise ValueError(f"value: got lengths {value_lengths}; needs those of key, {key_lengths}")
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


@check_keywords
def convert(model: Model) -> Model:
    """Turns every torch.nn.MultiheadAttention in `model` (or `model` itself) into a `MultiheadAttention`, in place.

    Only the class of the module objects changes. Parameters (shared ones too), buffers, hooks, device, dtype and
    training mode stay. In eval mode, torch's encoder layers then call the module instead of their own fused path.
    Subclasses of torch.nn.MultiheadAttention are not converted, because they may compute something else. Warns if there
    is nothing to convert.

    Args:
        model: any module.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a torch.nn.Module.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> scaledot.dropin.torch_nn.convert(model) is model
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {described(model)}; needs a torch.nn.Module")
    found = False
    for module in model.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            _keep_being_called(module)
        found = found or isinstance(module, MultiheadAttention)
    if not found:
        warn(f"convert found no torch.nn.MultiheadAttention in {type(model).__name__}")
    return model


def _keep_being_called(module: nn.Module) -> None:
    """Makes torch's encoder layers call the module in eval mode, by a forward hook that does nothing.

    In eval mode nn.TransformerEncoderLayer passes its parameters to a fused op and does not call its attention module.
    It calls the module if any submodule has a forward hook, which the fused op would skip.
    """
    module.register_forward_pre_hook(_called)


def _called(module: nn.Module, args: tuple[Any, ...]) -> None:
    pass


def _padding(lengths: list[int], padded: Tensor) -> Tensor:
    """(N, L) from the lengths of the sequences in `padded` (N, L, E): True beyond the length."""
    positions = torch.arange(padded.size(1), device=padded.device)
    return positions >= torch.tensor(lengths, device=padded.device).unsqueeze(1)


def _sdpa_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Merges the two masks of nn.MultiheadAttention into one attn_mask, broadcastable to (N, num_heads, L, S).

    If both are bool, the result is bool with True = may attend. Otherwise it is their sum, in which True counts as
    -inf and False as 0.
    """
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
    require_tensors(**{name: mask})
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: got dtype {mask.dtype}; needs torch.bool (True = do not attend) or a floating dtype")
    if tuple(mask.shape) not in shapes:
        needed = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}; needs {needed}")
