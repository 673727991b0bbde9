"""scaledot.dropin.steps against the reference code in tests/documents."""

from __future__ import annotations

import inspect
import warnings
from functools import partial

import matplotlib
import pytest
import torch
import torch.nn.functional as F
from matplotlib import pyplot
from torch import nn

from agreement import DTYPES, OpCounter, check_agreement, parameter_names
from documents import function as document_function
from documents import steps as document_steps
from scaledot.dropin import steps

ATTENTION = {
    "scaled_dot_product_attention": {},
    "optimized_scaled_dot_product_attention": {},
    "robust_attention": {"eps": 1e-3},
}
SHAPES = {
    "2-D": ((5, 8), (7, 8), (7, 6)),
    "3-D": ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    "4-D": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "5-D": ((2, 1, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 6)),
    "key without batch": ((2, 3, 5, 8), (7, 8), (7, 6)),
    "query without batch": ((5, 8), (2, 3, 7, 8), (3, 7, 6)),
    "value with batch": ((5, 8), (7, 8), (2, 3, 7, 6)),
    "value with more heads": ((2, 1, 5, 8), (2, 1, 7, 8), (2, 3, 7, 6)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("function", ATTENTION)
def test_attention_functions(function: str, shapes: str, dtype: torch.dtype) -> None:
    Q, K, V = (torch.randn(shape) for shape in SHAPES[shapes])
    options = ATTENTION[function]
    ours = partial(positional, getattr(steps, function), options)
    theirs = partial(positional, getattr(document_steps, function), options)
    check_agreement(ours, theirs, {"Q": Q, "K": K, "V": V}, dtype)


def positional(function, options, Q, K, V, mask=None):
    return function(Q, K, V, mask[0] if mask else None, **options)


def step_masks() -> dict[str, torch.Tensor]:
    return {
        "causal": document_steps.create_causal_mask(6),
        "padding": document_steps.create_padding_mask([3, 2, 6], 6),
        "bool": torch.rand(6, 6) < 0.6,
        "int": (torch.rand(3, 6, 6) < 0.6).int(),
        "one row": torch.tensor([[1, 0, 1, 1, 0, 1]]),
        "one dimension": torch.tensor([1, 0, 1, 1, 0, 1]),
        "column": (torch.arange(6) < 4)[:, None],
        "nothing": torch.zeros((), dtype=torch.bool),
        "larger": torch.rand(2, 1, 6, 6) < 0.6,
    }


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("mask", step_masks())
@pytest.mark.parametrize("function", ATTENTION)
def test_attention_functions_with_masks(function: str, mask: str, dtype: torch.dtype) -> None:
    inputs = {name: torch.randn(3, 6, 8) for name in ("Q", "K", "V")} | {"mask": [step_masks()[mask]]}
    options = ATTENTION[function]
    ours = partial(positional, getattr(steps, function), options)
    theirs = partial(positional, getattr(document_steps, function), options)
    check_agreement(ours, theirs, inputs, dtype)


def test_float16_masks_that_overflow_in_the_reference() -> None:
    Q = torch.randn(3, 6, 8)
    mask = step_masks()["padding"]
    with pytest.raises(RuntimeError, match="overflow"):
        document_steps.scaled_dot_product_attention(Q.half(), Q.half(), Q.half(), mask)
    output, weights = steps.scaled_dot_product_attention(Q.half(), Q.half(), Q.half(), mask)
    expected = document_steps.scaled_dot_product_attention(Q.half().float(), Q.half().float(), Q.half().float(), mask)
    torch.testing.assert_close((output.float(), weights.float()), expected, rtol=2e-3, atol=2e-3)


def test_scaled_dot_product_attention_against_both_references() -> None:
    """The references name the arguments query, key, value and Q, K, V, so both are called by position."""
    names = [name for name, _ in parameter_names(steps.scaled_dot_product_attention)]
    assert names == [name for name, _ in parameter_names(document_function.scaled_dot_product_attention)]
    Q, K, V = torch.randn(3, 2, 4, 5, 8)
    mine = steps.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril())
    for document in (document_function, document_steps):
        torch.testing.assert_close(mine, document.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril()))
    q, k, v = torch.randn(3, 1, 1, 5, 64)
    out, weights = steps.scaled_dot_product_attention(query=q, key=k, value=v)
    assert out.shape == (1, 1, 5, 64)
    assert f"Weights sum check: {weights[0][0][0].sum().item():.4f}" == "Weights sum check: 1.0000"


def test_every_function_has_the_references_signature() -> None:
    functions = inspect.getmembers(document_steps, inspect.isfunction)
    for name, function in functions:
        if name != "scaled_dot_product_attention":
            assert parameter_names(getattr(steps, name)) == parameter_names(function), name
    assert {name for name, _ in functions} | {"visualize_attention"} == set(steps.__all__)


