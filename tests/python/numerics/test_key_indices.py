"""key_indices: each row attends to its own list of keys, against the formula on gathered keys in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot

LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def lists(
    heads: int, rows: int, entries: int, keys: int, *, batch: int = 2, seed: int = 0, none: float = 0.2
) -> Tensor:
    """Random lists, of which a share of entries is -1; keys occur several times."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(0, max(keys, 1), (batch, heads, rows, entries), generator=generator)
    return found.masked_fill(torch.rand(found.shape, generator=generator) < 0.2, -1)


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_indices: Tensor,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    lower_right: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, weights, lse). `keep`: what dropout multiplies the weights by."""
    batch, heads, rows, _ = query.shape
    key, value = (t.repeat_interleave(heads // t.size(1), 1) for t in (key, value))
    listed = key_indices.expand(batch, -1, rows, -1)
    listed = listed.repeat_interleave(heads // listed.size(1), 1)
    live = listed >= 0
    distance = listed - torch.arange(rows)[:, None] - (key.size(2) - rows if lower_right else 0)
    if is_causal:
        live = live & (distance <= 0)
    if window[0] is not None:
        live = live & (distance >= -window[0])
    if window[1] is not None:
        live = live & (distance <= window[1])
    at = listed.clamp(min=0).flatten(2)[..., None]
    keys = key.gather(2, at.expand(-1, -1, -1, key.size(-1))).unflatten(2, listed.shape[2:])
    values = value.gather(2, at.expand(-1, -1, -1, value.size(-1))).unflatten(2, listed.shape[2:])
    scores = (query[..., None, :] * keys).sum(-1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~live, -math.inf)
    lse = scores.logsumexp(-1)
    empty = ~live.any(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(~live, 0.0)
    if keep is not None:
        weights = weights * keep
    return (weights[..., None] * values).sum(-2), weights, lse


def inputs(
    dtype: torch.dtype,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    rows: int = 37,
    keys: int = 53,
    head_dim: int = 16,
    value_dim: int | None = None,
    batch: int = 2,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, rows, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim or head_dim)]
    return [torch.randn(batch, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def compared(tensors: list[Tensor], key_indices: Tensor, exact_options: dict[str, Any], **options: Any) -> None:
    """Results and gradients by output, weights and lse."""
    dtype = tensors[0].dtype
    exact = [t.detach().double().requires_grad_() for t in tensors]
    ours = scaledot.scaled_dot_product_attention(
        *tensors, key_indices=key_indices, return_weights=True, return_lse=True, **options
    )
    theirs = formula(*exact, key_indices.long(), **exact_options)
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        assert ours_one.shape == theirs_one.shape
        same = (ours_one.double() == theirs_one) | ((ours_one.double() - theirs_one).abs() < LIMITS[dtype])
        assert bool(same.all())
    generator = torch.Generator().manual_seed(2)
    loss, exact_loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        grad = torch.randn(ours_one.shape, generator=generator).to(ours_one.dtype)
        live = theirs_one > -math.inf
        loss = loss + (ours_one.double() * grad.double())[live].sum()
        exact_loss = exact_loss + (theirs_one * grad.double())[live].sum()
    gradients = torch.autograd.grad(loss, tensors)
    wanted = torch.autograd.grad(exact_loss, exact)
    for gradient, exact_gradient in zip(gradients, wanted, strict=True):
        assert gradient.dtype == dtype
        limit = 4 * LIMITS[dtype] * max(1.0, float(exact_gradient.abs().max()))
        assert float((gradient.double() - exact_gradient).abs().max()) < limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_scores_of_a_row_stay_out_of_the_next(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """Long keys are visited in several blocks. A row's last block must not write to the next row's first."""
    tensors = inputs(dtype, heads=heads, kv_heads=kv_heads, rows=9, keys=700, head_dim=192, value_dim=128, batch=1)
    key_indices = torch.rand(1, 1, 9, 700).topk(64).indices
    compared(tensors, key_indices, {}, enable_gqa=True)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("list_heads", [1, 2, 4])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_results_and_gradients(dtype: torch.dtype, list_heads: int, index_dtype: torch.dtype) -> None:
    compared(inputs(dtype, kv_heads=2), lists(list_heads, 37, 21, 53).to(index_dtype), {}, enable_gqa=True)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "window": ({"window": (7, 3)}, {"window": (7, 3)}),
    "lower right": (
        {"is_causal": True, "causal_alignment": "lower_right", "window": (9, None)},
        {"is_causal": True, "lower_right": True, "window": (9, None)},
    ),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "softcap, causal": ({"softcap": 1.5, "is_causal": True}, {"softcap": 1.5, "is_causal": True}),
    "negative scale": ({"scale": -0.3}, {"scale": -0.3}),
    "scale 0": ({"scale": 0.0}, {"scale": 0.0}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_options(name: str, dtype: torch.dtype, kv_heads: int) -> None:
    options, exact = OPTIONS[name]
    compared(inputs(dtype, kv_heads=kv_heads), lists(1, 37, 21, 53), exact, enable_gqa=True, **options)


# Widths that are no whole vectors, one row, one entry, more entries than keys, many heads of one KV head (MLA).
@pytest.mark.parametrize(
    ("sizes", "entries"),
    [
        ({"head_dim": 5, "value_dim": 3}, 9),
        ({"head_dim": 1}, 4),
        ({"head_dim": 72, "value_dim": 100}, 130),
        ({"rows": 1}, 7),
        ({"keys": 3}, 40),
        ({"keys": 1}, 1),
        ({"heads": 35, "kv_heads": 1, "rows": 3, "head_dim": 40, "value_dim": 24}, 70),
        ({"heads": 70, "kv_heads": 2, "rows": 2}, 33),
        ({"keys": 1000, "rows": 200}, 65),
    ],
)
@pytest.mark.parametrize("dtype", LIMITS)
def test_shapes(sizes: dict[str, int], entries: int, dtype: torch.dtype) -> None:
    tensors = inputs(dtype, **sizes)
    rows, keys = tensors[0].size(2), tensors[1].size(2)
    compared(tensors, lists(1, rows, entries, keys), {}, enable_gqa=True)


def test_layouts() -> None:
    """Transposed inputs and indices, a last stride that is not 1, and lists that broadcast over batch and rows."""
    tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs(torch.float32)]
    indices = lists(4, 37, 21, 53).transpose(-1, -2).contiguous().transpose(-1, -2)
    compared(tensors, indices, {})
    compared(tensors, lists(4, 1, 21, 53, batch=1), {})
    columns = [t.detach().mT.contiguous().mT.requires_grad_() for t in inputs(torch.float32)]
    compared(columns, indices, {})


def test_two_and_three_dimensions() -> None:
    query, key, value = (t.detach() for t in inputs(torch.float32))
    indices = lists(4, 37, 21, 53)
    wanted = scaledot.scaled_dot_product_attention(query, key, value, key_indices=indices)
    for b in range(2):
        one = scaledot.scaled_dot_product_attention(query[b], key[b], value[b], key_indices=indices[b])
        assert torch.equal(one, wanted[b])
    one = scaledot.scaled_dot_product_attention(query[0, 0], key[0, 0], value[0, 0], key_indices=indices[0, 0])
    assert torch.equal(one, wanted[0, 0])


def test_a_list_of_all_keys_is_dense_attention() -> None:
    tensors = inputs(torch.float32)
    indices = torch.arange(53).expand(37, 53)
    for options in ({}, {"is_causal": True}, {"window": (5, 5)}):
        output = scaledot.scaled_dot_product_attention(*tensors, key_indices=indices, **options)
        dense = scaledot.scaled_dot_product_attention(*tensors, **options)
        torch.testing.assert_close(output, dense)


def test_a_key_that_is_listed_twice_counts_twice() -> None:
    query, key, value = inputs(torch.float64, rows=1, keys=2)
    output = scaledot.scaled_dot_product_attention(query, key, value, key_indices=torch.tensor([[0, 1, 1]]))
    scores = (query @ key.mT / 4).exp() * torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(output, scores / scores.sum(-1, keepdim=True) @ value)


def test_empty_lists() -> None:
    """No entry, no entry that is a key, no row and no key: zeros, lse of -inf, and gradients of 0."""
    for entries in (0, 5):
        tensors = inputs(torch.float32)
        indices = torch.full((2, 1, 37, entries), -1)
        output, weights, lse = scaledot.scaled_dot_product_attention(
            *tensors, key_indices=indices, return_weights=True, return_lse=True
        )
        assert weights.shape == (2, 4, 37, entries)
        assert not output.any()
        assert not weights.any()
        assert bool((lse == -math.inf).all())
        assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), tensors))
    query, key, value = inputs(torch.float32, keys=0)
    indices = torch.full((37, 4), -1)
    output = scaledot.scaled_dot_product_attention(query, key, value, key_indices=indices)
    assert not output.any()
    query, key, value = inputs(torch.float32, rows=0)
    output = scaledot.scaled_dot_product_attention(query, key, value, key_indices=torch.zeros(0, 4, dtype=torch.int64))
    assert output.shape == query.shape
    mixed = lists(1, 37, 9, 53)
    mixed[0, 0, 5] = -1
    compared(inputs(torch.float32), mixed, {})


def test_keys_that_no_list_has_are_not_read() -> None:
    """NaN and inf in them reach nothing, and their gradients are 0."""
    query, key, value = (t.detach() for t in inputs(torch.float32))
    indices = lists(1, 37, 9, 53) // 2 * 2  # even keys; -1 becomes -2
    key[:, :, 1::2], value[:, :, 1::2] = math.nan, math.inf
    key.requires_grad_()
    value.requires_grad_()
    output = scaledot.scaled_dot_product_attention(query, key, value, key_indices=indices)
    assert bool(output.isfinite().all())
    for gradient in torch.autograd.grad(output.sum(), (key, value)):
        assert not gradient[:, :, 1::2].any()
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_dropout(dtype: torch.dtype, kv_heads: int) -> None:
    """The weights of the call say what was dropped; by columns of the list, whatever is masked."""
    tensors, indices = inputs(dtype, kv_heads=kv_heads), lists(1, 37, 70, 53)
    shared = {"key_indices": indices, "enable_gqa": True}
    with torch.no_grad():
        torch.manual_seed(3)
        _, dropped = scaledot.scaled_dot_product_attention(*tensors, **shared, dropout_p=0.3, return_weights=True)
        _, plain = scaledot.scaled_dot_product_attention(*tensors, **shared, return_weights=True)
    live = plain > 0
    share = float((dropped[live] == 0).float().mean())
    assert 0.27 < share < 0.33
    keep = (dropped > 0).double() / 0.7
    torch.manual_seed(3)
    compared(tensors, indices, {"keep": keep}, dropout_p=0.3, enable_gqa=True)
    torch.manual_seed(3)
    compared(tensors, indices, {"keep": keep, "is_causal": True}, dropout_p=0.3, is_causal=True, enable_gqa=True)


def test_the_mean_of_the_weights() -> None:
    tensors, indices = [t.detach() for t in inputs(torch.float32)], lists(4, 37, 21, 53)
    op = torch.ops.scaledot.sdpa
    by_head = op(*tensors, key_indices=indices, return_weights=True)[2]
    mean = op(*tensors, key_indices=indices, return_weights=True, average_weights=True)[2]
    torch.testing.assert_close(mean, by_head.mean(1))


def test_a_value_that_is_a_view_of_key() -> None:
    """Multi-head latent attention: value is the first columns of key, and the gradients add up."""
    query, key, _ = inputs(torch.float64, heads=20, kv_heads=1, head_dim=24)
    indices = lists(1, 37, 30, 53)
    output = scaledot.scaled_dot_product_attention(query, key, key[..., :16], key_indices=indices, enable_gqa=True)
    exact = [t.detach().requires_grad_() for t in (query, key)]
    wanted, _, _ = formula(*exact, exact[1][..., :16], indices)
    grad = torch.randn(output.shape, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(output, (query, key), grad), torch.autograd.grad(wanted, exact, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time_and_for_any_row(dtype: torch.dtype) -> None:
    """Threads do not matter, nor do the other rows of the call, nor in float32 which heads share a list.

    In bfloat16 the tile unit takes lists that four or more heads share, and its sums have an order of their own.
    """
    tensors, indices = inputs(dtype, heads=8, kv_heads=2, keys=300), lists(1, 37, 90, 300)

    def call() -> list[Tensor]:
        output = scaledot.scaled_dot_product_attention(*tensors, key_indices=indices, enable_gqa=True)
        return [output, *torch.autograd.grad(output.square().sum(), tensors)]

    threads = torch.get_num_threads()
    wanted = call()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(map(torch.equal, call(), wanted))
    finally:
        torch.set_num_threads(threads)
    query, key, value = tensors
    some = scaledot.scaled_dot_product_attention(
        query[:, :, 5:9], key, value, key_indices=indices[:, :, 5:9], enable_gqa=True
    )
    assert torch.equal(some, wanted[0][:, :, 5:9])
    if dtype == torch.float32:
        one_list_a_head = indices.expand(2, 8, 37, 90)
        expanded = scaledot.scaled_dot_product_attention(*tensors, key_indices=one_list_a_head, enable_gqa=True)
        assert torch.equal(expanded, wanted[0])


def test_explain() -> None:
    query, key, value = inputs(torch.float32)
    indices = lists(1, 37, 21, 53)
    found = scaledot.explain(query, key, value, key_indices=indices)
    assert found.forward.kernel.endswith("_key_lists")
    assert found.backward.kernel.endswith("_key_lists")
    for refusal in found.forward.refused:
        takes_lists = refusal.kernel.endswith("_key_lists")
        assert takes_lists or refusal.reason == "there are key_indices" or "is below" in refusal.reason
    assert not scaledot.explain(query, key, value).forward.kernel.endswith("_key_lists")


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a float": (
        {"key_indices": torch.zeros(37, 4)},
        TypeError,
        "key_indices: got dtype torch.float32; needs torch.int32 or torch.int64",
    ),
    "too high": ({"key_indices": torch.full((37, 4), 53)}, ValueError, "key_indices: got the key 53; needs numbers"),
    "rows": ({"key_indices": torch.zeros(36, 4, dtype=torch.int64)}, ValueError, "key_indices: got shape"),
    "heads": ({"key_indices": torch.zeros(3, 37, 4, dtype=torch.int64)}, ValueError, "key_indices: got shape"),
    "one dimension": ({"key_indices": torch.zeros(4, dtype=torch.int64)}, ValueError, "key_indices: got shape"),
    "attn_mask": ({"attn_mask": torch.ones(37, 53, dtype=torch.bool)}, ValueError, "attn_mask: got one with"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes: got one with key_indices"),
    "relative_bias": ({"relative_bias": torch.ones(4, 3)}, ValueError, "relative_bias: got one with key_indices"),
    "score_mod": ({"score_mod": lambda s, b, h, q, k: s * 2}, ValueError, "score_mod: got one with key_indices"),
    "block_mask": (
        {"block_mask": scaledot.BlockMask.from_dense(torch.ones(37, 53, dtype=torch.bool))},
        ValueError,
        "block_mask: got one with key_indices",
    ),
    "a list": ({"key_indices": [[1]]}, TypeError, "key_indices"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        scaledot.scaled_dot_product_attention(
            *inputs(torch.float32), **{"key_indices": torch.zeros(37, 4, dtype=torch.int64), **options}
        )


def test_no_second_derivative() -> None:
    tensors = inputs(torch.float64)
    output = scaledot.scaled_dot_product_attention(*tensors, key_indices=lists(1, 37, 4, 53))
    with pytest.raises(NotImplementedError, match="key_indices: got one in a second derivative"):
        torch.autograd.grad(output.sum(), tensors, create_graph=True)


def test_compile_vmap_and_checkpoint() -> None:
    tensors, indices = inputs(torch.float32), lists(1, 37, 21, 53)

    def attend(query: Tensor, key: Tensor, value: Tensor, listed: Tensor) -> Tensor:
        return scaledot.scaled_dot_product_attention(query, key, value, key_indices=listed, is_causal=True)

    wanted = attend(*tensors, indices)
    gradients = torch.autograd.grad(wanted.sum(), tensors)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors, indices)
    assert torch.equal(compiled, wanted)
    assert all(map(torch.equal, torch.autograd.grad(compiled.sum(), tensors), gradients))
    assert torch.equal(torch.vmap(attend)(*tensors, indices), wanted)
    shared = torch.vmap(attend, in_dims=(0, 0, 0, None))(*tensors, indices[0])
    assert torch.equal(shared[0], wanted[0])
    again = torch.utils.checkpoint.checkpoint(attend, *tensors, indices, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again.sum(), tensors), gradients))


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    query, key, value = inputs(torch.float32)
    with FlopCounterMode(display=False) as counter:
        scaledot.scaled_dot_product_attention(query, key, value, key_indices=lists(1, 37, 21, 53))
    assert counter.get_total_flops() == 2 * 2 * 4 * 37 * 21 * (16 + 16)
