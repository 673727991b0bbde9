"""Tensors whose storage is smaller than they claim: refused by name, never read.

A storage that is resized under its tensors leaves their sizes as they were. FSDP frees parameters so.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import scaledot
from bad_arguments import paged_arguments, refused, sdpa_arguments, varlen_arguments


def shrunk(tensor: Tensor, left: int) -> Tensor:
    """A copy of the tensor, on a storage of `left` bytes."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(left)
    return copy


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "alibi_slopes", "relative_bias"])
def test_a_shrunk_tensor_of_sdpa(name: str, left: int) -> None:
    arguments = sdpa_arguments() | {"attn_mask": torch.randn(6, 7), "alibi_slopes": torch.rand(4)}
    arguments["relative_bias"] = torch.randn(4, 5)
    scaledot.scaled_dot_product_attention(**arguments)
    arguments[name] = shrunk(arguments[name], left)
    with refused(name, f"on a storage of {left} bytes", "the storage was resized"):
        scaledot.scaled_dot_product_attention(**arguments)


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize(
    "name", ["query", "key", "value", "cu_seq_q", "cu_seq_k", "seqused_k", "alibi_slopes", "relative_bias"]
)
def test_a_shrunk_tensor_of_varlen(name: str, left: int) -> None:
    arguments = varlen_arguments() | {"seqused_k": torch.tensor([3, 5]), "alibi_slopes": torch.rand(4)}
    arguments["relative_bias"] = torch.randn(4, 5)
    scaledot.varlen_attention(**arguments)
    arguments[name] = shrunk(arguments[name], left)
    with refused(name, f"on a storage of {left} bytes"):
        scaledot.varlen_attention(**arguments)


@pytest.mark.parametrize("name", ["key", "value", "seqused_k", "block_table"])
def test_a_shrunk_tensor_of_paged_varlen(name: str) -> None:
    arguments = paged_arguments()
    arguments[name] = shrunk(arguments[name], 4)
    with refused(name, "on a storage of 4 bytes"):
        scaledot.varlen_attention(**arguments)


def test_shrunk_lengths_are_not_read_by_explain_varlen() -> None:
    arguments = varlen_arguments()
    arguments["cu_seq_k"] = shrunk(arguments["cu_seq_k"], 0)
    with refused("cu_seq_k", "on a storage of 0 bytes"):
        scaledot.explain_varlen(**arguments)


def test_a_storage_that_is_resized_under_a_view() -> None:
    """The view's last element counts, not the size of its base."""
    pool = torch.randn(64, 4, 7, 8)
    arguments = sdpa_arguments() | {"key": pool[1:3], "value": pool[:2]}
    wanted = scaledot.scaled_dot_product_attention(**arguments)
    entry = 4 * 7 * 8 * 4  # bytes
    pool.untyped_storage().resize_(3 * entry)
    assert torch.equal(scaledot.scaled_dot_product_attention(**arguments), wanted)
    pool.untyped_storage().resize_(3 * entry - 4)
    with refused("key", f"needs {3 * entry} bytes"):
        scaledot.scaled_dot_product_attention(**arguments)


@pytest.mark.parametrize("name", ["query", "value", "grad_output"])
def test_a_storage_that_is_resized_before_the_backward(name: str) -> None:
    tensors = {key: t.requires_grad_() for key, t in sdpa_arguments().items()}
    output = scaledot.scaled_dot_product_attention(**tensors)
    tensors["grad_output"] = torch.randn_like(output)
    tensors[name].untyped_storage().resize_(16)
    with refused(name, "on a storage of 16 bytes"):
        torch.autograd.grad(output, tensors["key"], tensors["grad_output"])


def test_overlapping_and_empty_tensors_are_none_of_these() -> None:
    base = torch.randn(40)
    query = base.as_strided((2, 4, 6, 8), (0, 1, 2, 1), 3)
    assert scaledot.scaled_dot_product_attention(query, query, query).isfinite().all()
    empty = torch.randn(2, 4, 0, 8)
    empty.untyped_storage().resize_(0)
    assert scaledot.scaled_dot_product_attention(empty, query, query).shape == (2, 4, 0, 8)
