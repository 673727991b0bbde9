"""Calls with one bad argument: the working calls they start from, and the form that their error must have.

Every error that scaledot raises for an argument reads `argument: got X; needs Y`, with shapes as Python prints them.
"""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

Arguments = dict[str, Any]
# name of the test -> (the arguments that are changed, what the message must contain: first the argument's name)
BadArguments = dict[str, tuple[Arguments, tuple[str, ...]]]
BadTensors = dict[str, tuple[Callable[[], Arguments], tuple[str, ...]]]

FORM = re.compile(r"(?P<name>\w+): got .+; needs .+")
REFUSALS = (ValueError, TypeError, RuntimeError)
LONGEST = 240  # characters: a message says what a value is, and never prints a whole array

# torch warns when it makes some of the tensors that are refused.
IGNORED_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Sparse CSR tensor support", "The PyTorch API of nested tensors", "torch.quantize_per_tensor")
]


def named_argument(message: str) -> str:
    """The argument that an error names first. The error must have the one form."""
    first_line = message.splitlines()[0] if message else ""
    found = FORM.fullmatch(first_line)
    assert found, f"not of the form 'argument: got X; needs Y': {message}"
    assert len(first_line) <= LONGEST, f"longer than {LONGEST} characters: {message}"
    assert "INTERNAL ASSERT" not in message
    return found["name"]


@contextmanager
def refused(name: str, *contents: str) -> Iterator[None]:
    """Expects an error about the argument `name`, of the one form, that contains `contents`."""
    with pytest.raises(REFUSALS) as raised:
        yield
    message = str(raised.value)
    assert named_argument(message) == name, f"does not name {name} first: {message}"
    for content in contents:
        assert content in message, f"does not contain {content!r}: {message}"


def shape_of(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def sdpa_arguments() -> Arguments:
    """A call of scaled_dot_product_attention that works."""
    return dict(query=torch.randn(2, 4, 6, 8), key=torch.randn(2, 4, 7, 8), value=torch.randn(2, 4, 7, 8))


def varlen_arguments() -> Arguments:
    """A call of varlen_attention that works: two sequences."""
    return dict(
        query=torch.randn(7, 4, 8),
        key=torch.randn(9, 4, 8),
        value=torch.randn(9, 4, 8),
        cu_seq_q=torch.tensor([0, 3, 7]),
        cu_seq_k=torch.tensor([0, 4, 9]),
        max_q=4,
        max_k=5,
    )


def paged_arguments() -> Arguments:
    """Arguments with keys and values in pages."""
    return dict(
        query=torch.randn(7, 4, 8),
        key=torch.randn(5, 16, 4, 8),
        value=torch.randn(5, 16, 4, 8),
        cu_seq_q=torch.tensor([0, 3, 7]),
        cu_seq_k=None,
        max_q=4,
        max_k=32,
        seqused_k=torch.tensor([20, 16]),
        block_table=torch.tensor([[0, 2], [4, -1]]),
    )
