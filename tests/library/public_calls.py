"""Every public function, class and module of scaledot, with arguments that work: see argument_kinds.py."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

import scaledot
from argument_kinds import Call, kinds
from bad_arguments import Arguments, sdpa_arguments, varlen_arguments
from scaledot.dropin import config_mha, flash_attn, self_attention, split_heads, steps, torch_nn
from scaledot.dropin.flash_attn import bert_padding

_OPTIONS = dict(
    number="dropout_p", optional_number="scale softcap", text="causal_alignment", window="window",
    flag="is_causal enable_gqa return_lse",
)  # fmt: skip
_SDPA = kinds(**_OPTIONS | dict(number="dropout_p masked_score"), tensor="query key value")
_SDPA |= kinds(optional_tensor="attn_mask alibi_slopes relative_bias key_indices out", flag="return_weights")
_SDPA |= kinds(block_mask="block_mask", function="score_mod")
_VARLEN = kinds(**_OPTIONS, tensor="query key value cu_seq_q", integer="max_q max_k", aux="return_aux")
_VARLEN |= kinds(
    optional_tensor="cu_seq_k seqused_k block_table alibi_slopes relative_bias k_scale v_scale attn_mask out",
    optional_integer="num_splits",
)
_VARLEN |= kinds(window_size="window_size")


def _sdpa() -> Arguments:
    return sdpa_arguments() | dict(dropout_p=0.5, scale=0.5, softcap=2.0, window=(1, 2), masked_score=-2.0)


def _varlen() -> Arguments:
    return varlen_arguments() | dict(dropout_p=0.5, scale=0.5, softcap=2.0, window_size=(1, 2), num_splits=2)


def _calls(module: nn.Module) -> Any:
    """The module's forward, with its signature."""

    def forward(**arguments: Any) -> Any:
        return module(**arguments)

    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return forward


def _states() -> Arguments:
    return dict(out_a=torch.ones(2, 3), lse_a=torch.ones(2), out_b=torch.ones(2, 3), lse_b=torch.ones(2))


_MODULE_SIZES = kinds(
    integer="embed_dim num_heads", optional_integer="kdim vdim out_dim qk_dim v_dim num_kv_heads",
    flag="bias out_proj", number="dropout", device="device", dtype="dtype",
)  # fmt: skip
FUNCTIONS: dict[str, Call] = {
    "scaled_dot_product_attention": Call(scaledot.scaled_dot_product_attention, _sdpa, _SDPA),
    "explain": Call(scaledot.explain, _sdpa, _SDPA),
    "varlen_attention": Call(scaledot.varlen_attention, _varlen, _VARLEN),
    "explain_varlen": Call(scaledot.explain_varlen, _varlen, _VARLEN),
    "merge_states": Call(scaledot.merge_states, _states, kinds(tensor="out_a lse_a out_b lse_b")),
    "merge_sinks": Call(
        scaledot.merge_sinks,
        lambda: dict(out=torch.ones(2, 3), lse=torch.ones(2), sinks=torch.ones(2)),
        kinds(tensor="out lse sinks", optional_tensor="weights"),
    ),
    "MultiHeadAttention": Call(
        scaledot.MultiHeadAttention,
        lambda: dict(embed_dim=8, num_heads=4, num_kv_heads=2, qk_dim=16, v_dim=8, kdim=5, dropout=0.5),
        _MODULE_SIZES,
    ),
    "MultiHeadAttention.forward": Call(
        _calls(scaledot.MultiHeadAttention(8, 2)),
        lambda: dict(query=torch.ones(2, 5, 8), window=(1, 2)),
        kinds(
            tensor="query",
            optional_tensor="key value attn_mask key_mask relative_bias",
            block_mask="block_mask",
            function="score_mod",
            flag="is_causal need_weights",
            window="window",
        ),
    ),
    "causal_mask": Call(
        scaledot.masks.causal_mask,
        lambda: dict(query_length=2, key_length=3),
        kinds(integer="query_length", optional_integer="key_length", text="causal_alignment", device="device"),
    ),
    "sliding_window_mask": Call(
        scaledot.masks.sliding_window_mask,
        lambda: dict(query_length=2, key_length=3, window=(1, 0)),
        kinds(
            integer="query_length",
            optional_integer="key_length",
            text="causal_alignment",
            device="device",
            window="window",
        ),
    ),
    "padding_mask": Call(
        scaledot.masks.padding_mask,
        lambda: dict(lengths=[1, 2], key_length=3),
        kinds(lengths="lengths", optional_integer="key_length", text="padding_side", device="device"),
    ),
}

_QKV = torch.ones(2, 5, 4, 8)
_ENDS = torch.tensor([0, 2, 5])
_FLASH = dict(
    number="dropout_p softcap", optional_number="softmax_scale", window_size="window_size",
    optional_tensor="alibi_slopes", flag="causal deterministic return_attn_probs",
)  # fmt: skip
_FLASH_VALUES = dict(dropout_p=0.5, softmax_scale=0.5, window_size=(1, 2), softcap=2.0)


