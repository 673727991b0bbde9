"""Nested tensors of layout torch.jagged in scaled_dot_product_attention, explain and MultiHeadAttention.

Each sequence has to get what it gets alone, bit for bit.
"""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scaledot
from scaledot import MultiHeadAttention, explain, scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns that nested tensors are a prototype

B, H, D = 4, 4, 8
LENGTHS, KEY_LENGTHS = (5, 1, 7, 3), (2, 6, 0, 9)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(is_causal=True),
    "lower right": dict(is_causal=True, causal_alignment="lower_right"),
    "scale": dict(scale=0.3),
    "window": dict(window=(2, 1)),
    "softcap": dict(softcap=2.0),
    "alibi": dict(alibi_slopes=torch.rand(H)),
    "relative bias": dict(relative_bias=torch.randn(H, 5)),
    "gqa": dict(enable_gqa=True),
}


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def jagged(offsets: Tensor, heads: int = H, width: int = D, **options: Any) -> Any:
    """(B, j, heads, width), float64."""
    values = torch.randn(int(offsets[-1]), heads, width, dtype=torch.float64)
    made: Any = torch.nested.nested_tensor_from_jagged(values, offsets, **options)
    return made.requires_grad_()


def heads_first(*tensors: Any) -> list[Any]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def rows_of(tensor: Any) -> list[Tensor]:
    """The sequences of (B, j, ...), differentiably."""
    values, offsets, lengths = tensor.values(), tensor.offsets(), tensor.lengths()
    lengths = offsets.diff() if lengths is None else lengths
    return [values[start : start + n] for start, n in zip(offsets.tolist(), lengths.tolist(), strict=False)]


def by_sequence(query: Any, key: Any, value: Any, **options: Any) -> list[Tensor]:
    """The output of each sequence alone, (j, H, D)."""
    return [
        scaled_dot_product_attention(*(x.transpose(0, 1) for x in one), **options).transpose(0, 1)
        for one in zip(rows_of(query), rows_of(key), rows_of(value), strict=True)
    ]


def inputs(cross: bool = False, kv_heads: int = H) -> list[Any]:
    torch.manual_seed(0)
    offsets = ends(LENGTHS)
    key_offsets = ends(KEY_LENGTHS) if cross else offsets
    return [jagged(offsets), jagged(key_offsets, kv_heads), jagged(key_offsets, kv_heads)]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_sequence_gets_what_it_gets_alone(name: str, cross: bool) -> None:
    leaves = inputs(cross, 2 if name == "gqa" else H)
    output = scaled_dot_product_attention(*heads_first(*leaves), **OPTIONS[name])
    assert output.shape == leaves[0].transpose(1, 2).shape
    back = output.transpose(1, 2)
    wanted = by_sequence(*leaves, **OPTIONS[name])
    for ours, alone in zip(rows_of(back), wanted, strict=True):
        assert torch.equal(ours, alone)
    grad = torch.randn_like(back.values())
    found = torch.autograd.grad(back.values(), leaves, grad)
    expected = torch.autograd.grad(torch.cat(wanted), leaves, grad)
    for gradient, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.values(), alone.values())


def test_gradient_of_relative_bias() -> None:
    leaves, bias = inputs(), torch.randn(H, 5, dtype=torch.float64, requires_grad=True)
    output = scaled_dot_product_attention(*heads_first(*leaves), relative_bias=bias).transpose(1, 2).values()
    wanted = torch.cat(by_sequence(*leaves, relative_bias=bias))
    grad = torch.randn_like(output)
    found, alone = (torch.autograd.grad(x, bias, grad)[0] for x in (output, wanted))
    torch.testing.assert_close(found, alone)


def test_double_backward() -> None:
    def second(outputs: Callable[[], Tensor], leaves: list[Any]) -> list[Tensor]:
        first = torch.autograd.grad(outputs().square().sum(), leaves, create_graph=True)
        total = sum(gradient.values().pow(3).sum() for gradient in first)
        return [gradient.values() for gradient in torch.autograd.grad(total, leaves)]

    leaves = inputs()
    ours = second(
        lambda: scaled_dot_product_attention(*heads_first(*leaves), is_causal=True).transpose(1, 2).values(), leaves
    )
    alone = second(lambda: torch.cat(by_sequence(*leaves, is_causal=True)), leaves)
    for found, wanted in zip(ours, alone, strict=True):
        torch.testing.assert_close(found, wanted)


def test_dropout_is_that_of_varlen_attention() -> None:
    q, k, v = inputs()
    torch.manual_seed(3)
    ours = scaled_dot_product_attention(*heads_first(q, k, v), dropout_p=0.4)
    torch.manual_seed(3)
    wanted = scaledot.varlen_attention(
        q.values(), k.values(), v.values(), q.offsets(), k.offsets(), 7, 7, dropout_p=0.4
    )
    assert torch.equal(ours.transpose(1, 2).values(), wanted)


