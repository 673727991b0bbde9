"""The functions of scaledot.dropin.flash_attn, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import strategies_flash_attn as names
from fuzz.api.oracle import (
    SEED,
    Problem,
    Results,
    Values,
    as_dtype,
    attention,
    by_sequence,
    dropout_seed,
    laid_out,
    plain,
    query_of,
    seed,
    seeded,
    sequence,
    split,
    without_gradient,
)
from scaledot._seed import draw_seed


def translated(given: Values) -> Values:
    """The options in scaledot's names."""
    sides = [None if side < 0 else side for side in plain(given.get("window_size", (-1, -1)))]
    cap = plain(given.get("softcap", 0.0))
    return {
        "is_causal": given.get("causal", False),
        "scale": given.get("softmax_scale"),
        "enable_gqa": True,
        "causal_alignment": "lower_right",
        "window": tuple(sides),
        "softcap": cap if cap > 0 else None,
        "alibi_slopes": given.get("alibi_slopes"),
        "dropout_p": given.get("dropout_p", 0.0),
    }


def unpacked(x: Values) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v."""
    if "qkv" in x:
        return x["qkv"].unbind(-3)
    return (x["q"], *x["kv"].unbind(-3)) if "kv" in x else (x["q"], x["k"], x["v"])


def without_empty_weights(function: Callable[..., Any], given: Values) -> Callable[..., Any]:
    """The function without a third result that is empty, as it has to be where nothing is dropped."""

    def call(**x: Any) -> Any:
        results = function(**x)
        if not given.get("return_attn_probs") or plain(given.get("dropout_p", 0.0)):
            return results
        *others, weights = results
        assert weights.shape == (0,)
        assert weights.dtype == query_of(x).dtype
        return tuple(others)

    return call


def asked_for(given: Values, output: Tensor, lse: Tensor, weights: Callable[[], Tensor]) -> Results:
    if not given.get("return_attn_probs"):
        return (output,)
    results = (output, as_dtype(lse, output.dtype))
    return (*results, weights()) if plain(given.get("dropout_p", 0.0)) else results


def dense(function: Callable[..., Any], values: Values) -> Problem:
    leaves, given = split(values, "q k v kv qkv")
    drawn = dropout_seed()

    def theirs(**x: Tensor) -> Results:
        parts = unpacked({name: laid_out(t, leaves[name]) for name, t in x.items()})
        output, lse, weights = attention(drawn, *(part.transpose(1, 2) for part in parts), **translated(given))
        return asked_for(given, output.transpose(1, 2), lse, lambda: weights)

    return Problem(seeded(without_empty_weights(function, given), given, leaves), theirs, leaves)


def varlen(function: Callable[..., Any], values: Values) -> Problem:
    leaves, given = split(values, "q k v kv qkv")
    ends, ends_k = (given.get(name, given.get("cu_seqlens")) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    most, most_k = (int(given.get(name, given.get("max_seqlen", 0))) for name in ("max_seqlen_q", "max_seqlen_k"))
    paged = given.get("block_table") is not None
    packed = translated(given) | {"cu_seq_q": ends, "cu_seq_k": ends_k}
    if paged:
        packed |= {"block_table": given["block_table"], "seqused_k": ends_k.diff(), "cu_seq_k": None}
    one_by_one = given.get("return_attn_probs") and plain(given.get("dropout_p", 0.0))  # each call draws a seed

    def theirs(**x: Tensor) -> Results:
        parts = unpacked({name: laid_out(t, leaves[name]) for name, t in x.items()})
        tensors = dict(zip(("query", "key", "value"), parts, strict=True))
        seed(SEED)
        if not one_by_one:
            return asked_for(given, *by_sequence(packed | tensors, draw_seed()), lambda: torch.empty(0))
        results = [sequence(b, packed | tensors, draw_seed()) for b in range(ends.numel() - 1)]
        weights = [pad(w, (0, most_k - w.size(-1), 0, most - w.size(-2))) for _, _, w in results]
        output, lse = torch.cat([r[0].transpose(0, 1) for r in results]), torch.cat([r[1] for r in results], -1)
        return asked_for(given, output, lse, lambda: torch.stack(weights))

    problem = Problem(seeded(without_empty_weights(function, given), given, leaves), theirs, leaves)
    return without_gradient(problem) if paged else problem


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (L, H, D) with each pair (a, b) of its first dimensions turned by the angle of its row of the tables."""
    half = cos.size(-1)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b, c, s = x[..., first], x[..., second], cos[:, None], sin[:, None]
    result = x.clone()
    result[..., first], result[..., second] = a * c - b * s, a * s + b * c
    return result


