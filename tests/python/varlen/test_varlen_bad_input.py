"""Bad input to varlen_attention: an error that names the argument, what it got and what it needs."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import scaledot
from bad_arguments import IGNORED_WARNINGS, BadArguments, paged_arguments, refused, varlen_arguments

pytestmark = IGNORED_WARNINGS

NEEDS_INTEGERS = "needs torch.int32 or torch.int64"

PACKED: BadArguments = {
    "query 4-D": (dict(query=torch.randn(1, 7, 4, 8)), ("query", "(1, 7, 4, 8)", "total_q")),
    "key 2-D": (dict(key=torch.randn(9, 8)), ("key", "(9, 8)", "total_k")),
    "value 4-D": (dict(value=torch.randn(1, 9, 4, 8)), ("value", "(1, 9, 4, 8)", "total_k")),
    "head_dim": (dict(key=torch.randn(9, 4, 6)), ("key", "(9, 4, 6)", "8")),
    "value's rows": (dict(value=torch.randn(8, 4, 8)), ("value", "(8, 4, 8)", "(9, 4, 8)")),
    "value's heads": (dict(value=torch.randn(9, 2, 8)), ("value", "(9, 2, 8)", "(9, 4, 8)")),
    "heads": (dict(key=torch.randn(9, 2, 8), value=torch.randn(9, 2, 8)), ("key", "2 heads", "4", "enable_gqa")),
    "heads that do not divide": (
        dict(key=torch.randn(9, 3, 8), value=torch.randn(9, 3, 8), enable_gqa=True),
        ("key", "3 heads", "divides"),
    ),
    "dtype": (dict(key=torch.randn(9, 4, 8).double()), ("key", "float64", "float32")),
    "integers": (dict(query=torch.ones(7, 4, 8, dtype=torch.int32)), ("query", "int32", "float32")),
    "device": (dict(key=torch.randn(9, 4, 8, device="meta")), ("key", "meta", "cpu")),
    "sparse": (dict(query=torch.randn(7, 4, 8).to_sparse()), ("query", "Sparse", "dense")),
    "nested": (dict(key=torch.nested.nested_tensor([torch.randn(9, 4, 8)])), ("key", "nested", "dense")),
    "cu_seq_q float": (dict(cu_seq_q=torch.tensor([0.0, 3, 7])), ("cu_seq_q", "float32", NEEDS_INTEGERS)),
    "cu_seq_q int16": (dict(cu_seq_q=torch.tensor([0, 3, 7]).short()), ("cu_seq_q", "int16", NEEDS_INTEGERS)),
    "cu_seq_q 2-D": (dict(cu_seq_q=torch.tensor([[0, 3, 7]])), ("cu_seq_q", "(1, 3)", "(sequences + 1,)")),
    "cu_seq_q empty": (dict(cu_seq_q=torch.tensor([], dtype=torch.int32)), ("cu_seq_q", "(0,)", "(sequences + 1,)")),
    "cu_seq_q device": (dict(cu_seq_q=torch.tensor([0, 3, 7], device="meta")), ("cu_seq_q", "meta", "cpu")),
    "cu_seq_q start": (dict(cu_seq_q=torch.tensor([1, 3, 7])), ("cu_seq_q", "1 as its first number", "0")),
    "cu_seq_q down": (dict(cu_seq_q=torch.tensor([0, 8, 7])), ("cu_seq_q", "8 and then 7", "never decrease")),
    "cu_seq_q end": (dict(cu_seq_q=torch.tensor([0, 3, 6])), ("cu_seq_q", "6 as its last number", "query", "7")),
    "cu_seq_k None": (dict(cu_seq_k=None), ("cu_seq_k", "None", "block_table")),
    "cu_seq_k length": (dict(cu_seq_k=torch.tensor([0, 9])), ("cu_seq_k", "2 numbers", "3")),
    "cu_seq_k start": (dict(cu_seq_k=torch.tensor([-1, 4, 9])), ("cu_seq_k", "-1 as its first number", "0")),
    "cu_seq_k down": (dict(cu_seq_k=torch.tensor([0, 10, 9])), ("cu_seq_k", "10 and then 9", "never decrease")),
    "cu_seq_k end": (dict(cu_seq_k=torch.tensor([0, 4, 12])), ("cu_seq_k", "12 as its last number", "key", "9")),
    "max_q": (dict(max_q=3), ("max_q", "3", "4", "sequence 1")),
    "max_q negative": (dict(max_q=-1), ("max_q", "-1", "at least 0")),
    "max_q None": (dict(max_q=None), ("max_q", "None", "an integer")),
    "max_k": (dict(max_k=4), ("max_k", "4", "5", "sequence 1")),
    "max_k negative": (dict(max_k=-1), ("max_k", "-1", "at least 0")),
    "seqused_k negative": (dict(seqused_k=torch.tensor([2, -1])), ("seqused_k", "-1", "sequence 1", "0 to 5")),
    "seqused_k too many": (dict(seqused_k=torch.tensor([5, 5])), ("seqused_k", "5", "sequence 0", "0 to 4")),
    "seqused_k length": (dict(seqused_k=torch.tensor([1])), ("seqused_k", "1 numbers", "2 sequences")),
    "seqused_k bool": (dict(seqused_k=torch.tensor([True, True])), ("seqused_k", "bool", NEEDS_INTEGERS)),
    "dropout_p": (dict(dropout_p=1.1), ("dropout_p", "1.1", "[0, 1]")),
    "dropout_p text": (dict(dropout_p="a"), ("dropout_p", "'a', a str", "a number")),
    "query array": (dict(query=numpy.zeros((7, 4, 8))), ("query", "a numpy.ndarray of shape (7, 4, 8)", "from_numpy")),
    "cu_seq_q list": (dict(cu_seq_q=[0, 3, 7]), ("cu_seq_q", "a list", "torch.tensor(cu_seq_q)")),
    "cu_seq_k array": (dict(cu_seq_k=numpy.arange(3)), ("cu_seq_k", "a numpy.ndarray of shape (3,)", "from_numpy")),
    "seqused_k list": (dict(seqused_k=[2, 1]), ("seqused_k", "a list", "torch.tensor(seqused_k)")),
    "block_table text": (dict(block_table="x"), ("block_table", "'x', a str", "a torch.Tensor")),
    "is_causal int": (dict(is_causal=1), ("is_causal", "1, an int", "True or False")),
    "enable_gqa int": (dict(enable_gqa=1), ("enable_gqa", "1, an int", "True or False")),
    "return_lse int": (dict(return_lse=1), ("return_lse", "1, an int", "True or False")),
    "scale text": (dict(scale="a"), ("scale", "'a', a str", "a number, or None")),
    "num_splits text": (dict(num_splits="a"), ("num_splits", "'a', a str", "an integer, or None")),
    "max_k text": (dict(max_k="5"), ("max_k", "'5', a str", "an integer")),
    "scale": (dict(scale=float("nan")), ("scale", "nan", "finite")),
    "softcap": (dict(softcap=0.0), ("softcap", "0", "above 0")),
    "causal_alignment": (dict(causal_alignment="middle"), ("causal_alignment", "middle", "lower_right")),
    "window_size": (dict(window_size=(1, 2, 3)), ("window_size", "(1, 2, 3)", "pair")),
    "window_size None": (dict(window_size=None), ("window_size", "None", "pair")),
    "window twice": (dict(window_size=(1, 1), window=(1, 1)), ("window", "(1, 1)", "one of the two")),
    "window": (dict(window=(-1, 0)), ("window", "-1", "None")),
    "alibi_slopes": (dict(alibi_slopes=torch.ones(3)), ("alibi_slopes", "(3,)", "4 heads")),
    "alibi_slopes 2-D": (dict(alibi_slopes=torch.ones(3, 4)), ("alibi_slopes", "(3, 4)", "2 sequences")),
    "alibi_slopes grad": (
        dict(alibi_slopes=torch.ones(4, requires_grad=True)),
        ("alibi_slopes", "requires grad", "attn_mask"),
    ),
    "relative_bias": (dict(relative_bias=torch.ones(3, 7)), ("relative_bias", "(3, 7)", "4 heads")),
    "relative_bias 3-D": (dict(relative_bias=torch.ones(3, 4, 7)), ("relative_bias", "(3, 4, 7)", "2 sequences")),
    "relative_bias even": (dict(relative_bias=torch.ones(4, 6)), ("relative_bias", "got 6 entries", "odd")),
    "attn_mask 1-D": (dict(attn_mask=torch.ones(7)), ("attn_mask", "(7,)", "(total_q, W)")),
    "attn_mask 4-D": (dict(attn_mask=torch.ones(1, 4, 7, 3)), ("attn_mask", "(1, 4, 7, 3)", "(heads or 1, ")),
    "attn_mask rows": (dict(attn_mask=torch.ones(4, 3)), ("attn_mask", "(4, 3)", "7 query rows")),
    "attn_mask heads": (dict(attn_mask=torch.ones(2, 7, 3)), ("attn_mask", "(2, 7, 3)", "4 heads")),
    "attn_mask without columns": (dict(attn_mask=torch.ones(7, 0)), ("attn_mask", "(7, 0)", "W at least 1")),
    "attn_mask integers": (dict(attn_mask=torch.ones(7, 3).int()), ("attn_mask", "int32", "bool (True = may attend)")),
    "attn_mask device": (dict(attn_mask=torch.ones(7, 3, device="meta")), ("attn_mask", "meta", "cpu")),
    "attn_mask list": (dict(attn_mask=[[True]]), ("attn_mask", "a list", "torch.tensor(attn_mask)")),
    "attn_mask sparse": (dict(attn_mask=torch.ones(7, 3).to_sparse()), ("attn_mask", "Sparse", "dense")),
    "attn_mask grad with out": (
        dict(attn_mask=torch.ones(7, 3, requires_grad=True), out=torch.empty(7, 4, 8)),
        ("out", "while attn_mask requires grad", "no_grad"),
    ),
    "num_splits": (dict(num_splits=0), ("num_splits", "0", "at least 1")),
    "pages without table": (
        dict(key=torch.randn(5, 16, 4, 8), value=torch.randn(5, 16, 4, 8)),
        ("key", "(5, 16, 4, 8)", "(total_k, kv_heads, head_dim)"),
    ),
}
PAGES: BadArguments = {
    "page negative": (dict(block_table=torch.tensor([[0, -1], [4, 0]])), ("block_table", "-1", "[0, 1]", "0 to 4")),
    "page too large": (dict(block_table=torch.tensor([[0, 2], [5, 0]])), ("block_table", "5", "[1, 0]", "0 to 4")),
    "table rows": (dict(block_table=torch.tensor([[0, 2]])), ("block_table", "(1, 2)", "2 sequences")),
    "table 1-D": (dict(block_table=torch.tensor([0, 2])), ("block_table", "(2,)", "(sequences, pages")),
    "table float": (dict(block_table=torch.tensor([[0.0, 2], [4, 0]])), ("block_table", "float32", NEEDS_INTEGERS)),
    "table device": (dict(block_table=torch.zeros(2, 2, dtype=torch.int32, device="meta")), ("block_table", "meta")),
    "keys not in pages": (dict(key=torch.randn(80, 4, 8)), ("key", "(80, 4, 8)", "page_size", "block_table")),
    "page size 0": (
        dict(key=torch.randn(5, 0, 4, 8), value=torch.randn(5, 0, 4, 8)),
        ("key", "(5, 0, 4, 8)", "at least one row"),
    ),
    "value's pages": (dict(value=torch.randn(5, 8, 4, 8)), ("value", "(5, 8, 4, 8)", "(5, 16, 4, 8)")),
    "cu_seq_k beside a table": (dict(cu_seq_k=torch.tensor([0, 4, 9])), ("cu_seq_k", "None", "block_table")),
    "no seqused_k": (dict(seqused_k=None), ("seqused_k", "None", "block_table")),
    "seqused_k too many": (dict(seqused_k=torch.tensor([33, 1])), ("seqused_k", "33", "sequence 0", "0 to 32")),
    "max_k": (dict(max_k=19), ("max_k", "19", "20", "sequence 0")),
    "requires grad": (
        dict(query=torch.randn(7, 4, 8, requires_grad=True)),
        ("block_table", "requires grad", "no_grad"),
    ),
    "attn_mask requires grad": (
        dict(attn_mask=torch.zeros(7, 3, requires_grad=True)),
        ("block_table", "attn_mask requires grad", "no_grad"),
    ),
}


def test_the_calls_that_are_changed_work() -> None:
    for arguments in (varlen_arguments(), paged_arguments()):
        scaledot.varlen_attention(**arguments)


@pytest.mark.parametrize("function", [scaledot.varlen_attention, scaledot.explain_varlen])
@pytest.mark.parametrize("name", PACKED)
def test_bad_packed_arguments(name: str, function: Any) -> None:
    changes, needed = PACKED[name]
    if function is scaledot.explain_varlen and name == "alibi_slopes grad":
        return  # explaining needs no gradient
    with refused(*needed):
        function(**varlen_arguments() | changes)


@pytest.mark.parametrize("name", PAGES)
def test_bad_paged_arguments(name: str) -> None:
    changes, needed = PAGES[name]
    with refused(*needed):
        scaledot.varlen_attention(**paged_arguments() | changes)


@pytest.mark.parametrize("name", ["sparse", "nested"])
def test_bad_layouts_in_inference_mode(name: str) -> None:
    changes, needed = PACKED[name]
    with torch.inference_mode(), refused(*needed):
        scaledot.varlen_attention(**varlen_arguments() | changes)


def test_bad_arguments_of_the_backward() -> None:
    arguments = varlen_arguments()
    output, lse = scaledot.varlen_attention(**arguments, return_lse=True)
    tensors = [arguments[n] for n in ("query", "key", "value", "cu_seq_q", "cu_seq_k")]
    options: list[Any] = [None, 4, 5, 0.0, False, None, False, "lower_right"]
    options += [None, None, None, None]

    def backward(grad: Any, output: Any, lse: Any) -> Any:
        return torch.ops.scaledot.varlen_backward(
            grad, None, *tensors, *[None] * 8, output, lse, *options, [True, True, True, False, False]
        )

    backward(output, output, lse)
    for bad, needed in (
        ((output[:3], output, lse), ("grad_output", "(3, 4, 8)", "(7, 4, 8)")),
        ((output.double(), output, lse), ("grad_output", "float64", "float32")),
        ((output, output.transpose(0, 1), lse), ("output", "(4, 7, 8)", "(7, 4, 8)")),
        ((output, output, lse.T), ("lse", "(7, 4)", "(4, 7)")),
    ):
        with refused(*needed):
            backward(*bad)


@pytest.mark.parametrize("function", [scaledot.varlen_attention, scaledot.explain_varlen])
def test_a_side_of_window_size_has_no_none(function: Any) -> None:
    """Minus one is no limit there, and None is in `window`."""
    for size, error, message in (
        ((-2, 0), ValueError, "window_size: got a left side of -2; needs at least 0, or -1 for no limit"),
        ((1, 2.0), TypeError, "window_size: got a right side of 2.0, a float; needs an integer, -1 for no limit"),
        ((True, 0), TypeError, "window_size: got a left side of True, a bool; needs an integer, -1 for no limit"),
    ):
        with pytest.raises(error) as raised:
            function(**varlen_arguments(), window_size=size)
        assert str(raised.value) == message