def test_lse_and_the_layout_of_results() -> None:
    q, k, v = inputs(cross=True)
    output, lse = scaled_dot_product_attention(*heads_first(q, k, v), return_lse=True)
    assert output.shape == (B, H, q.shape[1], D)
    assert lse.shape == (B, H, q.shape[1])
    for b in range(B):
        one = [rows_of(x)[b].transpose(0, 1) for x in (q, k, v)]
        wanted = scaled_dot_product_attention(*one, return_lse=True)[1]
        assert torch.equal(rows_of(lse.transpose(1, 2))[b].transpose(0, 1), wanted)
    joined = output.transpose(1, 2).flatten(2)  # what the next layer takes
    added = nn.Linear(H * D, 6, dtype=torch.float64)(joined) + torch.nested.nested_tensor_from_jagged(
        torch.zeros(16, 6, dtype=torch.float64), q.offsets()
    )
    assert added.shape == (B, q.shape[1], 6)


def test_without_heads() -> None:
    q = jagged(ends(LENGTHS))
    one = torch.nested.nested_tensor_from_jagged(q.values()[:, 0], q.offsets())
    output, lse = scaled_dot_product_attention(one, one, one, is_causal=True, return_lse=True)
    assert output.shape == one.shape
    assert lse.shape == one.shape[:2]
    for ours, x in zip(rows_of(output), rows_of(one), strict=True):
        assert torch.equal(ours, scaled_dot_product_attention(x, x, x, is_causal=True))


@pytest.mark.parametrize("gaps", ["query", "key", "all"])
def test_gaps_between_sequences(gaps: str) -> None:
    """With `lengths` the values have rows that belong to no sequence."""
    torch.manual_seed(0)
    offsets, lengths = torch.tensor([0, 6, 8, 15, 20]), torch.tensor(LENGTHS)
    sparse = [jagged(offsets, lengths=lengths) for _ in range(3)]
    whole = [jagged(ends(LENGTHS)) for _ in range(3)]
    leaves = {"query": [sparse[0], *whole[1:]], "key": [whole[0], *sparse[1:]], "all": sparse}[gaps]
    output, lse = scaled_dot_product_attention(*heads_first(*leaves), is_causal=True, return_lse=True)
    assert output.shape[2] == leaves[0].shape[1]
    assert lse.shape[2] == leaves[0].shape[1]
    wanted = by_sequence(*leaves, is_causal=True)
    for ours, alone in zip(rows_of(output.transpose(1, 2)), wanted, strict=True):
        assert torch.equal(ours, alone)
    grads = [torch.randn_like(x) for x in wanted]
    found = torch.autograd.grad(rows_of(output.transpose(1, 2)), leaves, grads)
    for gradient, alone in zip(found, torch.autograd.grad(wanted, leaves, grads), strict=True):
        torch.testing.assert_close(gradient.values(), alone.values())


def test_no_sequence() -> None:
    empty = jagged(torch.tensor([0]))
    output = scaled_dot_product_attention(*heads_first(empty, empty, empty))
    assert output.transpose(1, 2).values().shape == (0, H, D)


def test_narrow() -> None:
    torch.manual_seed(0)
    dense = torch.randn(3, 9, H, D)
    part = torch.nested.narrow(dense, 1, torch.tensor([0, 2, 4]), torch.tensor([3, 7, 1]), layout=torch.jagged)
    output = scaled_dot_product_attention(*heads_first(part, part, part))
    for b, (start, length) in enumerate([(0, 3), (2, 7), (4, 1)]):
        x = dense[b, start : start + length].transpose(0, 1)
        wanted = scaled_dot_product_attention(x, x, x).transpose(0, 1)
        assert torch.equal(rows_of(output.transpose(1, 2))[b], wanted)