def _flash(function: Any, tensors: dict[str, Any], lengths: str = "", **more: str) -> Call:
    """`lengths`: the endings of its cu_seqlens and max_seqlen."""
    ends = {f"cu_seqlens{end}": _ENDS for end in lengths.split(",")} if lengths else {}
    longest = {f"max_seqlen{end}": 3 for end in lengths.split(",")} if lengths else {}
    names = kinds(**_FLASH | more) | kinds(tensor=" ".join([*tensors, *ends]), integer=" ".join(longest))
    return Call(function, lambda: {**tensors, **ends, **longest, **_FLASH_VALUES}, names)


def _cache() -> Arguments:
    tensors = dict(q=_QKV, k_cache=torch.ones(2, 9, 4, 8), v_cache=torch.ones(2, 9, 4, 8), k=_QKV, v=_QKV)
    values = dict(softmax_scale=0.5, window_size=(1, 2), softcap=2.0, num_splits=1)
    return tensors | values | dict(rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4), cache_seqlens=3)


FUNCTIONS |= {
    "flash_attn_func": _flash(flash_attn.flash_attn_func, dict(q=_QKV, k=_QKV, v=_QKV)),
    "flash_attn_kvpacked_func": _flash(
        flash_attn.flash_attn_kvpacked_func, dict(q=_QKV, kv=torch.stack([_QKV, _QKV], 2))
    ),
    "flash_attn_qkvpacked_func": _flash(flash_attn.flash_attn_qkvpacked_func, dict(qkv=torch.ones(2, 5, 3, 4, 8))),
    "flash_attn_varlen_func": _flash(
        flash_attn.flash_attn_varlen_func,
        dict(q=_QKV[0], k=_QKV[0], v=_QKV[0]),
        "_q,_k",
        optional_tensor="alibi_slopes block_table",
    ),
    "flash_attn_varlen_kvpacked_func": _flash(
        flash_attn.flash_attn_varlen_kvpacked_func, dict(q=_QKV[0], kv=torch.ones(5, 2, 4, 8)), "_q,_k"
    ),
    "flash_attn_varlen_qkvpacked_func": _flash(
        flash_attn.flash_attn_varlen_qkvpacked_func, dict(qkv=torch.ones(5, 3, 4, 8)), ","
    ),
    "flash_attn_with_kvcache": Call(
        flash_attn.flash_attn_with_kvcache,
        _cache,
        kinds(
            tensor="q k_cache v_cache k v rotary_cos rotary_sin", number="softcap", optional_number="softmax_scale",
            optional_tensor="cache_batch_idx cache_leftpad block_table alibi_slopes", window_size="window_size",
            count="cache_seqlens",
            integer="num_splits", flag="causal rotary_interleaved return_softmax_lse",
        ),
    ),
    "index_first_axis": Call(
        bert_padding.index_first_axis,
        lambda: dict(input=_QKV, indices=torch.tensor([1])),
        kinds(tensor="input indices"),
    ),
    "index_put_first_axis": Call(
        bert_padding.index_put_first_axis,
        lambda: dict(values=_QKV, indices=torch.tensor([1, 3]), first_axis_dim=4),
        kinds(tensor="values indices", integer="first_axis_dim"),
    ),
    "unpad_input": Call(
        bert_padding.unpad_input,
        lambda: dict(hidden_states=_QKV, attention_mask=torch.ones(2, 5)),
        kinds(tensor="hidden_states attention_mask", optional_tensor="unused_mask"),
    ),
    "unpad_input_for_concatenated_sequences": Call(
        bert_padding.unpad_input_for_concatenated_sequences,
        lambda: dict(hidden_states=_QKV, attention_mask_in_length=torch.ones(2, 5).long()),
        kinds(tensor="hidden_states attention_mask_in_length"),
    ),
    "pad_input": Call(
        bert_padding.pad_input,
        lambda: dict(hidden_states=torch.ones(2, 3), indices=torch.tensor([1, 3]), batch=2, seqlen=3),
        kinds(tensor="hidden_states indices", integer="batch seqlen"),
    ),
}  # fmt: skip

