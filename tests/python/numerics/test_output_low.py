"""Calls of 16 bits save the low part of their output: the rule, the gradients, and torch's transforms."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from cases import Case
from scaledot import explain, explain_varlen, save_for_backward, scaled_dot_product_attention, varlen_attention
from scaledot.compare.check import judge

HALVES = [torch.bfloat16, torch.float16]
LENGTHS = (0, 150, 150, 240, 900)  # of packed sequences, summed up
ROWS, KEYS = 300, 400  # more than one tile of keys of every kernel: rows with one tile need no low part


def inputs(
    length: int = ROWS, keys: int = KEYS, dtype: torch.dtype = torch.bfloat16, heads: tuple[int, ...] = (2, 3)
) -> list[Tensor]:
    """Keys and values have a large mean, to which the gradient of a query owes nothing."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(*heads, length, 32, generator=generator)
    key, value = (4 + torch.randn(*heads, keys, 32, generator=generator) / 4 for _ in range(2))
    return [t.to(dtype) for t in (query, key, value)]


def packed() -> list[Tensor]:
    total = LENGTHS[-1]
    return [t[0].transpose(0, 1).contiguous() for t in inputs(total, total, heads=(1, 3))]


def varlen(*tensors: Tensor, **options: Any) -> Tensor:
    cumulative = torch.tensor(LENGTHS)
    result: Tensor = varlen_attention(*tensors, cumulative, cumulative, 660, 660, **options)
    return result


def cotangent(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)


def gradients(attention: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    output = attention(*leaves)
    return torch.autograd.grad(output, leaves, cotangent(output))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1) @ value


# ------------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_the_gradient_of_the_query_is_exact(rows: int, dtype: torch.dtype) -> None:
    tensors = inputs(rows, dtype=dtype)
    exact = gradients(eager, *(t.double() for t in tensors))
    theirs = gradients(eager, *tensors)
    ours = gradients(scaled_dot_product_attention, *tensors)
    with save_for_backward(False):
        without = gradients(scaled_dot_product_attention, *tensors)
    if rows < ROWS:  # the kernels for few rows compute delta from all scores of a row
        assert torch.equal(ours[0], without[0])
    else:
        assert error(ours[0], exact[0]) < error(without[0], exact[0]) / 3
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert judge(a, None, b, c, dtype, gradient=True).problem is None