def test_autocast() -> None:
    leaves = [x.detach().float() for x in inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_dot_product_attention(*heads_first(*leaves)).dtype == torch.bfloat16


def test_explain() -> None:
    choice = explain(*heads_first(*inputs()), is_causal=True)
    assert isinstance(choice, scaledot.VarlenExplanation)
    assert sum(one.sequences for one in choice.forward.kernels) == B
    with pytest.raises(ValueError, match="attn_mask: got a Tensor with nested tensors; needs None"):
        explain(*heads_first(*inputs()), torch.ones(1))


Q, K, V = inputs()
DENSE = torch.randn(B, H, 5, D, dtype=torch.float64)
STRIDED = torch.nested.nested_tensor([torch.randn(H, 3, D), torch.randn(H, 2, D)])
NT = heads_first(Q, K, V)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "attn_mask": (lambda: scaled_dot_product_attention(*NT, torch.ones(1)), ValueError, "attn_mask: got a Tensor with"),
    "weights": (lambda: scaled_dot_product_attention(*NT, return_weights=True), ValueError, "return_weights: got True"),
    "block_mask": (
        lambda: scaled_dot_product_attention(*NT, block_mask=scaledot.BlockMask.from_dense(torch.ones(5, 5).bool())),
        ValueError,
        "block_mask: got a BlockMask with nested tensors; needs None",
    ),
    "masked_score": (
        lambda: scaled_dot_product_attention(*NT, masked_score=-1e9),
        ValueError,
        "masked_score: got a float with nested tensors; needs -inf",
    ),
    "heads last": (
        lambda: scaled_dot_product_attention(Q, K, V),
        ValueError,
        "query: got a jagged tensor of shape",
    ),
    "dense key": (lambda: scaled_dot_product_attention(NT[0], DENSE, NT[2]), TypeError, "key: got a dense tensor"),
    "dense query": (lambda: scaled_dot_product_attention(DENSE, DENSE, NT[2]), TypeError, "value: got a nested tensor"),
    "lengths": (
        lambda: scaled_dot_product_attention(*NT[:2], *heads_first(jagged(ends(KEY_LENGTHS)))),
        ValueError,
        "value: got sequences of other lengths than key's",
    ),
    "batch": (
        lambda: scaled_dot_product_attention(NT[0], *heads_first(*[jagged(ends((3, 2)))] * 2)),
        ValueError,
        "key: got 4 dimensions and a batch of 2; needs query's, 4 and 4",
    ),
    "strided": (
        lambda: scaled_dot_product_attention(STRIDED, STRIDED, STRIDED),
        TypeError,
        "query: got a nested tensor; needs a dense one, or query, key and value all of layout torch.jagged",
    ),
    "device": (
        lambda: scaled_dot_product_attention(NT[0], NT[1].to("meta"), NT[2]),
        ValueError,
        "key: got a tensor on meta; needs cpu, as query",
    ),
    "meta": (
        lambda: scaled_dot_product_attention(*(x.to("meta") for x in NT)),
        ValueError,
        "query: got a jagged tensor on the device meta; needs one whose lengths can be read",
    ),
    "unknown option": (lambda: scaled_dot_product_attention(*NT, colour=1), TypeError, "unexpected keyword argument"),
    "flag": (lambda: scaled_dot_product_attention(*NT, **{"is_causal": 1}), TypeError, "is_causal: got 1, an int"),
    "dropout": (lambda: scaled_dot_product_attention(*NT, dropout_p=2.0), ValueError, "dropout_p: got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    call, kind, text = BAD[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# ------------------------------------------------------------------------------------------------ the module
def test_multi_head_attention() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(24, H, num_kv_heads=2, dtype=torch.float64)
    x, memory = (
        torch.nested.nested_tensor_from_jagged(torch.randn(n, 24, dtype=torch.float64), offsets)
        for n, offsets in ((16, ends(LENGTHS)), (17, ends(KEY_LENGTHS)))
    )
    for key in (None, memory):
        output, weights = attention(x, key, window=(3, 0))
        assert weights is None
        assert output.shape == x.shape
        for b, ours in enumerate(rows_of(output)):
            wanted, _ = attention(rows_of(x)[b], None if key is None else rows_of(key)[b], window=(3, 0))
            torch.testing.assert_close(ours, wanted)
    output.values().sum().backward()
    assert attention.q_proj.weight.grad is not None
    for bad, text in ((dict(need_weights=True), "need_weights: got True"), (dict(key_mask=x), "key_mask: got a mask")):
        with pytest.raises(ValueError, match=text):
            attention(x, **bad)


def test_compile_once_for_all_lengths() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True).transpose(1, 2) * 2

    torch._dynamo.reset()
    try:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for lengths in ((9, 1, 5, 2, 8, 3), (11, 30, 2, 6, 1, 1, 1, 2, 2), (5, 4)):
                offsets = ends(lengths)
                leaves = [jagged(offsets) for _ in range(3)]
                found, expected = compiled(*leaves), function(*leaves)
                assert torch.equal(found.values(), expected.values())
                grad = torch.randn_like(expected.values())
                both = (torch.autograd.grad(out.values(), leaves, grad) for out in (found, expected))
                for ours, wanted in zip(*both, strict=True):
                    assert torch.equal(ours.values(), wanted.values())
    finally:
        torch._dynamo.reset()


def test_compile() -> None:
    """torch 2.13's own function does not compile with jagged tensors on a CPU."""

    def function(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True).transpose(1, 2) * 2

    leaves = inputs()
    torch._dynamo.reset()
    try:
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves)
        expected = function(*leaves)
        assert torch.equal(found.values(), expected.values())
        grad = torch.randn_like(expected.values())
        compiled = torch.autograd.grad(found.values(), leaves, grad)
        for ours, wanted in zip(compiled, torch.autograd.grad(expected.values(), leaves, grad), strict=True):
            assert torch.equal(ours.values(), wanted.values())
    finally:
        torch._dynamo.reset()