_X = torch.ones(2, 5, 8)
_MASK = torch.ones(5, 5)
FUNCTIONS |= {
    "config_mha.forward": Call(
        _calls(config_mha.MultiHeadAttention(dict(d_model=8, num_heads=2))),
        lambda: dict(querys=_X, keys=_X, values=_X),
        kinds(tensor="querys keys values", optional_tensor="attn_mask"),
    ),
    "SelfAttention": Call(
        self_attention.SelfAttention, lambda: dict(d_model=8, d_k=4, d_v=4), kinds(integer="d_model d_k d_v")
    ),
    "SelfAttention.forward": Call(
        _calls(self_attention.SelfAttention(8, 4, 4)), lambda: dict(x=_X), kinds(tensor="x")
    ),
    "SelfAttentionV2": Call(
        self_attention.SelfAttentionV2,
        lambda: dict(d_model=8, d_k=4, d_v=4, dropout_rate=0.5),
        kinds(integer="d_model d_k d_v", number="dropout_rate"),
    ),
    "SelfAttentionV2.forward": Call(
        _calls(self_attention.SelfAttentionV2(8, 4, 4)),
        lambda: dict(x=_X),
        kinds(tensor="x", optional_tensor="attention_mask"),
    ),
    "self_attention.MultiHeadAttention": Call(
        self_attention.MultiHeadAttention,
        lambda: dict(d_model=8, head_num=4, dropout_rate=0.5),
        kinds(integer="d_model head_num", number="dropout_rate"),
    ),
    "self_attention.MultiHeadAttention.forward": Call(
        _calls(self_attention.MultiHeadAttention(8, 4)),
        lambda: dict(query=_X),
        kinds(tensor="query", optional_tensor="key value attention_mask"),
    ),
    "SplitHeadAttention": Call(
        split_heads.SplitHeadAttention,
        lambda: dict(input_dim=8, output_dim=8, num_heads=2),
        kinds(integer="input_dim output_dim num_heads"),
    ),
    "SplitHeadAttention.forward": Call(
        _calls(split_heads.SplitHeadAttention(8, 8, 2)), lambda: dict(X=_X), kinds(tensor="X")
    ),
    "MultiheadAttention": Call(
        torch_nn.MultiheadAttention,
        lambda: dict(embed_dim=8, num_heads=2, kdim=5, dropout=0.5),
        kinds(
            integer="embed_dim num_heads", optional_integer="kdim vdim", number="dropout",
            any="bias add_bias_kv add_zero_attn batch_first device dtype",
        ),
    ),
    "MultiheadAttention.forward": Call(
        _calls(torch_nn.MultiheadAttention(8, 2)),
        lambda: dict(query=_X, key=_X, value=_X),
        kinds(
            tensor="query key value", optional_tensor="key_padding_mask attn_mask",
            any="need_weights average_attn_weights is_causal",
        ),
    ),
    "convert": Call(
        torch_nn.convert, lambda: dict(model=nn.MultiheadAttention(8, 2)), kinds(module="model")
    ),
    "compute_attention_scores": Call(
        steps.compute_attention_scores, lambda: dict(Q=_X, K=_X), kinds(tensor="Q K")
    ),
    "scale_attention_scores": Call(
        steps.scale_attention_scores, lambda: dict(scores=_MASK, d_k=4), kinds(tensor="scores", number="d_k")
    ),
    "apply_mask": Call(
        steps.apply_mask, lambda: dict(scores=_MASK), kinds(tensor="scores", optional_tensor="mask")
    ),
    "compute_attention_weights": Call(
        steps.compute_attention_weights, lambda: dict(scores=_MASK), kinds(tensor="scores")
    ),
    "stable_softmax": Call(steps.stable_softmax, lambda: dict(scores=_MASK), kinds(tensor="scores")),
    "apply_attention_weights": Call(
        steps.apply_attention_weights, lambda: dict(attention_weights=_MASK, V=_X), kinds(tensor="attention_weights V")
    ),
    "steps.scaled_dot_product_attention": Call(
        steps.scaled_dot_product_attention,
        lambda: dict(query=_X, key=_X, value=_X),
        kinds(tensor="query key value", optional_tensor="mask"),
    ),
    "optimized_scaled_dot_product_attention": Call(
        steps.optimized_scaled_dot_product_attention,
        lambda: dict(Q=_X, K=_X, V=_X),
        kinds(tensor="Q K V", optional_tensor="mask", function="dropout"),
    ),
    "robust_attention": Call(
        steps.robust_attention,
        lambda: dict(Q=_X, K=_X, V=_X, eps=0.5),
        kinds(tensor="Q K V", optional_tensor="mask", number="eps"),
    ),
    "memory_efficient_attention": Call(
        steps.memory_efficient_attention,
        lambda: dict(Q=_X[None], K=_X[None], V=_X[None], chunk_size=3),
        kinds(tensor="Q K V", integer="chunk_size"),
    ),
    "fused_attention": Call(
        steps.fused_attention, lambda: dict(Q=_X, K=_X, V=_X), kinds(tensor="Q K V", optional_tensor="mask")
    ),
    "create_causal_mask": Call(steps.create_causal_mask, lambda: dict(seq_len=3), kinds(integer="seq_len")),
    "create_padding_mask": Call(
        steps.create_padding_mask,
        lambda: dict(seq_lengths=[1, 2], max_len=3),
        kinds(each="seq_lengths", integer="max_len"),
    ),
}  # fmt: skip
