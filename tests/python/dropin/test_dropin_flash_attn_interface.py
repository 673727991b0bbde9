"""The signatures, errors and strides of scaledot.dropin.flash_attn."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scaledot.dropin.flash_attn import (
    bert_padding,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from scaledot.dropin.flash_attn._interface import _flash_attn_forward, _flash_attn_varlen_forward

X = torch.zeros(2, 5, 4, 8)
ENDS = torch.tensor([0, 10], dtype=torch.int32)
BAD: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "dims": (ValueError, r"q: got shape \(5, 4, 8\); needs \(B, L, H, D\)", lambda: flash_attn_func(X[0], X, X)),
    "dtype": (TypeError, "k: got torch.float16; needs torch.float32, as q", lambda: flash_attn_func(X, X.half(), X)),
    "list": (TypeError, "v: got a list; needs a torch.Tensor", lambda: flash_attn_func(X, X, [1.0])),
    "heads": (
        ValueError,
        "k: got 3 heads; needs a divisor of q's 4",
        lambda: flash_attn_func(X, X[:, :, :3], X[:, :, :3]),
    ),
    "head dim": (ValueError, "k: got a head dimension of 7; needs 8", lambda: flash_attn_func(X, X[..., :7], X)),
    "value": (ValueError, r"v: got shape \(2, 4, 4, 8\); needs \(2, 5, 4\)", lambda: flash_attn_func(X, X, X[:, :4])),
    "window": (TypeError, "window_size: got 3, an int; needs a pair", lambda: flash_attn_func(X, X, X, window_size=3)),
    "softcap": (TypeError, "softcap: got None; needs a number", lambda: flash_attn_func(X, X, X, softcap=None)),
    "causal": (TypeError, "causal: got 1, an int; needs True or False", lambda: flash_attn_func(X, X, X, causal=1)),
    "qkv": (
        ValueError,
        r"qkv: got shape \(2, 5, 4, 8\); needs \(B, L, 3, H, D\)",
        lambda: flash_attn_qkvpacked_func(X),
    ),
    "dropout": (ValueError, "dropout_p: got", lambda: flash_attn_func(X, X, X, 1.5)),
    "varlen dims": (
        ValueError,
        r"q: got shape \(2, 5, 4, 8\); needs \(total, H, D\)",
        lambda: flash_attn_varlen_func(X, X, X, ENDS, ENDS, 10, 10),
    ),
    "cache rows": (
        ValueError,
        "k_cache: got 1 rows; needs at least 2",
        lambda: flash_attn_with_kvcache(X, X[:1], X[:1]),
    ),
    "no lengths": (ValueError, "cache_seqlens: got None with k", lambda: flash_attn_with_kvcache(X, X, X, X, X)),
    "room": (
        ValueError,
        "cache_seqlens: got lengths from 1 to 1 with 5 new keys; needs room for them in a cache of 5",
        lambda: flash_attn_with_kvcache(X, X.clone(), X.clone(), X, X, cache_seqlens=1),
    ),
    "value missing": (TypeError, "v: got None; needs", lambda: flash_attn_with_kvcache(X, X, X, X, cache_seqlens=0)),
    "tables without k": (
        ValueError,
        "rotary_cos: got tables without k; needs",
        lambda: flash_attn_with_kvcache(X, X, X, rotary_cos=X[0, :, 0], rotary_sin=X[0, :, 0], cache_seqlens=3),
    ),
    "short tables": (
        ValueError,
        r"rotary_cos: got shape \(3, 4\); needs \(rows, R / 2\) with at least 5 rows",
        lambda: flash_attn_with_kvcache(
            X, X.clone(), X.clone(), X, X, torch.ones(3, 4), torch.ones(3, 4), cache_seqlens=0
        ),
    ),
    "int packed": (
        TypeError,
        "qkv: got dtype torch.int32",
        lambda: flash_attn_qkvpacked_func(torch.stack([X] * 3, 2).int()),
    ),
    "KV heads": (
        ValueError, "kv: got 3 heads; needs a divisor", lambda: flash_attn_kvpacked_func(X, torch.zeros(2, 5, 2, 3, 8))
    ),
    "nested": (
        TypeError,
        "k: got a nested tensor; needs a dense one",
        lambda: flash_attn_func(X, torch.nested.nested_tensor([X[0]]), X),
    ),
    "sparse": (TypeError, "q: got a tensor of layout torch.sparse_coo", lambda: flash_attn_func(X.to_sparse(), X, X)),
    "device": (ValueError, "k_cache: got a tensor on meta; needs cpu, as q",
               lambda: flash_attn_with_kvcache(X, X.to("meta"), X)),
    "paged lengths": (
        ValueError,
        r"cu_seqlens_k: got a torch.Tensor of shape \(\); needs \(N \+ 1,\)",
        lambda: flash_attn_varlen_func(
            X[0], X, X, torch.tensor([0, 5]), torch.tensor(5), 5, 5, block_table=torch.tensor([[0]])
        ),
    ),
    "weights too large": (
        ValueError,
        "max_seqlen: got 2147483648; needs lengths for which there is memory",
        lambda: flash_attn_varlen_qkvpacked_func(
            torch.zeros(10, 3, 4, 8), ENDS, 2**31, 0.5, return_attn_probs=True
        ),
    ),
    "negative length": (ValueError, "cache_seqlens: got -1, an int; needs 0 to 5",
                        lambda: flash_attn_with_kvcache(X, X, X, cache_seqlens=-1)),
    "length": (ValueError, "cache_seqlens: got numbers from 2 to 6; needs numbers from 0 to 5",
               lambda: flash_attn_with_kvcache(X, X, X, cache_seqlens=torch.tensor([2, 6]))),
    "padding": (ValueError, "cache_leftpad: got numbers from -1 to 0; needs at least 0",
                lambda: flash_attn_with_kvcache(X, X, X, cache_leftpad=torch.tensor([-1, 0]))),
    "row": (ValueError, "cache_batch_idx: got numbers from 0 to 2; needs numbers from 0 to 1",
            lambda: flash_attn_with_kvcache(X, X, X, cache_batch_idx=torch.tensor([0, 2]))),
    "page": (
        ValueError,
        "block_table: got numbers from 1 to 2; needs numbers from 0 to 1",
        lambda: flash_attn_with_kvcache(
            X, X.clone(), X.clone(), X, X, cache_seqlens=0, block_table=torch.tensor([[1], [2]])
        ),
    ),
    "interleaved": (TypeError, "rotary_interleaved: got None; needs True or False",
                    lambda: flash_attn_with_kvcache(X, X, X, rotary_interleaved=None)),
    "splits": (TypeError, "num_splits: got None; needs", lambda: flash_attn_with_kvcache(X, X, X, num_splits=None)),
    "mask": (
        ValueError,
        r"attention_mask: got shape \(2, 4\); needs \(2, 5\)",
        lambda: bert_padding.unpad_input(X, torch.ones(2, 4)),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_argument(name: str) -> None:
    kind, message, function = BAD[name]
    with pytest.raises(kind, match=message):
        function()


LENGTHS: dict[str, tuple[dict[str, Any], str]] = {
    "short max_seqlen_q": (dict(max_seqlen_q=5), "max_seqlen_q: got 5; needs at least 7, the length of sequence 1"),
    "short max_seqlen_k": (dict(max_seqlen_k=6), "max_seqlen_k: got 6; needs at least 7, the number of keys of"),
    "negative": (dict(max_seqlen_q=-1), "max_seqlen_q: got -1; needs a number of at least 0"),
    "start": (dict(cu_seqlens_q=torch.tensor([1, 3, 10])), "cu_seqlens_q: got 1 as its first number; needs 0"),
    "end": (dict(cu_seqlens_k=torch.tensor([0, 3, 9])), "cu_seqlens_k: got 9 as its last number; needs"),
    "beyond": (dict(cu_seqlens_k=torch.tensor([0, 3, 11])), "cu_seqlens_k: got 11 as its last number; needs"),
    "down": (dict(cu_seqlens_q=torch.tensor([0, 11, 10])), "cu_seqlens_q: got 11 and then 10 at index 2; needs"),
    "sequences": (dict(cu_seqlens_k=torch.tensor([0, 10])), "cu_seqlens_k: got 2 numbers; needs"),
    "dims": (dict(cu_seqlens_q=torch.tensor([[0, 3, 10]])), r"cu_seqlens_q: got shape \(1, 3\); needs"),
    "dtype": (
        dict(cu_seqlens_k=torch.tensor([0.0, 3, 10])),
        "cu_seqlens_k: got dtype torch.float32; needs torch.int32 or torch.int64",
    ),
    "slopes": (dict(alibi_slopes=torch.ones(3, 4)), r"alibi_slopes: got shape \(3, 4\); needs"),
    "scale": (dict(softmax_scale=math.nan), "softmax_scale: got nan; needs a finite number"),
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_are_checked_with_weights_as_without(name: str, dropout_p: float) -> None:
    """With dropout, the weights take one call for each sequence."""
    changes, message = LENGTHS[name]
    x, ends = torch.zeros(10, 4, 8), torch.tensor([0, 3, 10])
    arguments = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=7, max_seqlen_k=7, dropout_p=dropout_p)
    flash_attn_varlen_func(x, x, x, **arguments, return_attn_probs=True)
    with pytest.raises((TypeError, ValueError), match=message):
        flash_attn_varlen_func(x, x, x, **arguments | changes, return_attn_probs=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_errors_of_the_packed_form_name_its_own_arguments(dropout_p: float) -> None:
    qkv, arguments = torch.zeros(10, 3, 4, 8), dict(dropout_p=dropout_p, return_attn_probs=True)
    with pytest.raises(ValueError, match=r"^max_seqlen: got 6; needs at least 7"):
        flash_attn_varlen_qkvpacked_func(qkv, torch.tensor([0, 3, 10]), 6, **arguments)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got 9 as its last number"):
        flash_attn_varlen_qkvpacked_func(qkv, torch.tensor([0, 3, 9]), 7, **arguments)


# flash-attn 2.8.3's arguments in their order; those without a default come first.
DENSE = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
DENSE += "deterministic=False return_attn_probs=False"
BOTH = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    flash_attn_func: f"q k v {DENSE}",
    flash_attn_kvpacked_func: f"q kv {DENSE}",
    flash_attn_qkvpacked_func: f"qkv {DENSE}",
    flash_attn_varlen_func: f"q k v {BOTH} {DENSE} block_table=None",
    flash_attn_varlen_kvpacked_func: f"q kv {BOTH} {DENSE}",
    flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen {DENSE}",
    flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signature(function: Any) -> None:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = parameter.default
        found.append(parameter.name + ("" if default is parameter.empty else f"={default}".replace(" ", "")))
    assert " ".join(found) == SIGNATURES[function]


@pytest.mark.parametrize("layout", ["B, L, H, D", "B, H, L, D", "L, B, H, D", "a part of qkv"])
def test_strides_are_those_of_empty_like_q(layout: str) -> None:
    q = {
        "B, L, H, D": lambda: torch.randn(2, 5, 4, 8),
        "B, H, L, D": lambda: torch.randn(2, 4, 5, 8).transpose(1, 2),
        "L, B, H, D": lambda: torch.randn(5, 2, 4, 8).transpose(0, 1),
        "a part of qkv": lambda: torch.randn(2, 5, 3, 4, 8)[:, :, 1],
    }[layout]()
    found = flash_attn_func(q, q, q, causal=True)
    assert found.stride() == torch.empty_like(q).stride()
    torch.testing.assert_close(found, flash_attn_func(q.contiguous(), q, q, causal=True), rtol=0, atol=0)
    meta = q.to("meta")
    assert flash_attn_func(meta, meta, meta, causal=True).stride() == found.stride()
    assert _flash_attn_forward(q, q, q, 0.0, None, True, -1, -1, 0.0, None, False)[0].stride() == found.stride()


PACKED_LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "total, H, D": lambda: torch.randn(10, 4, 8),
    "H, total, D": lambda: torch.randn(4, 10, 8).transpose(0, 1),
    "a part of qkv": lambda: torch.randn(10, 3, 4, 8)[:, 1],
}


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_strides_of_packed_and_cached_calls_are_those_of_empty_like_q(layout: str, device: str) -> None:
    q = PACKED_LAYOUTS[layout]().to(device)
    ends = torch.tensor([0, 3, 10], dtype=torch.int32, device=device)
    leaf, plain = q.detach().requires_grad_(), q.detach().contiguous().requires_grad_()
    found, wanted = (flash_attn_varlen_func(x, x, x, ends, ends, 7, 7, causal=True) for x in (leaf, plain))
    by_pass = _flash_attn_varlen_forward(q, q, q, ends, ends, 7, 7, 0.0, None, True)[0]
    query = q.unflatten(0, (2, 5)) if layout != "H, total, D" else torch.randn(2, 4, 5, 8).to(device).transpose(1, 2)
    cached = flash_attn_with_kvcache(query, query, query)
    assert found.stride() == by_pass.stride() == torch.empty_like(q).stride()
    assert cached.stride() == torch.empty_like(query).stride()
    if device == "cpu":
        assert torch.equal(found, wanted)
        gradients = [torch.autograd.grad(x.sin().sum(), y)[0] for x, y in ((found, leaf), (wanted, plain))]
        assert torch.equal(*gradients)
