"""The two passes of flash_attn.flash_attn_interface, which ring attention and diffusers call.

Signatures and results are those of flash-attn 2.8.3. The backward takes any `out` and `softmax_lse`, such as those of
all keys of a ring where k and v are a part of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from ..._checks import flag, integer, number, require_tensors
from ..._load import OPS
from ..._seed import draw_seed
from ..._torch.inputs import QKV_GRADIENTS, VARLEN_INPUTS, backward_arguments
from .._strides import nested_like_query, strides_like_query
from ._options import check_qkv, renamed

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]


def _arguments(
    q: Tensor, k: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, rng_state: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """The op's arguments that both passes have."""
    left, right = integer("window_size_left", window_size_left), integer("window_size_right", window_size_right)
    softcap, dropout_p = number("softcap", softcap), number("dropout_p", dropout_p)
    return {
        "is_causal": flag("causal", causal),
        "scale": number("softmax_scale", softmax_scale, optional=True),
        "enable_gqa": q.size(-2) != k.size(-2),
        "causal_alignment": "lower_right",
        "window_left": None if left < 0 else left,
        "window_right": None if right < 0 else right,
        "softcap": softcap if softcap > 0 else None,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        "dropout_seed": rng_state if dropout_p > 0 else None,
    }


def _call(op: Any, arguments: dict[str, Any]) -> Any:
    try:
        return op(**arguments)
    except (TypeError, ValueError) as error:
        raise renamed(error) from None


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state), as `flash_attn_func` has the first three."""
    check_qkv("B, L, H, D", q, k, v)
    seed = draw_seed(q)
    shared = _arguments(
        q, k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, seed
    )
    weights_wanted = flag("return_softmax", return_softmax) and shared["dropout_p"] > 0
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    tensors = {"query": query, "key": key, "value": value, "return_weights": weights_wanted}
    tensors["output_strides"] = strides_like_query(query, key, value).get("_output_strides")
    out, lse, weights = _call(OPS.sdpa.default, shared | tensors)
    return out.transpose(1, 2), lse, weights if weights_wanted else q.new_empty(0), seed


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv, (B, L, H, D). Returns softmax_d (B, H, Lq): the sums of dout * out."""
    require_tensors(dout=dout, out=out, softmax_lse=softmax_lse)
    check_qkv("B, L, H, D", q, k, v)
    flag("deterministic", deterministic)
    shared = _arguments(
        q, k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, rng_state
    )
    if shared["dropout_p"] > 0 and rng_state is None:
        raise ValueError("rng_state: got None with dropout_p > 0; needs the fourth result of the forward")
    tensors = {
        "grad_output": dout.transpose(1, 2),
        "query": q.transpose(1, 2),
        "key": k.transpose(1, 2),
        "value": v.transpose(1, 2),
        "output": out.transpose(1, 2),
        "lse": softmax_lse,
        # lse may be that of more keys than these, so that no row's sum can be taken from them alone.
        "part": [k.size(1) - q.size(1), 0, 0, 0, 0, q.size(2)],
        "output_mask": QKV_GRADIENTS,
    }
    gradients = _call(OPS.sdpa_backward.default, backward_arguments(shared | tensors))
    for given, found in zip((dq, dk, dv), gradients, strict=False):
        if given is not None:
            given.copy_(found.transpose(1, 2))
    return _products(dout, out, softmax_lse).transpose(1, 2)


def _products(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The sums of dout * out, in lse's dtype."""
    return (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state), as `flash_attn_varlen_func` has the first three. S_dmask is empty."""
    flag("zero_tensors", zero_tensors)
    if leftpad_k is not None:
        raise ValueError("leftpad_k: got a tensor; needs None, because keys are not padded")
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    packed = dict.fromkeys(VARLEN_INPUTS) | {"query": q, "key": k, "value": v, "cu_seq_q": cu_seqlens_q}
    packed |= {"cu_seq_k": cu_seqlens_k, "seqused_k": seqused_k}
    packed |= {"max_q": integer("max_seqlen_q", max_seqlen_q), "max_k": integer("max_seqlen_k", max_seqlen_k)}
    if block_table is None:
        check_qkv("total, H, D", q, k, v)
    else:
        check_qkv("total, H, D", q, k, v, kv_dims="pages, page_size, H, D")
        used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        packed |= {"block_table": block_table, "seqused_k": used, "cu_seq_k": None}
    seed = draw_seed(q)
    shared = _arguments(
        q, k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, seed
    )
    if flag("return_softmax", return_softmax) and shared["dropout_p"] > 0:
        raise ValueError("return_softmax: got True with dropout_p > 0; needs False, or flash_attn_varlen_func")
    out, lse = _call(OPS.varlen.default, packed | shared)
    return nested_like_query(out, q), lse, q.new_empty(0), seed


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk and dv, (total, H, D). Returns softmax_d (H, total_q): the sums of dout * out.

    It takes one call for each sequence, and on a GPU synchronises to learn the lengths.
    """
    require_tensors(dout=dout, out=out, softmax_lse=softmax_lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_qkv("total, H, D", q, k, v)
    flag("zero_tensors", zero_tensors)
    integer("max_seqlen_q", max_seqlen_q), integer("max_seqlen_k", max_seqlen_k)
    ends = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for b, ((row, row_end), (key, key_end)) in enumerate(ends):
        rows, keys = slice(row, row_end), slice(key, key_end)
        _flash_attn_backward(
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            softmax_lse[None, :, rows],
            None if dq is None else dq[None, rows],
            None if dk is None else dk[None, keys],
            None if dv is None else dv[None, keys],
            dropout_p,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes,
            deterministic,
            None if rng_state is None else rng_state + rng_state.new_tensor([0, b]),
        )
    return _products(dout, out, softmax_lse.t()).t()


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