def kvcache(function: Callable[..., Any], values: Values) -> Problem:
    """Its results are also the cache, to which new keys are appended."""
    leaves, given = split(values, "q k_cache v_cache k v rotary_cos rotary_sin")
    options = translated(given)
    table, lse_too = given.get("block_table"), given.get("return_softmax_lse")

    def ours(**x: Tensor) -> Results:
        x = {name: laid_out(t.clone(), leaves[name]) for name, t in x.items()}
        found = function(**given, **x)
        results = found if lse_too else (found,)
        return tuple(as_dtype(r, x["q"].dtype) for r in (*results, x["k_cache"], x["v_cache"]))

    def places(b: int, x: Values) -> tuple[Tensor, Tensor]:
        """Where the cache has the positions of sequence b: (pages or rows, places in them)."""
        size = x["k_cache"].size(1)
        if table is not None:
            return table[b].long().repeat_interleave(size), torch.arange(size).repeat(table.size(1))
        rows = given.get("cache_batch_idx")
        return torch.full((size,), b if rows is None else int(rows[b])), torch.arange(size)

    def theirs(**x: Tensor) -> Results:
        caches = x["k_cache"].detach().clone(), x["v_cache"].detach().clone()
        outputs, lses = [], []
        for b, query in enumerate(x["q"].detach()):
            page, place = places(b, x)
            lengths = given.get("cache_seqlens")
            used = len(place) if lengths is None else int(lengths[b] if isinstance(lengths, Tensor) else lengths)
            if "k" in x:
                news = [x["k"][b].detach(), x["v"][b].detach()]
                positions = used + torch.arange(len(news[0]))
                if "rotary_cos" in x:
                    turn = given.get("rotary_interleaved", True)
                    local = any(side is not None and side < len(place) for side in options["window"])
                    rows = used + torch.arange(len(query)) * int(options["is_causal"] or local)
                    tables = [x[name].detach() for name in ("rotary_cos", "rotary_sin")]
                    query = rotated(query, *(t[rows] for t in tables), turn)
                    news[0] = rotated(news[0], *(t[positions] for t in tables), turn)
                for cache, new in zip(caches, news, strict=True):
                    cache[page[positions], place[positions]] = new
                used += len(positions)
            left = given.get("cache_leftpad")
            seen = slice(0 if left is None else int(left[b]), used)
            slopes = options["alibi_slopes"]
            mine = options | ({"alibi_slopes": slopes[b]} if slopes is not None and slopes.dim() == 2 else {})
            keys = [cache[page[seen], place[seen]].transpose(0, 1) for cache in caches]
            output, lse, _ = attention(None, query.transpose(0, 1), *keys, **mine)
            outputs.append(output.transpose(0, 1))
            lses.append(as_dtype(lse, output.dtype))
        empty = x["q"].new_empty(0, *x["q"].shape[1:-1])
        output = torch.stack(outputs) if outputs else empty[..., None].expand(*empty.shape, caches[1].size(-1))
        lse = torch.stack(lses) if lses else empty.transpose(1, 2)
        return (output, lse, *caches) if lse_too else (output, *caches)

    return without_gradient(Problem(ours, theirs, leaves))


ORACLES = {
    **dict.fromkeys([names.DENSE, names.DENSE_KV, names.DENSE_QKV], dense),
    **dict.fromkeys([names.VARLEN, names.VARLEN_KV, names.VARLEN_QKV], varlen),
    names.KVCACHE: kvcache,
}