def test_optimized_dropout() -> None:
    Q, K, V = torch.randn(3, 2, 4, 32, 8)
    exact = steps.optimized_scaled_dot_product_attention(Q, K, V)
    for nothing in (nn.Dropout(0.4).eval(), nn.Dropout(0.0), nn.Identity()):
        torch.testing.assert_close(steps.optimized_scaled_dot_product_attention(Q, K, V, dropout=nothing), exact)
    with OpCounter() as ops:
        output, weights = steps.optimized_scaled_dot_product_attention(Q, K, V, dropout=nn.Dropout(0.4))
    assert not ops.count["aten.bernoulli_"]
    assert not ops.count["aten.native_dropout"]
    assert (weights == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    torch.testing.assert_close(output, weights @ V)
    ours = partial(steps.optimized_scaled_dot_product_attention, dropout=lambda w: w.square().tril())
    theirs = partial(document_steps.optimized_scaled_dot_product_attention, dropout=lambda w: w.square().tril())
    check_agreement(ours, theirs, {"Q": Q, "K": K, "V": V})
    # A value with more batch dimensions than the scores shares their weights and their dropout.
    output, weights = steps.optimized_scaled_dot_product_attention(Q[0, 0], K[0, 0], V, dropout=nn.Dropout(0.4))
    assert weights.shape == (32, 32)
    torch.testing.assert_close(output, weights @ V)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 11, 512])
def test_memory_efficient_attention(chunk_size: int, dtype: torch.dtype) -> None:
    ours = partial(steps.memory_efficient_attention, chunk_size=chunk_size)
    theirs = partial(document_steps.memory_efficient_attention, chunk_size=chunk_size)
    K, V = torch.randn(2, 2, 3, 9, 8)
    check_agreement(ours, theirs, {"Q": torch.randn(2, 3, 11, 8), "K": K, "V": V}, dtype)


def test_memory_efficient_attention_shapes() -> None:
    Q, K, V = torch.randn(2, 3, 11, 8), torch.randn(3, 9, 8), torch.randn(3, 9, 1)
    check_agreement(
        steps.memory_efficient_attention, document_steps.memory_efficient_attention, {"Q": Q, "K": K, "V": V}
    )
    assert steps.memory_efficient_attention(Q[:, :, :0], K, V).shape == (2, 3, 0, 8)
    with pytest.raises(ValueError, match=r"K and V: got shapes .*; needs shapes for which the output has Q's shape"):
        steps.memory_efficient_attention(Q, K, torch.randn(3, 9, 4))
    with pytest.raises(ValueError, match=r"K and V: got shapes .*; needs shapes for which the output has Q's shape"):
        steps.memory_efficient_attention(Q[:1], K, torch.randn(2, 3, 9, 8))
    with pytest.raises(ValueError, match=r"Q: got shape \(3, 11, 8\); needs \(B, H, Lq, d_k\)"):
        steps.memory_efficient_attention(Q[0], K, V)
    with pytest.raises(ValueError, match="chunk_size: got 0; needs at least 1"):
        steps.memory_efficient_attention(Q, K, V, chunk_size=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "bool", "float of zeros and ones", "bias"])
def test_fused_attention(mask: str, dtype: torch.dtype) -> None:
    masks = {
        "none": None,
        "bool": torch.ones(5, 7, dtype=torch.bool).tril(),
        "float of zeros and ones": torch.ones(5, 7).tril(),
        "bias": torch.randn(2, 1, 5, 7),
    }
    inputs = {
        "Q": torch.randn(2, 3, 5, 8),
        "K": torch.randn(2, 3, 7, 8),
        "V": torch.randn(2, 3, 7, 8),
        "mask": masks[mask],
    }
    check_agreement(steps.fused_attention, document_steps.fused_attention, inputs, dtype)


def test_single_steps() -> None:
    Q, K, V = torch.randn(3, 2, 5, 8)
    scores = steps.compute_attention_scores(Q, K)
    scaled = steps.scale_attention_scores(scores, 8)
    masked = steps.apply_mask(scaled, torch.ones(5, 5).tril())
    weights = steps.compute_attention_weights(masked)
    output = steps.apply_attention_weights(weights, V)
    theirs = document_steps.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril())
    torch.testing.assert_close((output, weights), theirs)
    assert torch.equal(masked, document_steps.apply_mask(scaled, torch.ones(5, 5).tril()))
    assert steps.apply_mask(scaled) is scaled
    torch.testing.assert_close((output, weights), steps.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["compute_attention_weights", "stable_softmax"])