def with_weights(average: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def attention(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        output, _, weights = torch.ops.scaledot.sdpa(*tensors, return_weights=True, average_weights=average)
        return output, weights

    return attention


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("average", [False, True])
def test_returned_weights(average: bool, dtype: torch.dtype) -> None:
    """The weights are those of a call that saves nothing, and may be changed or differentiated like them."""
    tensors, attention = inputs(dtype=dtype), with_weights(average)
    leaves = [t.detach().requires_grad_() for t in tensors]
    output, weights = attention(*leaves)
    assert weights.is_contiguous()
    assert weights.shape == ((2, ROWS, KEYS) if average else (2, 3, ROWS, KEYS))
    with torch.no_grad():
        for a, b in zip((output, weights), attention(*tensors), strict=True):
            assert torch.equal(a, b)
    exact = gradients(eager, *(t.double() for t in tensors))
    ours = torch.autograd.grad(output, leaves, cotangent(output), retain_graph=True)
    with save_for_backward(False):
        without = gradients(lambda *t: attention(*t)[0], *tensors)
    assert error(ours[0], exact[0]) < error(without[0], exact[0]) / 3
    # A gradient of the weights, too. Their rounding is in it, as it is in eager torch's.
    along = torch.randn(weights.shape, generator=torch.Generator().manual_seed(7)).to(dtype)

    def of_both(function: Callable[..., tuple[Tensor, Tensor]], wide: torch.dtype) -> Tensor:
        given = [t.to(wide).requires_grad_() for t in tensors]
        results = function(*given)
        return torch.autograd.grad(results, given[0], [cotangent(output).to(wide), along.to(wide)])[0]

    def unfused(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        softmax = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1)
        return softmax @ value, softmax.mean(-3) if average else softmax

    exact_query = of_both(unfused, torch.float64)
    assert error(of_both(attention, dtype), exact_query) < error(of_both(unfused, dtype), exact_query)
    if not average:
        weights.mul_(2)  # the backward of the weights reads them
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad((output, weights), leaves, (cotangent(output), along))


def test_returned_weights_under_torchs_transforms() -> None:
    tensors, attention = inputs(), with_weights(average=False)
    results = attention(*tensors)
    along = [cotangent(t) for t in results]

    def all_gradients(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*leaves), leaves, along)

    wanted = all_gradients(attention)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert all(torch.equal(a, b) for a, b in zip(all_gradients(compiled), wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(all_gradients(torch.func.vmap(attention)), wanted, strict=True))

    def loss(*leaves: Tensor) -> Tensor:
        return sum(((t * a).float().sum() for t, a in zip(attention(*leaves), along, strict=True)), torch.zeros(()))

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_packed_sequences() -> None:
    tensors = packed()
    exact = gradients(varlen, *(t.double() for t in tensors))
    ours = gradients(varlen, *tensors)
    with save_for_backward(False):
        without = gradients(varlen, *tensors)
    assert error(ours[0], exact[0]) < error(without[0], exact[0]) / 3
    for a, b, c in zip(ours[1:], without[1:], exact[1:], strict=True):
        assert error(a, c) < 1.01 * error(b, c)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": dict(is_causal=True),
    "dropout": dict(dropout_p=0.3),
    "float_mask": dict(attn_mask=torch.linspace(-2, 2, ROWS * KEYS).view(ROWS, KEYS)),
    "softcap": dict(softcap=3.0),
    "window": dict(window=(9, 130)),
    "gqa": dict(enable_gqa=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    """No option makes the gradient of the query less exact."""
    query, key, value = inputs()
    if name == "gqa":
        key, value = key[:, :1], value[:, :1]

    def attention(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        return scaled_dot_product_attention(*tensors, **OPTIONS[name])

    exact = gradients(attention, *(t.double() for t in (query, key, value)))[0]
    ours = gradients(attention, query, key, value)[0]
    with save_for_backward(False):
        without = gradients(attention, query, key, value)[0]
    assert error(ours, exact) < error(without, exact)


def test_an_overflow_of_the_output_is_an_inf_without_a_low_part() -> None:
    query, key, value = inputs(dtype=torch.float16)
    value[..., 0] = 65504
    value = 1.1 * value.clamp(max=6e4)
    output, *_, output_low = torch.ops.scaledot.sdpa_recorded(query, key, value, save_output_low=True)
    assert output[..., 0].isinf().all()
    assert (output_low[..., 0] == 0).all()
    assert output_low.isfinite().all()


def test_same_bits_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    for attention, tensors in ((scaled_dot_product_attention, inputs()), (varlen, packed())):
        found = []
        for threads in (1, 2, 5, 17):
            torch.set_num_threads(threads)
            found.append(gradients(attention, *tensors))
        torch.set_num_threads(before)
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ------------------------------------------------------------------------------------------------ the rule
def saves_output_low(run: Callable[[], Tensor]) -> bool:
    """Whether a call saves two tensors of its output's shape: the output and the low part of the output."""
    shapes: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = run()
    return shapes.count(output.shape) == 2


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_the_rule(dtype: torch.dtype) -> None:
    """More than 128 keys and 16 bits; explain() says the same."""
    is_half = dtype in HALVES
    for keys in (128, 129):
        query, key, value = inputs(150, keys, dtype)
        value = torch.cat([value, value], -1)
        tensors = [t.requires_grad_() for t in (query, key, value)]
        expected = is_half and keys == 129
        assert saves_output_low(lambda: scaled_dot_product_attention(*tensors)) == expected  # noqa: B023
        saved = explain(*tensors).saved
        assert saved is not None
        assert saved.output_low_bytes == (2 * 3 * 150 * 64 * 2 if expected else 0)
        assert ("what rounding took off the output" in str(explain(*tensors))) == expected
        saved = explain(*tensors, return_weights=True).saved
        assert saved is not None
        assert saved.output_low_bytes == (2 * 3 * 150 * 64 * 2 if expected else 0)
        returning = lambda: scaled_dot_product_attention(*tensors, return_weights=True)[0]  # noqa: B023, E731
        assert saves_output_low(returning) == expected
        with save_for_backward(False):
            assert not saves_output_low(lambda: scaled_dot_product_attention(*tensors))  # noqa: B023
            saved = explain(*tensors).saved
            assert saved is not None
            assert saved.output_low_bytes == 0


def test_the_rule_for_packed_sequences() -> None:
    query, key, value = packed()
    value = torch.cat([value, value], -1)
    tensors = [t.requires_grad_() for t in (query, key, value)]
    for max_k, expected in ((128, False), (129, True)):
        rows = (tensors[0][:256], *(t[:250] for t in tensors[1:]))
        arguments = (*rows, torch.tensor([0, 128, 256]), torch.tensor([0, 128, 250]), 128, max_k)
        assert saves_output_low(lambda: varlen_attention(*arguments)) == expected  # noqa: B023
        found = explain_varlen(*arguments)
        assert found.output_low_bytes == (256 * 3 * 64 * 2 if expected else 0)
        assert ("what rounding took off the output" in str(found)) == expected
    with save_for_backward(False):
        assert not saves_output_low(lambda: varlen_attention(*arguments))


# ------------------------------------------------------------------------------------------------ torch's transforms
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    torch._dynamo.reset()

    def attention(*tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=True)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for keys in (200, 64, 333):
        wanted = gradients(attention, *inputs(150, keys))
        found = gradients(compiled, *inputs(150, keys))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("attention", [scaled_dot_product_attention, varlen])
def test_checkpoint(attention: Callable[..., Tensor]) -> None:
    tensors = packed() if attention is varlen else inputs()
    wanted = gradients(attention, *tensors)
    found = gradients(lambda *t: checkpoint(attention, *t, use_reentrant=False), *tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_functorch() -> None:
    tensors = inputs()
    output = scaled_dot_product_attention(*tensors)
    wanted = gradients(scaled_dot_product_attention, *tensors)

    def loss(query: Tensor, key: Tensor, value: Tensor, along: Tensor) -> Tensor:
        return (scaled_dot_product_attention(query, key, value) * along).float().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    for found in (gradient(*tensors, cotangent(output)), torch.func.vmap(gradient)(*tensors, cotangent(output))):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_functorch_of_packed_sequences() -> None:
    tensors = packed()
    wanted = gradients(varlen, *tensors)
    along = cotangent(tensors[0])
    gradient = torch.func.grad(lambda *t: (varlen(*t) * along).float().sum(), argnums=(0, 1, 2))
    found = gradient(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    samples = [torch.stack([t, t.flip(0)]) for t in tensors]
    for k, each in enumerate(torch.func.vmap(gradient)(*samples)):
        assert torch.equal(each[0], wanted[k])


def test_double_backward() -> None:
    """The gradients of gradients do not read the low part of the output; they are those of the same call in float32."""
    second = []
    for dtype in (torch.bfloat16, torch.float32):
        query, key, value = (t.to(dtype).requires_grad_() for t in inputs(20, 140))
        output = scaled_dot_product_attention(query, key, value)
        (first,) = torch.autograd.grad(output.square().sum(), value, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), value)[0].double())
    assert error(second[0], second[1]) < 0.02


def test_autocast() -> None:
    tensors = [t.float() for t in inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(scaled_dot_product_attention, *tensors)
    wanted = gradients(lambda *t: scaled_dot_product_attention(*(x.bfloat16() for x in t)), *tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# ------------------------------------------------------------------------------------------------ the ops
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    tensors = [t.requires_grad_(requires_grad) for t in inputs(9, 7)]
    opcheck(torch.ops.scaledot.sdpa_recorded.default, tuple(tensors), dict(save_output_low=True))
    lengths = torch.tensor([0, 4, 7])
    rows = [t[0].transpose(0, 1).detach().requires_grad_(requires_grad) for t in inputs(7, 7)]
    opcheck(
        torch.ops.scaledot.varlen_recorded.default,
        (*rows, lengths, lengths, *[None] * 8, 4, 4),
        dict(save_output_low=True),
    )


def test_opcheck_of_the_backward() -> None:
    query, key, value = inputs(9, 7)
    output, lse, _, output_low = torch.ops.scaledot.sdpa_recorded(query, key, value, save_output_low=True)
    assert output_low.shape == output.shape
    assert output_low.dtype == output.dtype
    opcheck(
        torch.ops.scaledot.sdpa_backward.default,
        (cotangent(output), None, None, query, key, value, *[None] * 10, output, lse, None, output_low),
        {
            **Case("output_low").options(),
            "saved_keys": None,
            "part": None,
            "output_mask": [True, True, True, False, False, False],
        },
    )


def test_bad_arguments() -> None:
    op = torch.ops.scaledot.sdpa_recorded
    query, key, value = inputs(9, 7)
    refused = "save_output_low: got True for torch.float32; needs torch.bfloat16 or torch.float16"
    with pytest.raises(ValueError, match=refused):
        op(query.float(), key.float(), value.float(), save_output_low=True)
    with pytest.raises(ValueError, match="save_output_low: got True with saved_keys"):
        op(query, key, value, save_output_low=True, saved_keys=7)
    lengths = torch.tensor([0, 7])
    rows = [t[0].transpose(0, 1).float() for t in inputs(7, 7)]
    with pytest.raises(ValueError, match=refused):
        torch.ops.scaledot.varlen_recorded(*rows, lengths, lengths, *[None] * 8, 7, 7, save_output_low=True)


def test_an_empty_sequence_has_an_output_low_of_zero() -> None:
    rows = packed()
    lengths, none = torch.tensor([0, 400, 900]), torch.tensor([400, 0])
    output, _, output_low = torch.ops.scaledot.varlen_recorded(
        *rows, lengths, lengths, none, *[None] * 7, 660, 660, save_output_low=True
    )
    assert (output[400:] == 0).all()
    assert (output_low[400:] == 0).all()
    assert (output_low[:400] != 0).any()
