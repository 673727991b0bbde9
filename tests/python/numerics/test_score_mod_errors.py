"""score_mod: what functions must not do, and integers as torch has them."""

from __future__ import annotations

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
    "control flow": (
        lambda s, b, h, q, k: s if q > k else -s,
        {},
        NotImplementedError,
        "needs torch.where in place of",
    ),
    "a value": (lambda s, b, h, q, k: s.item(), {}, NotImplementedError, "needs torch.where in place of"),
    "no index": (lambda s, b, h, q, k: s + SMALL, {}, ValueError, r"result of shape \(10,\); needs one score"),
    "another operation": (
        lambda s, b, h, q, k: torch.lgamma(s),
        {},
        NotImplementedError,
        "got the operation lgamma .*test_score_mod_errors.py.*; needs pointwise",
    ),
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
    "a change of the score": (lambda s, b, h, q, k: s.add_(1), {}, NotImplementedError, "got the operation add_"),
    "an error of its own": (
        lambda s, b, h, q, k: s.no_such_name,
        {},
        RuntimeError,
        "score_mod: got one that raises AttributeError: .*no_such_name.*; needs a function of",
    ),
    "too few arguments": (lambda s: s, {}, TypeError, "got one that raises TypeError: .*takes 1 .*; needs a function"),
    "a large integer": (
        lambda s, b, h, q, k: s + (k - 2**63),
        {},
        ValueError,
        "score_mod: got the integer 9.223e.18; needs one of 64 bits",
    ),
    "a division by zero": (lambda s, b, h, q, k: s + k // 0, {}, ValueError, "got a division of an integer by 0"),
    "another device": (lambda s, b, h, q, k: s + SMALL.to("meta")[h], {}, ValueError, "needs to be on query's device"),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_error(name: str) -> None:
    score_mod, options, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        scaledot.scaled_dot_product_attention(*inputs(torch.float32), score_mod=score_mod, **options)


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