def test_softmax(name: str, dtype: torch.dtype) -> None:
    scores = 30 * torch.randn(4, 5, 6)
    check_agreement(getattr(steps, name), getattr(document_steps, name), {"scores": scores}, dtype)
    integers = torch.arange(6).view(2, 3)
    torch.testing.assert_close(steps.stable_softmax(integers), document_steps.stable_softmax(integers))
    scores[1, 2] = -torch.inf
    scores[2, 3, :4] = -torch.inf
    scores = scores.to(dtype).requires_grad_()
    weights = getattr(steps, name)(scores)
    expected = getattr(document_steps, name)(scores.detach().float())
    assert expected[1, 2].isnan().all()
    torch.testing.assert_close(weights.float(), expected.nan_to_num(0.0), rtol=3e-2, atol=1e-2)
    assert (weights[1, 2] == 0).all()
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[1, 2] == 0).all()


def test_masks() -> None:
    assert torch.equal(steps.create_causal_mask(4), document_steps.create_causal_mask(4))
    for lengths in ([3, 2, 4], [0, 9], [], torch.tensor([1, 4])):
        mine, other = steps.create_padding_mask(lengths, 4), document_steps.create_padding_mask(lengths, 4)
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    torch.set_default_dtype(torch.float64)
    assert steps.create_padding_mask([1], 2).dtype == steps.create_causal_mask(2).dtype == torch.float64
    with pytest.raises(ValueError, match=r"seq_lengths: got \[1, -1\]; needs lengths of at least 0"):
        steps.create_padding_mask([1, -1], 4)
    with pytest.raises(TypeError):
        steps.create_padding_mask([1.5], 4)


def test_attention_without_keys() -> None:
    """Without keys both give zeros, the empty sum."""
    Q, K, V = torch.randn(2, 3, 4), torch.randn(2, 0, 4), torch.randn(2, 0, 4)
    torch.testing.assert_close(
        steps.scaled_dot_product_attention(Q, K, V), document_steps.scaled_dot_product_attention(Q, K, V)
    )


# The printed output of the reference's example, section 5.1 of 点积注意力的计算流程.
EXAMPLE_SCALED = [
    [-0.0437, 0.3952, -0.0216, 0.2167],
    [1.3495, -0.8176, 0.2393, 0.2182],
    [1.7744, 0.9521, -0.3394, 1.2076],
    [-0.8126, 0.9380, 0.2820, 0.3762],
]
EXAMPLE_WEIGHTS = [
    [0.2053, 0.3184, 0.2099, 0.2664],
    [0.5661, 0.0648, 0.1865, 0.1826],
    [0.4700, 0.2065, 0.0568, 0.2667],
    [0.0767, 0.4419, 0.2293, 0.2520],
]
EXAMPLE_OUTPUT = [
    [0.2103, -0.1219, 0.0661],
    [0.3001, -0.0210, 0.1925],
    [0.3130, -0.2134, 0.1250],
    [0.1320, -0.1065, 0.0793],
]


def test_example_with_seed_42() -> None:
    torch.manual_seed(42)
    Q, K, V = torch.randn(1, 4, 3), torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    scores = steps.compute_attention_scores(Q, K)
    scaled = steps.scale_attention_scores(scores, 3)
    output, weights = steps.scaled_dot_product_attention(Q, K, V)
    assert scores.squeeze(0).round().int().tolist() == [[0, 1, 0, 0], [2, -1, 0, 0], [3, 2, -1, 2], [-1, 2, 0, 1]]
    for found, printed in ((scaled, EXAMPLE_SCALED), (weights, EXAMPLE_WEIGHTS), (output, EXAMPLE_OUTPUT)):
        torch.testing.assert_close(found.squeeze(0), torch.tensor(printed), rtol=0, atol=6e-5)
    torch.testing.assert_close(weights.squeeze(0).sum(dim=-1), torch.ones(4))
    torch.testing.assert_close((output, weights), document_steps.scaled_dot_product_attention(Q, K, V))


@pytest.mark.parametrize("tokens", [["我", "喜欢", "深度", "学习"], None], ids=["tokens", "positions"])
def test_visualize_attention(tokens: list[str] | None) -> None:
    matplotlib.use("Agg")

    from scaledot.fonts import families_for

    weights = F.softmax(torch.randn(1, 4, 4), dim=-1).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            families_for(["注意力权重矩阵我喜欢深度学习"])
        except UserWarning:  # no installed font has the glyphs; test_plot.py tests that warning
            warnings.simplefilter("ignore")
        assert steps.visualize_attention(weights, tokens) is None
        figure = pyplot.gcf()
        figure.canvas.draw()  # a missing glyph would warn
    axes = figure.axes[0]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("注意力权重矩阵", "Key位置", "Query位置")
    for axis in (axes.xaxis, axes.yaxis):
        assert tokens is None or [label.get_text() for label in axis.get_ticklabels()] == tokens
    assert f"{weights[0, 1, 2].item():.2f}" in [text.get_text() for text in axes.texts]
    pyplot.close(figure)
    with pytest.raises(ValueError, match=r"attention_weights: got shape \(2, 4, 4\); needs \(n, n\) or \(1, n, n\)"):
        steps.visualize_attention(torch.rand(2, 4, 4))
