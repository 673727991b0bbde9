"""score_mod: what functions must not do, and integers as torch has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from scaledot._score import score_arguments
from score_mod_cases import Captured, formula, inputs, mixed

SMALL, NOTHING = torch.zeros(10), torch.zeros(0)
ERRORS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no function": (3, {}, TypeError, "score_mod: got 3, an int; needs a function"),
    "softcap": (lambda s, b, h, q, k: s, {"softcap": 2.0}, ValueError, "score_mod: got one with softcap; needs one"),
    "an index beyond": (lambda s, b, h, q, k: s + SMALL[k], {}, IndexError, "got the index 1[0-9]* for a dimension"),
    "an index before": (
        lambda s, b, h, q, k: s + SMALL[-k - 5],
        {},
        IndexError,
        "got the index -1[1-9] for a dimension",
    ),
    "an empty tensor": (lambda s, b, h, q, k: s + NOTHING[k], {}, IndexError, "got the index 0 for a dimension"),
    "no index": (lambda s, b, h, q, k: s + SMALL, {}, ValueError, r"result of shape \(10,\); needs one score"),
    "random numbers": (lambda s, b, h, q, k: s + torch.rand(()), {}, NotImplementedError, "got the operation rand"),
    "no result": (lambda s, b, h, q, k: None, {}, TypeError, "score_mod: got None as its result; needs a score"),
    "a condition": (lambda s, b, h, q, k: q >= k, {}, TypeError, "returns a condition.*BlockMask.from_mask_mod"),
    "True": (lambda s, b, h, q, k: True, {}, TypeError, "returns a condition.*BlockMask.from_mask_mod"),
    "complex numbers": (
        lambda s, b, h, q, k: s + SMALL.to(torch.complex64)[h],
        {},
        TypeError,
        "score_mod: got one that computes with torch.complex64; needs real numbers",
    ),
    "a change of a captured tensor": (
        lambda s, b, h, q, k: s + SMALL.add_(1)[h],
        {},
        NotImplementedError,
        "got the operation add_ on a captured tensor; needs a function that changes no tensor",
    ),
    "an error of its own": (
        lambda s, b, h, q, k: s.no_such_name,
        {},
        RuntimeError,
        "score_mod: got one that raises AttributeError .*: .*no_such_name.*; needs a function of",
    ),
    "a large integer": (
        lambda s, b, h, q, k: s + (k - 2**63),
        {},
        ValueError,
        "score_mod: got the integer 9.223e.18 .*; needs one of 64 bits",
    ),
    "another device": (lambda s, b, h, q, k: s + SMALL.to("meta")[h], {}, ValueError, "needs to be on query's device"),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_error(name: str) -> None:
    score_mod, options, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        scaledot.scaled_dot_product_attention(*inputs(torch.float32), score_mod=score_mod, **options)


def without_gradients(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        return s * 2


def assigns(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    SMALL[h] = s
    return s


SCALAR, COUNT = torch.tensor(0.5), torch.tensor(2)
PAIRS, PICKED, ARRAY = torch.randn(4, 10), torch.arange(10) > 4, SMALL.numpy()
READS = (
    "got a function that reads the number in a tensor{line}; needs operations on tensors, such as torch.where in place "
    "of if, or a number that is read before the call"
)
OTHERS = (
    "{line}; needs one that kernels have, such as arithmetic, comparisons, torch.where, exp "
    "and tanh, and captured tensors indexed by b, h, q_idx and kv_idx"
)
CHANGES = "needs a function that changes no tensor"
GRADIENTS = "{line}; needs all parts with their gradients, or a captured tensor that is detached before it is indexed"
ARRAYS = (
    "got a function that makes a NumPy array of a tensor{line}; needs operations of torch, and torch.from_numpy for "
    "arrays that it captures"
)
RAISES = "got one that raises {error}; needs a function of (score, b, h, q_idx, kv_idx), tensors without dimensions"
BY_ZERO = "got a division of an integer by 0{line}; needs another divisor"
ONE = "needs one score, so an index for each dimension of a captured tensor"
# A function, the type of its error, and the whole message after the argument. The function is on one line, or the
# message names its second line.
LINES: dict[str, tuple[Any, type[Exception], str]] = {
    "if": (lambda s, b, h, q, k: s if q > k else -s, NotImplementedError, READS),
    "and": (lambda s, b, h, q, k: torch.where(q > k and h == 0, s, -s), NotImplementedError, READS),
    "item": (lambda s, b, h, q, k: s * s.item(), NotImplementedError, READS),
    "tolist": (lambda s, b, h, q, k: s * SMALL.tolist()[2], NotImplementedError, READS),
    "a captured number": (lambda s, b, h, q, k: s * SMALL[3].item(), NotImplementedError, READS),
    "the largest captured number": (lambda s, b, h, q, k: s * SMALL.max().item(), NotImplementedError, READS),
    "float": (lambda s, b, h, q, k: s * float(SCALAR), NotImplementedError, READS),
    "range": (lambda s, b, h, q, k: sum((s for _ in range(COUNT)), s), NotImplementedError, READS),
    "a slice": (lambda s, b, h, q, k: s + SMALL[COUNT : COUNT + 1].sum(), NotImplementedError, READS),
    "alpha": (lambda s, b, h, q, k: torch.add(s, s, alpha=SCALAR), NotImplementedError, READS),
    "if of a captured number": (lambda s, b, h, q, k: s if SCALAR else -s, NotImplementedError, READS),
    "an array of a captured tensor": (lambda s, b, h, q, k: s * SMALL.numpy()[0], TypeError, ARRAYS),
    "a list": (lambda s, b, h, q, k: s * [1.0, 2.0, 3.0, 4.0][h], NotImplementedError, READS),
    "math": (lambda s, b, h, q, k: s * math.exp(h), NotImplementedError, READS),
    "lgamma": (lambda s, b, h, q, k: torch.lgamma(s), NotImplementedError, "got the operation lgamma" + OTHERS),
    "arange": (lambda s, b, h, q, k: s + torch.arange(4)[h], NotImplementedError, "got the operation arange" + OTHERS),
    "add_": (lambda s, b, h, q, k: s.add_(1), NotImplementedError, "got the operation add_{line}; " + CHANGES),
    "an element": (assigns, NotImplementedError, "got an assignment to elements of a tensor{line}; " + CHANGES),
    "detach": (lambda s, b, h, q, k: s + s.detach(), NotImplementedError, "got the operation detach" + GRADIENTS),
    "detached": (
        lambda s, b, h, q, k: s + SMALL[h].exp().detach(),
        NotImplementedError,
        "got the operation detach" + GRADIENTS,
    ),
    "no_grad": (without_gradients, NotImplementedError, "got torch.no_grad()" + GRADIENTS),
    "a NumPy array": (lambda s, b, h, q, k: s * ARRAY[h], TypeError, ARRAYS),
    "numpy()": (lambda s, b, h, q, k: s * s.numpy(), TypeError, ARRAYS),
    "a condition as index": (
        lambda s, b, h, q, k: s + PAIRS[h][q > k],
        NotImplementedError,
        "got a boolean index{line}; needs integers, or torch.where",
    ),
    "a captured condition as index": (
        lambda s, b, h, q, k: s + PAIRS[:, PICKED][h, k % 2],
        NotImplementedError,
        "got a boolean index{line}; needs integers, or torch.where",
    ),
    "a shape that numbers give": (
        lambda s, b, h, q, k: s + PICKED.nonzero()[k % 2, 0],
        NotImplementedError,
        "got a captured tensor whose shape depends on numbers, as that of nonzero() does; needs one that is computed "
        "before the call",
    ),
    "// 0": (lambda s, b, h, q, k: s + k // 0, ValueError, BY_ZERO),
    "% 0": (lambda s, b, h, q, k: s + k % 0, ValueError, BY_ZERO),
    "a power": (
        lambda s, b, h, q, k: s + q**k,
        NotImplementedError,
        "got a power of integers{line}; needs floating operands",
    ),
    "too few indices": (lambda s, b, h, q, k: s + PAIRS[h], ValueError, "got a result of shape (10,); " + ONE),
    "an error of its own": (
        lambda s, b, h, q, k: s.shape[0],
        IndexError,
        RAISES.replace("{error}", "IndexError{line}: tuple index out of range"),
    ),
    "too few arguments": (
        lambda s: s,
        TypeError,
        RAISES.replace("{error}", "TypeError: <lambda>() takes 1 positional argument but 5 were given"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(LINES))
def test_whole_message_with_the_line(name: str) -> None:
    score_mod, error, message = LINES[name]
    line = score_mod.__code__.co_firstlineno
    line += score_mod.__name__ in ("without_gradients", "assigns")
    with pytest.raises(error) as raised:
        scaledot.scaled_dot_product_attention(*inputs(torch.float32), score_mod=score_mod)
    place = f" (test_score_mod_errors.py, line {line})"
    assert str(raised.value) == "score_mod: " + message.replace("{line}", place)


def test_the_line_is_that_of_a_function_within_a_function() -> None:
    inner = LINES["lgamma"][0]
    score_mod = scaledot.score_mods.compose(scaledot.score_mods.softcap(2.0), inner)
    with pytest.raises(NotImplementedError, match=rf"line {inner.__code__.co_firstlineno}\)"):
        scaledot.scaled_dot_product_attention(*inputs(torch.float32), score_mod=score_mod)


def test_a_captured_tensor_may_be_detached_before_it_is_indexed() -> None:
    """And an index may be detached at any time."""
    query, key, value = inputs(torch.float32)
    table = torch.randn(4, requires_grad=True)
    output = scaledot.scaled_dot_product_attention(
        query,
        key,
        value,
        score_mod=lambda s, b, h, q, k: s + table.detach()[h] * q - k.detach() / (1.0 * q + 1).detach(),
    )
    output.sum().backward()
    assert table.grad is None
    assert query.grad is not None


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_errors_of_shapes_are_those_of_calls_without_a_function(name: str) -> None:
    for wrong in (torch.tensor(0.5), torch.zeros(3), torch.zeros(3, 4, 37, 16), torch.zeros(2, 3, 37, 16)):
        tensors = dict(zip(("query", "key", "value"), inputs(torch.float32), strict=True)) | {name: wrong}
        errors = []
        for options in ({}, {"score_mod": lambda s, b, h, q, k: s * 2}, {"score_mod": lambda s, b, h, q, k: s * 2}):
            with pytest.raises((ValueError, RuntimeError)) as raised:
                scaledot.scaled_dot_product_attention(**tensors, **options)
            errors.append((raised.type, str(raised.value)))
        assert errors[0] == errors[1] == errors[2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integers_wrap_around_as_torchs_do(dtype: torch.dtype) -> None:
    tensors = [tensor.detach() for tensor in inputs(torch.float64)]
    t = (torch.tensor([0, 5, 100, 127]) * (2**24 if dtype == torch.int32 else 1)).to(dtype)
    terms: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda h, k: t[h] - 7, lambda h, k: -t[h], lambda h, k: t[h] * 100, lambda h, k: t[h] + t[k % 4],
        lambda h, k: t[h] << 3, lambda h, k: (t[h] - 9).abs(), lambda h, k: torch.where(k > 3, t[h] - 50, t[h]),
        lambda h, k: t[h].clamp(-2, 100), lambda h, k: (k * 50).to(dtype), lambda h, k: ~t[h],
    ]  # fmt: skip
    for term in terms:
        score_mod = lambda s, b, h, q, k, term=term: s + (term(h, k) % 17).double() / 8  # noqa: E731
        found = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
        torch.testing.assert_close(found, formula(*tensors, score_mod), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_integers(dtype: torch.dtype) -> None:
    """Torch has few operations for them, and a captured tensor needs none."""
    tensors = [tensor.detach() for tensor in inputs(torch.float64)]
    numbers = torch.tensor([0, 5, 100, 60000])
    t = numbers.to(dtype)
    score_mod = lambda s, b, h, q, k: s + t[h].double() * 1e-3 * k  # noqa: E731
    found = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
    wanted = formula(*tensors, lambda s, b, h, q, k: s + numbers[h].double() * 1e-3 * k)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_integers_divided_by_zero_do_no_harm() -> None:
    tensors, zero = [tensor.detach() for tensor in inputs(torch.float32)], torch.zeros(4, dtype=torch.int64)
    for score_mod in (
        lambda s, b, h, q, k: s + k // zero[h] * 0,
        lambda s, b, h, q, k: s + k % zero[h] * 0,
        lambda s, b, h, q, k: s + torch.fmod(k, q - q) * 0,
        lambda s, b, h, q, k: s + torch.div(zero[h] + -(2**63), k * 0 - 1, rounding_mode="trunc") * 0,
    ):
        scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)


def test_an_index_beyond_is_no_error_where_no_key_is_seen() -> None:
    table = torch.randn(40)
    tensors = inputs(torch.float32)
    output = scaledot.scaled_dot_product_attention(
        *tensors, is_causal=True, score_mod=lambda s, b, h, q, k: s + table[q - k]
    )
    assert output.isfinite().all()


def test_there_is_no_second_derivative() -> None:
    query, key, value = inputs(torch.float32)
    output = scaledot.scaled_dot_product_attention(query, key, value, score_mod=lambda s, b, h, q, k: s * 2)
    with pytest.raises(NotImplementedError, match="score_mod: got one in a second derivative"):
        torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="score_mod: got one in a second derivative or in forward mode"):
        torch.func.jvp(
            lambda q: scaledot.scaled_dot_product_attention(q, key, value, score_mod=lambda s, b, h, q, k: s * 2),
            (query.detach(),),
            (query.detach(),),
        )


def test_a_program_that_no_function_made_is_refused() -> None:
    """Every list of numbers gives an error or a result; none reads outside of its registers or its tensors."""
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    captured = Captured(torch.float32)
    arguments = score_arguments(mixed(captured), query, key, value, {})
    program = arguments.pop("score_program")
    generator = torch.Generator().manual_seed(5)
    refused = 0
    for _ in range(300):
        wrong = program.clone()
        place = int(torch.randint(0, len(program), (), generator=generator))
        wrong[place] = torch.randint(-2, 70, (), generator=generator)
        try:
            torch.ops.scaledot.sdpa(query, key, value, score_program=wrong, **arguments)
        except (ValueError, IndexError):
            refused += 1
    assert refused > 50
    with pytest.raises(ValueError, match="score_program: got"):
        torch.ops.scaledot.sdpa(query, key, value, score_program=program[:40], **arguments)
