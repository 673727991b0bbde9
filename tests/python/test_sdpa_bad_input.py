"""Bad input for every argument: an error that names the argument, what it got and what it needs; never a
crash."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from cases import Case

ERRORS = (ValueError, TypeError, RuntimeError)
Arguments = dict[str, Any]


def good() -> Arguments:
    """A call that works; every bad one changes one thing."""
    return {
        "query": torch.randn(2, 4, 6, 8),
        "key": torch.randn(2, 4, 7, 8),
        "value": torch.randn(2, 4, 7, 8),
    }


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(4, 6, 8), torch.randn(4, 6, 8)])


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(4, 8)], layout=torch.jagged)


def quantised(shape: tuple[int, ...]) -> Tensor:
    return torch.quantize_per_tensor(torch.randn(shape), 0.1, 0, torch.qint8)


# name -> (the changed arguments, what the message must contain). The first is the argument's name.
TENSORS: dict[str, tuple[Callable[[], Arguments], tuple[str, ...]]] = {
    "query 1-D": (lambda: {"query": zeros(8)}, ("query", "[8]", "2")),
    "query 0-D": (lambda: {"query": torch.tensor(1.0)}, ("query", "[]", "2")),
    "key 1-D": (lambda: {"key": zeros(8)}, ("key", "[8]", "2")),
    "value 0-D": (lambda: {"value": torch.tensor(1.0)}, ("value", "[]", "2")),
    "too many dims": (
        lambda: {"query": zeros(*[2, 1] * 4, 4, 6, 8), "key": zeros(*[1, 2] * 4, 4, 7, 8)},
        ("query", "dimensions", "6"),
    ),
    "too many dims of the mask": (
        lambda: {"attn_mask": zeros(1, 1, 2, 4, 6, 7)},
        ("attn_mask", "[1, 1, 2, 4, 6, 7]"),
    ),
    "head_dim of key": (lambda: {"key": zeros(2, 4, 7, 9)}, ("key", "[2, 4, 7, 9]", "8")),
    "length of value": (lambda: {"value": zeros(2, 4, 5, 8)}, ("value", "[2, 4, 5, 8]", "7")),
    "batch of key": (lambda: {"key": zeros(3, 4, 7, 8)}, ("key", "[3, 4, 7, 8]", "batch")),
    "batch of value": (lambda: {"value": zeros(3, 4, 7, 8)}, ("value", "[3, 4, 7, 8]", "batch")),
    "heads of key": (lambda: {"key": zeros(2, 3, 7, 8)}, ("key", "3", "4", "head")),
    "heads of value": (lambda: {"value": zeros(2, 2, 7, 8)}, ("value", "2", "4", "head")),
    "gqa not asked for": (
        lambda: {"key": zeros(2, 2, 7, 8), "value": zeros(2, 2, 7, 8)},
        ("key", "2", "4", "enable_gqa"),
    ),
    "gqa does not divide": (
        lambda: {"key": zeros(2, 3, 7, 8), "value": zeros(2, 3, 7, 8), "enable_gqa": True},
        ("key", "3", "4"),
    ),
    "gqa upside down": (lambda: {"query": zeros(2, 2, 6, 8), "enable_gqa": True}, ("key", "4", "2")),
    "query int64": (lambda: {"query": zeros(2, 4, 6, 8, dtype=torch.int64)}, ("query", "int64", "float32")),
    "all int32": (
        lambda: {name: t.int() for name, t in good().items()},
        ("query", "int32", "float32"),
    ),
    "all bool": (lambda: {name: t > 0 for name, t in good().items()}, ("query", "bool", "float32")),
    "all complex": (
        lambda: {name: t.cfloat() for name, t in good().items()},
        ("query", "complex64", "float32"),
    ),
    "all float8": (
        lambda: {name: t.to(torch.float8_e4m3fn) for name, t in good().items()},
        ("query", "float8_e4m3fn", "float32"),
    ),
    "key float64": (lambda: {"key": zeros(2, 4, 7, 8, dtype=torch.float64)}, ("key", "float64", "float32")),
    "value bfloat16": (
        lambda: {"value": zeros(2, 4, 7, 8, dtype=torch.bfloat16)},
        ("value", "bfloat16", "float32"),
    ),
    "query float16": (lambda: {"query": zeros(2, 4, 6, 8, dtype=torch.float16)}, ("key", "float16", "float32")),
    "key on meta": (lambda: {"key": zeros(2, 4, 7, 8, device="meta")}, ("key", "meta", "cpu")),
    "value on meta": (lambda: {"value": zeros(2, 4, 7, 8, device="meta")}, ("value", "meta", "cpu")),
    "query on meta": (lambda: {"query": zeros(2, 4, 6, 8, device="meta")}, ("key", "meta", "cpu")),
    "mask on meta": (lambda: {"attn_mask": zeros(6, 7, device="meta")}, ("attn_mask", "meta", "cpu")),
    "slopes on meta": (lambda: {"alibi_slopes": zeros(4, device="meta")}, ("alibi_slopes", "meta", "cpu")),
    "query sparse": (lambda: {"query": torch.randn(2, 4, 6, 8).to_sparse()}, ("query", "Sparse")),
    "key sparse": (lambda: {"key": torch.randn(2, 4, 7, 8).to_sparse()}, ("key", "Sparse")),
    "value sparse csr": (lambda: {"value": torch.randn(2, 7, 8).to_sparse_csr()}, ("value", "Sparse")),
    "mask sparse": (lambda: {"attn_mask": torch.ones(6, 7).to_sparse()}, ("attn_mask", "Sparse")),
    "query mkldnn": (lambda: {"query": torch.randn(2, 4, 6, 8).to_mkldnn()}, ("query", "Mkldnn")),
    "query nested": (lambda: {"query": nested()}, ("query", "nested")),
    "key nested": (lambda: {"key": nested()}, ("key", "nested")),
    "value jagged": (lambda: {"value": jagged()}, ("value", "nested")),
    "mask nested": (lambda: {"attn_mask": nested()}, ("attn_mask", "nested")),
    "query quantised": (lambda: {"query": quantised((2, 4, 6, 8))}, ("query", "uanti")),
    "key quantised": (lambda: {"key": quantised((2, 4, 7, 8))}, ("key", "uanti")),
    "value quantised": (lambda: {"value": quantised((2, 4, 7, 8))}, ("value", "uanti")),
    "mask too long": (lambda: {"attn_mask": zeros(6, 8)}, ("attn_mask", "[6, 8]", "7")),
    "mask too short": (lambda: {"attn_mask": zeros(2, 4, 5, 7)}, ("attn_mask", "[2, 4, 5, 7]", "6")),
    "mask heads": (lambda: {"attn_mask": zeros(3, 6, 7)}, ("attn_mask", "[3, 6, 7]", "4")),
    "mask widens the batch": (lambda: {"attn_mask": zeros(5, 2, 4, 6, 7)}, ("attn_mask", "[5, 2, 4, 6, 7]")),
    "mask empty": (lambda: {"attn_mask": zeros(0)}, ("attn_mask", "[0]")),
    "mask int64": (lambda: {"attn_mask": zeros(6, 7, dtype=torch.int64)}, ("attn_mask", "int64", "bool")),
    "mask uint8": (lambda: {"attn_mask": zeros(6, 7, dtype=torch.uint8)}, ("attn_mask", "uint8", "bool")),
    "mask complex": (
        lambda: {"attn_mask": zeros(6, 7, dtype=torch.cfloat)},
        ("attn_mask", "complex64", "bool"),
    ),
    "slopes too many": (lambda: {"alibi_slopes": zeros(5)}, ("alibi_slopes", "[5]", "4")),
    "slopes of wrong batch": (lambda: {"alibi_slopes": zeros(3, 4)}, ("alibi_slopes", "[3, 4]", "2")),
    "slopes 0-D": (lambda: {"alibi_slopes": torch.tensor(0.5)}, ("alibi_slopes", "[]")),
    "slopes int": (
        lambda: {"alibi_slopes": zeros(4, dtype=torch.int64)},
        ("alibi_slopes", "int64", "float32"),
    ),
    "slopes complex": (
        lambda: {"alibi_slopes": zeros(4, dtype=torch.cfloat)},
        ("alibi_slopes", "complex64"),
    ),
    "slopes sparse": (lambda: {"alibi_slopes": torch.ones(4).to_sparse()}, ("alibi_slopes", "Sparse")),
}
NUMBERS: dict[str, tuple[Arguments, tuple[str, ...]]] = {
    "dropout -0.1": ({"dropout_p": -0.1}, ("dropout_p", "-0.1", "[0, 1)")),
    "dropout 1": ({"dropout_p": 1.0}, ("dropout_p", "1", "[0, 1)")),
    "dropout 2": ({"dropout_p": 2}, ("dropout_p", "2", "[0, 1)")),
    "dropout nan": ({"dropout_p": math.nan}, ("dropout_p", "nan", "[0, 1)")),
    "dropout inf": ({"dropout_p": math.inf}, ("dropout_p", "inf", "[0, 1)")),
    "dropout text": ({"dropout_p": "0.1"}, ("dropout_p", "str")),
    "scale nan": ({"scale": math.nan}, ("scale", "nan", "finite")),
    "scale inf": ({"scale": math.inf}, ("scale", "inf", "finite")),
    "scale -inf": ({"scale": -math.inf}, ("scale", "-inf", "finite")),
    "scale text": ({"scale": "1"}, ("scale", "str")),
    "softcap 0": ({"softcap": 0.0}, ("softcap", "0", "None")),
    "softcap negative": ({"softcap": -3.0}, ("softcap", "-3", "None")),
    "softcap nan": ({"softcap": math.nan}, ("softcap", "nan")),
    "softcap inf": ({"softcap": math.inf}, ("softcap", "inf")),
    "masked_score nan": ({"masked_score": math.nan}, ("masked_score", "nan", "-inf")),
    "masked_score inf": ({"masked_score": math.inf}, ("masked_score", "inf", "-inf")),
    "masked_score None": ({"masked_score": None}, ("masked_score", "None", "inf")),
    "masked_score text": ({"masked_score": "low"}, ("masked_score", "str")),
    "window negative left": ({"window": (-1, 0)}, ("window", "-1", "None")),
    "window negative right": ({"window": (3, -2)}, ("window", "-2", "None")),
    "window one number": ({"window": 4}, ("window", "4", "pair")),
    "window three numbers": ({"window": (1, 2, 3)}, ("window", "(1, 2, 3)", "pair")),
    "window one side": ({"window": (1,)}, ("window", "(1,)", "pair")),
    "window float": ({"window": (1.5, 0)}, ("window", "1.5", "integer")),
    "window text": ({"window": ("a", 0)}, ("window", "'a'", "integer")),
    "window bool": ({"window": (True, 0)}, ("window", "True", "integer")),
    "window huge": ({"window": (2**70, 0)}, ("window",)),
    "alignment unknown": (
        {"causal_alignment": "middle"},
        ("causal_alignment", "middle", "upper_left", "lower_right"),
    ),
    "alignment empty": ({"causal_alignment": ""}, ("causal_alignment", "upper_left", "lower_right")),
    "alignment None": ({"causal_alignment": None}, ("causal_alignment", "None")),
    "causal text": ({"is_causal": "yes"}, ("is_causal", "str")),
    "gqa text": ({"enable_gqa": "yes"}, ("enable_gqa", "str")),
    "weights text": ({"return_weights": "yes"}, ("return_weights", "str")),
    "query list": ({"query": [[1.0, 2.0]]}, ("query", "list")),
    "key None": ({"key": None}, ("key", "None")),
    "value number": ({"value": 3.0}, ("value", "float")),
    "mask list": ({"attn_mask": [[True]]}, ("attn_mask", "list")),
    "slopes list": ({"alibi_slopes": [0.5]}, ("alibi_slopes", "list")),
}


def assert_named(raised: BaseException, needed: tuple[str, ...]) -> None:
    message = str(raised).splitlines()
    text = "\n".join(message)
    assert re.search(rf"\b{needed[0]}", text), f"does not name {needed[0]}: {text}"
    for part in needed[1:]:
        assert part in text, f"does not say {part!r}: {text}"
    assert "INTERNAL ASSERT" not in text


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("which", ["sdpa", "explain"])
def test_bad_tensors(which: str, name: str) -> None:
    change, needed = TENSORS[name]
    function = scaledot.scaled_dot_product_attention if which == "sdpa" else scaledot.explain
    arguments = {**good(), **change()}
    with pytest.raises(ERRORS) as raised:
        function(**arguments)
    assert_named(raised.value, needed)


@pytest.mark.parametrize("name", TENSORS)
def test_bad_tensors_that_require_grad(name: str) -> None:
    """The same message from above autograd: the checks do not depend on the dispatch path."""
    change, needed = TENSORS[name]
    arguments = {**good(), **change()}
    arguments["query"] = arguments["query"].detach()
    if arguments["query"].is_floating_point() or arguments["query"].is_complex():
        arguments["query"].requires_grad_()
    with pytest.raises(ERRORS) as raised:
        scaledot.scaled_dot_product_attention(**arguments)
    assert_named(raised.value, needed)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("which", ["sdpa", "explain"])
def test_bad_numbers(which: str, name: str) -> None:
    change, needed = NUMBERS[name]
    function = scaledot.scaled_dot_product_attention if which == "sdpa" else scaledot.explain
    with pytest.raises(ERRORS) as raised:
        function(**{**good(), **change})
    assert_named(raised.value, needed)


@pytest.mark.parametrize("name", [n for n in NUMBERS if "text" not in n and "list" not in n and "None" not in n])
def test_bad_numbers_on_meta_tensors(name: str) -> None:
    """A fake or meta call refuses what the real one refuses: torch.compile fails at trace time."""
    change, needed = NUMBERS[name]
    meta = {key: t.to("meta") for key, t in good().items()}
    with pytest.raises(ERRORS) as raised:
        scaledot.scaled_dot_product_attention(**{**meta, **change})
    assert_named(raised.value, needed)


@pytest.mark.parametrize("name", ["unknown", "few", "many", "small"])
def test_bad_patterns(name: str) -> None:
    patterns: dict[str, tuple[Arguments, tuple[str, ...]]] = {
        "unknown": ({"pattern": "spiral"}, ("pattern", "spiral", "chunked", "prefix")),
        "few": ({"pattern": "chunked"}, ("pattern_args", "chunked")),
        "many": ({"pattern_args": [3]}, ("pattern_args", "none")),
        "small": ({"pattern": "chunked", "pattern_args": [0]}, ("pattern_args", "0", "1")),
    }
    options, needed = patterns[name]
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa(**good(), **options)
    assert_named(raised.value, needed)


SEEDS: dict[str, tuple[Callable[[], Tensor | None], tuple[str, ...]]] = {
    "missing": (lambda: None, ("dropout_seed", "None", "int64")),
    "int32": (lambda: zeros(2, dtype=torch.int32), ("dropout_seed", "int32", "int64")),
    "float": (lambda: zeros(2), ("dropout_seed", "float32", "int64")),
    "one number": (lambda: zeros(1, dtype=torch.int64), ("dropout_seed", "[1]", "(2,)")),
    "2-D": (lambda: zeros(2, 1, dtype=torch.int64), ("dropout_seed", "[2, 1]", "(2,)")),
    "meta": (lambda: zeros(2, dtype=torch.int64, device="meta"), ("dropout_seed", "meta", "CPU")),
    "sparse": (lambda: torch.ones(2, dtype=torch.int64).to_sparse(), ("dropout_seed", "Sparse")),
}


@pytest.mark.parametrize("name", SEEDS)
def test_bad_seeds(name: str) -> None:
    seed, needed = SEEDS[name]
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa(**good(), dropout_p=0.5, dropout_seed=seed())
    assert_named(raised.value, needed)


def test_a_strided_seed_is_read_by_its_strides() -> None:
    case = Case("strided seed", dropout_p=0.5)
    inputs = case.make()
    wanted = torch.ops.scaledot.sdpa(**inputs.tensors(), dropout_p=0.5)[0]
    assert inputs.dropout_seed is not None
    spread = torch.full((6,), 77, dtype=torch.int64)
    spread[1::3] = inputs.dropout_seed
    inputs.dropout_seed = spread[1::3]
    assert torch.equal(torch.ops.scaledot.sdpa(**inputs.tensors(), dropout_p=0.5)[0], wanted)


def backward_arguments() -> Arguments:
    inputs = good()
    output, lse, weights = torch.ops.scaledot.sdpa(**inputs, return_weights=True)
    return {
        "grad_output": torch.randn_like(output), "grad_lse": torch.randn_like(lse), "grad_weights":
        torch.randn_like(weights),
        **inputs, "attn_mask": None, "alibi_slopes": None, "dropout_seed": None, "output": output, "lse": lse,
        "weights": weights,
        "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, "causal_alignment":
        "upper_left",
        "window_left": None, "window_right": None, "softcap": None, "masked_score": None, "pattern": "none",
        "pattern_args": [],
        "output_mask": [True, True, True, False],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["grad_output", "grad_lse", "grad_weights", "output", "lse", "weights"])
@pytest.mark.parametrize("what", ["shape", "dtype", "device", "sparse"])
def test_bad_backward_tensors(what: str, name: str) -> None:
    arguments = backward_arguments()
    torch.ops.scaledot.sdpa_backward(**arguments)
    tensor = arguments[name]
    arguments[name], needed = {
        "shape": (tensor[..., :-1], (name, str(list(tensor[..., :-1].shape)), str(list(tensor.shape)))),
        "dtype": (tensor.double(), (name, "float64", "float32")),
        "device": (tensor.to("meta"), (name, "meta", "cpu")),
        "sparse": (tensor.to_sparse(), (name, "Sparse")),
    }[what]
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa_backward(**arguments)
    assert_named(raised.value, needed)


def test_a_mask_gradient_without_a_float_mask() -> None:
    for mask in (None, torch.ones(6, 7, dtype=torch.bool)):
        with pytest.raises(ERRORS) as raised:
            torch.ops.scaledot.sdpa_backward(
                **{**backward_arguments(), "attn_mask": mask, "output_mask": [False] * 3 + [True]}
            )
        assert_named(raised.value, ("output_mask", "attn_mask"))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": -1},
        {"heads": -2},
        {"query_length": -1},
        {"key_length": -5},
        {"dropout_p": 1.5},
        {"seed": zeros(2)},
    ],
)
def test_bad_dropout_mask_arguments(changes: Arguments) -> None:
    arguments: Arguments = {
        "seed": torch.tensor([1, 2]),
        "batch": 1,
        "heads": 2,
        "query_length": 3,
        "key_length": 4,
        "dropout_p": 0.5,
    }
    torch.ops.scaledot.dropout_mask(**arguments)
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.dropout_mask(**{**arguments, **changes})
    assert_named(raised.value, (next(iter(changes)),))


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": -1},
        {"causal_alignment": "x"},
        {"alibi_slopes": torch.zeros(3)},
        {"key": torch.zeros(3)},
    ],
)
def test_bad_sdpa_mask_arguments(changes: Arguments) -> None:
    arguments = {key: good()[key] for key in ("query", "key")}
    torch.ops.scaledot.sdpa_mask(**arguments)
    with pytest.raises(ERRORS) as raised:
        torch.ops.scaledot.sdpa_mask(**{**arguments, **changes})
    assert_named(raised.value, (next(iter(changes)),))


def test_a_call_after_errors_works() -> None:
    for change in ({"dropout_p": 2.0}, {"window": (-1, 0)}, {"key": zeros(2, 4, 7, 9)}):
        with pytest.raises(ERRORS):
            scaledot.scaled_dot_product_attention(**{**good(), **change})
    assert scaledot.scaled_dot_product_attention(**good()).shape == (2, 4, 6, 8)


def test_many_dims_that_lie_evenly_are_fine() -> None:
    """The limit is on dimensions that kernels have to tell apart, not on how many there are."""
    query, key = torch.randn(*[2, 1] * 4, 2, 3, 4), torch.randn(2, 5, 4)
    deep = scaledot.scaled_dot_product_attention(query, key, key)
    flat = scaledot.scaled_dot_product_attention(query.flatten(0, -4), key, key)
    assert torch.equal(deep, flat.reshape(deep.shape))


def test_numbers_that_are_fine() -> None:
    """What sits next to the bad ones: none of these may be refused."""
    for change in (
        {"dropout_p": 0}, {"dropout_p": 0.999999}, {"scale": 0}, {"scale": -1}, {"scale": 2}, {"softcap":
        1e-3}, {"masked_score": 0},
        {"window": [2, 3]}, {"window": (0, 0)}, {"window": (None, None)}, {"window": (2**62, None)},
        {"is_causal": True, "attn_mask": zeros(6, 7)},
        {"attn_mask": zeros(7)}, {"attn_mask": zeros(6, 1)}, {"attn_mask": torch.tensor(0.5)}, {"attn_mask":
        zeros(2, 1, 1, 7)},
    ):  # fmt: skip
        result = scaledot.scaled_dot_product_attention(**{**good(), **change})
        assert torch.isfinite(result).all(), change
