"""Bad input for every argument: an error that names the argument, what it got and what it needs; never a crash."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import Tensor, zeros

import scaledot
from bad_arguments import IGNORED_WARNINGS, BadArguments, BadTensors, refused, sdpa_arguments

pytestmark = IGNORED_WARNINGS


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(4, 6, 8), torch.randn(4, 6, 8)])


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(4, 8)], layout=torch.jagged)


def quantised(shape: tuple[int, ...]) -> Tensor:
    return torch.quantize_per_tensor(torch.randn(shape), 0.1, 0, torch.qint8)


def by_position(keys: int = 7, kv_heads: int = 4, **options: object) -> dict[str, object]:
    """Tensors (batch, length, heads, head_dim), as flash-attn takes them."""
    key = zeros(2, keys, kv_heads, 8)
    return {"query": zeros(2, 6, 4, 8), "key": key, "value": key, **options}


TENSORS: BadTensors = {
    "query 1-D": (lambda: {"query": zeros(8)}, ("query", "(8,)", "2")),
    "query 0-D": (lambda: {"query": torch.tensor(1.0)}, ("query", "()", "2")),
    "key 1-D": (lambda: {"key": zeros(8)}, ("key", "(8,)", "2")),
    "value 0-D": (lambda: {"value": torch.tensor(1.0)}, ("value", "()", "2")),
    "too many dims": (
        lambda: {"query": zeros(*[2, 1] * 4, 4, 6, 8), "key": zeros(*[1, 2] * 4, 4, 7, 8)},
        ("query", "dimensions", "6"),
    ),
    "too many dims of the mask": (
        lambda: {"attn_mask": zeros(1, 1, 2, 4, 6, 7)},
        ("attn_mask", "(1, 1, 2, 4, 6, 7)"),
    ),
    "head_dim of key": (lambda: {"key": zeros(2, 4, 7, 9)}, ("key", "(2, 4, 7, 9)", "8")),
    "length of value": (lambda: {"value": zeros(2, 4, 5, 8)}, ("value", "(2, 4, 5, 8)", "7")),
    "batch of key": (lambda: {"key": zeros(3, 4, 7, 8)}, ("key", "(3, 4, 7, 8)", "batch")),
    "batch of value": (lambda: {"value": zeros(3, 4, 7, 8)}, ("value", "(3, 4, 7, 8)", "batch")),
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
    "length before heads": (lambda: by_position(), ("key", "got 7 heads", "pass query.transpose(1, 2)")),
    "length before heads in groups": (
        lambda: by_position(kv_heads=2, enable_gqa=True),
        ("key", "got 7 heads", "pass query.transpose(1, 2)"),
    ),
    "length before heads with a mask": (
        lambda: by_position(keys=6, attn_mask=zeros(6, 6)),
        ("attn_mask", "(6, 6)", "pass query.transpose(1, 2)"),
    ),
    "length before heads with a mask of padding": (
        lambda: by_position(keys=6, attn_mask=zeros(2, 1, 1, 6)),
        ("attn_mask", "(2, 1, 1, 6)", "pass query.transpose(1, 2)"),
    ),
    "query int64": (lambda: {"query": zeros(2, 4, 6, 8, dtype=torch.int64)}, ("query", "int64", "float32")),
    "all int32": (
        lambda: {name: t.int() for name, t in sdpa_arguments().items()},
        ("query", "int32", "float32"),
    ),
    "all bool": (lambda: {name: t > 0 for name, t in sdpa_arguments().items()}, ("query", "bool", "float32")),
    "all complex": (
        lambda: {name: t.cfloat() for name, t in sdpa_arguments().items()},
        ("query", "complex64", "float32"),
    ),
    "all float8": (
        lambda: {name: t.to(torch.float8_e4m3fn) for name, t in sdpa_arguments().items()},
        ("query", "torch.float8_e4m3fn", "torch.float32", "varlen_attention takes key and value of 8 bits"),
    ),
    "key float64": (lambda: {"key": zeros(2, 4, 7, 8, dtype=torch.float64)}, ("key", "float64", "float32")),
    "key and value int8": (
        lambda: {"key": zeros(2, 4, 7, 8, dtype=torch.int8), "value": zeros(2, 4, 7, 8, dtype=torch.int8)},
        ("key", "torch.int8", "query's dtype, torch.float32", "varlen_attention takes key and value of 8 bits"),
    ),
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
    "mask too long": (lambda: {"attn_mask": zeros(6, 8)}, ("attn_mask", "(6, 8)", "7")),
    "mask too short": (lambda: {"attn_mask": zeros(2, 4, 5, 7)}, ("attn_mask", "(2, 4, 5, 7)", "6")),
    "mask heads": (lambda: {"attn_mask": zeros(3, 6, 7)}, ("attn_mask", "(3, 6, 7)", "4")),
    "mask widens the batch": (lambda: {"attn_mask": zeros(5, 2, 4, 6, 7)}, ("attn_mask", "(5, 2, 4, 6, 7)")),
    "mask of padding": (
        lambda: {"attn_mask": torch.ones(2, 7) > 0},
        ("attn_mask", "(2, 7)", "(2, 4, 6, 7)", "for a padding mask pass attn_mask[:, None, None, :], or key_mask"),
    ),
    "mask for each batch entry": (
        lambda: {"attn_mask": zeros(2, 6, 7)},
        ("attn_mask", "(2, 6, 7)", "(2, 4, 6, 7)", "for one mask per batch entry pass attn_mask[:, None]"),
    ),
    "mask of padding with rows": (
        lambda: {"attn_mask": zeros(2, 1, 7)},
        ("attn_mask", "(2, 1, 7)", "for one mask per batch entry pass attn_mask[:, None]"),
    ),
    "mask empty": (lambda: {"attn_mask": zeros(0)}, ("attn_mask", "(0,)")),
    "mask int64": (
        lambda: {"attn_mask": zeros(6, 7, dtype=torch.int64)},
        ("attn_mask", "torch.int64", "pass attn_mask.bool()"),
    ),
    "mask uint8": (
        lambda: {"attn_mask": zeros(6, 7, dtype=torch.uint8)},
        ("attn_mask", "torch.uint8", "pass attn_mask.bool()"),
    ),
    "mask complex": (
        lambda: {"attn_mask": zeros(6, 7, dtype=torch.cfloat)},
        ("attn_mask", "complex64", "bool"),
    ),
    "slopes too many": (lambda: {"alibi_slopes": zeros(5)}, ("alibi_slopes", "(5,)", "4")),
    "slopes of wrong batch": (lambda: {"alibi_slopes": zeros(3, 4)}, ("alibi_slopes", "(3, 4)", "2")),
    "slopes 0-D": (lambda: {"alibi_slopes": torch.tensor(0.5)}, ("alibi_slopes", "()")),
    "slopes int": (
        lambda: {"alibi_slopes": zeros(4, dtype=torch.int64)},
        ("alibi_slopes", "int64", "float32"),
    ),
    "slopes complex": (
        lambda: {"alibi_slopes": zeros(4, dtype=torch.cfloat)},
        ("alibi_slopes", "complex64"),
    ),
    "slopes that are learnt": (
        lambda: {"alibi_slopes": torch.ones(4, requires_grad=True)},
        ("alibi_slopes", "requires grad", "attn_mask"),
    ),
    "relative even": (lambda: {"relative_bias": zeros(4, 8)}, ("relative_bias", "got 8 entries", "odd")),
    "relative heads": (lambda: {"relative_bias": zeros(3, 7)}, ("relative_bias", "(3, 7)", "(2, 4)")),
    "relative batch": (lambda: {"relative_bias": zeros(3, 4, 7)}, ("relative_bias", "(3, 4, 7)", "(2, 4)")),
    "relative widens": (lambda: {"relative_bias": zeros(5, 2, 4, 7)}, ("relative_bias", "(5, 2, 4, 7)")),
    "relative 0-D": (lambda: {"relative_bias": torch.tensor(0.5)}, ("relative_bias", "()")),
    "relative empty": (lambda: {"relative_bias": zeros(4, 0)}, ("relative_bias", "got 0 entries", "odd")),
    "relative int": (
        lambda: {"relative_bias": zeros(4, 7, dtype=torch.int64)},
        ("relative_bias", "int64", "float32"),
    ),
    "relative on meta": (lambda: {"relative_bias": zeros(4, 7, device="meta")}, ("relative_bias", "meta", "cpu")),
    "relative sparse": (lambda: {"relative_bias": torch.ones(4, 7).to_sparse()}, ("relative_bias", "Sparse")),
    "slopes sparse": (lambda: {"alibi_slopes": torch.ones(4).to_sparse()}, ("alibi_slopes", "Sparse")),
}
OPTIONS: BadArguments = {
    "dropout -0.1": ({"dropout_p": -0.1}, ("dropout_p", "-0.1", "[0, 1]")),
    "dropout above 1": ({"dropout_p": 1.001}, ("dropout_p", "1.001", "[0, 1]")),
    "dropout 2": ({"dropout_p": 2}, ("dropout_p", "2", "[0, 1]")),
    "dropout nan": ({"dropout_p": math.nan}, ("dropout_p", "nan", "[0, 1]")),
    "dropout inf": ({"dropout_p": math.inf}, ("dropout_p", "inf", "[0, 1]")),
    "dropout text": ({"dropout_p": "0.1"}, ("dropout_p", "'0.1', a str", "a number")),
    "dropout None": ({"dropout_p": None}, ("dropout_p", "None", "a number")),
    "dropout list": ({"dropout_p": [0.1]}, ("dropout_p", "[0.1]", "a number")),
    "scale nan": ({"scale": math.nan}, ("scale", "nan", "finite")),
    "scale inf": ({"scale": math.inf}, ("scale", "inf", "finite")),
    "scale -inf": ({"scale": -math.inf}, ("scale", "-inf", "finite")),
    "scale text": ({"scale": "a"}, ("scale", "'a', a str", "a number, or None")),
    "scale long text": ({"scale": "a" * 999}, ("scale", "a str; needs")),
    "scale list of numbers": ({"scale": [0.5] * 999}, ("scale", "a list; needs")),
    "scale tensor": ({"scale": torch.ones(3)}, ("scale", "a torch.Tensor of shape (3,)", "a number")),
    "scale huge": ({"scale": 10**400}, ("scale", "an int of 1329 bits", "64 bits")),
    "softcap 0": ({"softcap": 0.0}, ("softcap", "0", "None")),
    "softcap negative": ({"softcap": -3.0}, ("softcap", "-3", "None")),
    "softcap nan": ({"softcap": math.nan}, ("softcap", "nan")),
    "softcap inf": ({"softcap": math.inf}, ("softcap", "inf")),
    "softcap text": ({"softcap": "low"}, ("softcap", "'low', a str", "a number, or None")),
    "masked_score nan": ({"masked_score": math.nan}, ("masked_score", "nan", "-inf")),
    "masked_score inf": ({"masked_score": math.inf}, ("masked_score", "inf", "-inf")),
    "masked_score None": ({"masked_score": None}, ("masked_score", "None", "inf")),
    "masked_score text": ({"masked_score": "low"}, ("masked_score", "'low', a str; needs a number")),
    "masked_score array": ({"masked_score": numpy.zeros(3)}, ("masked_score", "a numpy.ndarray of shape (3,)")),
    "window negative left": ({"window": (-1, 0)}, ("window", "-1", "None")),
    "window negative right": ({"window": (3, -2)}, ("window", "-2", "None")),
    "window one number": ({"window": 4}, ("window", "4, an int", "pair")),
    "window one text": ({"window": "ab"}, ("window", "'ab', a str", "pair")),
    "window array": ({"window": numpy.zeros(999)}, ("window", "a numpy.ndarray of shape (999,)", "pair")),
    "window long": ({"window": tuple(range(999))}, ("window", "a tuple", "pair")),
    "window three numbers": ({"window": (1, 2, 3)}, ("window", "(1, 2, 3)", "pair")),
    "window one side": ({"window": (1,)}, ("window", "(1,)", "pair")),
    "window float": ({"window": (1.5, 0)}, ("window", "1.5", "integer")),
    "window text": ({"window": ("a", 0)}, ("window", "'a'", "integer")),
    "window bool": ({"window": (True, 0)}, ("window", "True", "integer")),
    "window huge": ({"window": (2**70, 0)}, ("window", "a left side of an int of 71 bits", "64 bits, or None")),
    "alignment unknown": (
        {"causal_alignment": "middle"},
        ("causal_alignment", "middle", "upper_left", "lower_right"),
    ),
    "alignment empty": ({"causal_alignment": ""}, ("causal_alignment", "upper_left", "lower_right")),
    "alignment None": ({"causal_alignment": None}, ("causal_alignment", "None", "upper_left")),
    "alignment int": ({"causal_alignment": 3}, ("causal_alignment", "3, an int", "lower_right")),
    "causal text": ({"is_causal": "yes"}, ("is_causal", "'yes', a str", "True or False")),
    "causal int": ({"is_causal": 1}, ("is_causal", "1, an int", "True or False")),
    "causal numpy bool": ({"is_causal": numpy.bool_(True)}, ("is_causal", "a numpy.bool", "True or False")),
    "causal tensor": ({"is_causal": torch.tensor(True)}, ("is_causal", "a torch.Tensor of shape ()", "True")),
    "causal None": ({"is_causal": None}, ("is_causal", "None", "True or False")),
    "gqa text": ({"enable_gqa": "yes"}, ("enable_gqa", "'yes', a str", "True or False")),
    "gqa int": ({"enable_gqa": 0}, ("enable_gqa", "0, an int", "True or False")),
    "weights text": ({"return_weights": "yes"}, ("return_weights", "'yes', a str", "True or False")),
    "weights int": ({"return_weights": 1}, ("return_weights", "1, an int", "True or False")),
    "lse text": ({"return_lse": "yes"}, ("return_lse", "'yes', a str", "True or False")),
    "lse None": ({"return_lse": None}, ("return_lse", "None", "True or False")),
    "query list": ({"query": [[1.0, 2.0]]}, ("query", "a list; needs a torch.Tensor: torch.tensor(query)")),
    "query list of tensors": ({"query": [zeros(6, 8)] * 4}, ("query", "a list; needs a torch.Tensor")),
    "query array": (
        {"query": numpy.zeros((2, 8))},
        ("query", "a numpy.ndarray of shape (2, 8); needs a torch.Tensor: torch.from_numpy(query)"),
    ),
    "query text": ({"query": "q" * 999}, ("query", "a str; needs a torch.Tensor")),
    "key None": ({"key": None}, ("key", "None; needs a torch.Tensor")),
    "value number": ({"value": 3.0}, ("value", "3.0, a float; needs a torch.Tensor")),
    "mask list": ({"attn_mask": [[True]]}, ("attn_mask", "a list; needs a torch.Tensor: torch.tensor(attn_mask)")),
    "mask array": (
        {"attn_mask": numpy.ones((6, 7))},
        ("attn_mask", "a numpy.ndarray of shape (6, 7)", "torch.from_numpy(attn_mask)"),
    ),
    "relative list": ({"relative_bias": [0.5]}, ("relative_bias", "a list", "torch.tensor(relative_bias)")),
    "slopes list": ({"alibi_slopes": [0.5]}, ("alibi_slopes", "a list", "torch.tensor(alibi_slopes)")),
    "slopes array": (
        {"alibi_slopes": numpy.ones(4)},
        ("alibi_slopes", "a numpy.ndarray of shape (4,)", "torch.from_numpy(alibi_slopes)"),
    ),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("which", ["sdpa", "explain"])
def test_bad_tensors(which: str, name: str) -> None:
    change, needed = TENSORS[name]
    function = scaledot.scaled_dot_product_attention if which == "sdpa" else scaledot.explain
    arguments = {**sdpa_arguments(), **change()}
    with refused(*needed):
        function(**arguments)


@pytest.mark.parametrize("name", TENSORS)
def test_bad_tensors_that_require_grad(name: str) -> None:
    """The message is the same when autograd records the call."""
    change, needed = TENSORS[name]
    arguments = {**sdpa_arguments(), **change()}
    arguments["query"] = arguments["query"].detach()
    if arguments["query"].is_floating_point() or arguments["query"].is_complex():
        arguments["query"].requires_grad_()
    with refused(*needed):
        scaledot.scaled_dot_product_attention(**arguments)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("which", ["sdpa", "explain"])
def test_bad_options(which: str, name: str) -> None:
    change, needed = OPTIONS[name]
    function = scaledot.scaled_dot_product_attention if which == "sdpa" else scaledot.explain
    with refused(*needed):
        function(**{**sdpa_arguments(), **change})


@pytest.mark.parametrize("name", [name for name, (change, _) in OPTIONS.items() if not {"query", "value"} & {*change}])
def test_bad_options_on_meta_tensors(name: str) -> None:
    """Meta tensors are refused as real ones are, so torch.compile fails at trace time."""
    change, needed = OPTIONS[name]
    meta = {key: t.to("meta") for key, t in sdpa_arguments().items()}
    with refused(*needed):
        scaledot.scaled_dot_product_attention(**{**meta, **change})


def test_a_call_after_errors_works() -> None:
    for change in ({"dropout_p": 2.0}, {"window": (-1, 0)}, {"key": zeros(2, 4, 7, 9)}):
        with pytest.raises((ValueError, RuntimeError)):
            scaledot.scaled_dot_product_attention(**{**sdpa_arguments(), **change})
    assert scaledot.scaled_dot_product_attention(**sdpa_arguments()).shape == (2, 4, 6, 8)


@pytest.mark.parametrize("shape", [(5, 7), (3, 7), (3, 6, 7), (2, 5, 7), (2, 6, 6), (2, 4, 7), (2, 2, 4, 6, 7), (8,)])
def test_masks_of_no_known_meaning_get_no_advice(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="attn_mask: got shape") as raised:
        scaledot.scaled_dot_product_attention(**sdpa_arguments(), attn_mask=zeros(shape))
    assert "pass attn_mask" not in str(raised.value)


@pytest.mark.parametrize("index", [(slice(None), None, None, slice(None)), (slice(None), None)], ids=["2-D", "3-D"])
def test_the_advice_for_masks_works(index: tuple[object, ...]) -> None:
    mask = torch.rand(2, 7) > 0.3 if len(index) == 4 else torch.rand(2, 6, 7) > 0.3
    query, key, value = sdpa_arguments().values()
    mask[..., 0] = True
    found = scaledot.scaled_dot_product_attention(query, key, value, mask[index])
    for entry in range(2):
        wanted = scaledot.scaled_dot_product_attention(query[entry], key[entry], value[entry], mask[entry])
        torch.testing.assert_close(found[entry], wanted)


def test_many_dimensions_that_can_be_merged_are_fine() -> None:
    """The limit counts the batch dimensions that remain after merging those with even strides."""
    query, key = torch.randn(*[2, 1] * 4, 2, 3, 4), torch.randn(2, 5, 4)
    deep = scaledot.scaled_dot_product_attention(query, key, key)
    flat = scaledot.scaled_dot_product_attention(query.flatten(0, -4), key, key)
    assert torch.equal(deep, flat.reshape(deep.shape))


def test_options_at_the_edge_of_their_range_are_fine() -> None:
    """Values next to the bad ones: none of these may be refused."""
    for change in (
        {"dropout_p": 0},
        {"dropout_p": 0.999999},
        {"dropout_p": 1},
        {"scale": 0},
        {"scale": -1},
        {"scale": 2},
        {"softcap": 1e-3},
        {"masked_score": 0},
        {"window": [2, 3]},
        {"window": (0, 0)},
        {"window": (None, None)},
        {"window": (2**62, 2**63 - 1)},
        {"is_causal": True, "attn_mask": zeros(6, 7)},
        {"attn_mask": zeros(7)},
        {"attn_mask": zeros(6, 1)},
        {"attn_mask": torch.tensor(0.5)},
        {"attn_mask": zeros(2, 1, 1, 7)},
    ):
        result = scaledot.scaled_dot_product_attention(**{**sdpa_arguments(), **change})
        assert torch.isfinite(result).all(), change
