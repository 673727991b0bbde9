"""A BlockMask of torch's that changes after its first use."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import scaledot

LENGTH, BLOCK = 96, 32
_LIMIT = torch.tensor(9)


class Limit(torch.nn.Module):
    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(9))

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < self.limit


class LimitObject:
    def __init__(self) -> None:
        self.numbers = [9]

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < self.numbers[0]


def of_closure() -> tuple[Any, Callable[[int], None]]:
    limit = torch.tensor(9)
    return lambda b, h, i, j: j < limit, lambda n: limit.fill_(n)


def of_nested_closure() -> tuple[Any, Callable[[int], None]]:
    inner, change = of_closure()
    return lambda b, h, i, j: inner(b, h, i, j) & (i >= 0), change


def of_number() -> tuple[Any, Callable[[int], None]]:
    limit = 9

    def change(n: int) -> None:
        nonlocal limit
        limit = n

    return lambda b, h, i, j: j < limit, change


def of_partial() -> tuple[Any, Callable[[int], None]]:
    limit = torch.tensor(9)

    def visible(most: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < most

    return functools.partial(visible, limit), lambda n: limit.fill_(n)


def of_module() -> tuple[Any, Callable[[int], None]]:
    module = Limit()
    return lambda b, h, i, j: module.visible(b, h, i, j), lambda n: module.limit.fill_(n)


def of_object() -> tuple[Any, Callable[[int], None]]:
    limit = LimitObject()
    return limit, lambda n: limit.numbers.__setitem__(0, n)


def of_inner_object() -> tuple[Any, Callable[[int], None]]:
    outer = types.SimpleNamespace(inner=LimitObject())

    def change(n: int) -> None:
        outer.inner.numbers[0] = n

    return lambda b, h, i, j: j < outer.inner.numbers[0], change


def of_global() -> tuple[Any, Callable[[int], None]]:
    _LIMIT.fill_(9)
    return lambda b, h, i, j: j < _LIMIT, lambda n: _LIMIT.fill_(n)


def of_inner_function() -> tuple[Any, Callable[[int], None]]:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (lambda key: key < _LIMIT)(j)

    _LIMIT.fill_(9)
    return mask_mod, lambda n: _LIMIT.fill_(n)


def masked(mask: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    return scaledot.scaled_dot_product_attention(*tensors, block_mask=mask)


@pytest.mark.parametrize(
    "make",
    [
        of_closure,
        of_nested_closure,
        of_number,
        of_partial,
        of_module,
        of_object,
        of_inner_object,
        of_global,
        of_inner_function,
    ],
)
def test_what_a_mask_mod_captures_may_change(make: Callable[[], tuple[Any, Callable[[int], None]]]) -> None:
    tensors = torch.randn(3, 1, 2, LENGTH, 8).unbind()
    mask_mod, change = make()
    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    for limit in (9, 40, 3, 96):
        change(limit)
        wanted = scaledot.scaled_dot_product_attention(*tensors, torch.arange(LENGTH) < limit)
        torch.testing.assert_close(masked(mask, tensors), wanted)


def test_a_mask_mod_may_be_replaced() -> None:
    tensors = torch.randn(3, 1, 2, LENGTH, 8).unbind()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    masked(mask, tensors)
    mask.mask_mod = lambda b, h, i, j: (i >= j) & (i - j < 3)
    dense = create_mask(mask.mask_mod, 1, 1, LENGTH, LENGTH, device="cpu")
    torch.testing.assert_close(masked(mask, tensors), scaledot.scaled_dot_product_attention(*tensors, dense))


def test_lists_of_blocks_may_change() -> None:
    tensors = torch.randn(3, 1, 2, LENGTH, 8).unbind()
    mask = create_block_mask(lambda b, h, i, j: j >= 0, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    masked(mask, tensors)
    mask.full_kv_num_blocks.fill_(1)  # of each row of blocks, the first block that is listed
    first = int(mask.full_kv_indices[0, 0, 0, 0])
    allowed = torch.arange(LENGTH) // BLOCK == first
    torch.testing.assert_close(masked(mask, tensors), scaledot.scaled_dot_product_attention(*tensors, allowed))


def test_an_unchanged_mask_is_converted_once() -> None:
    calls = []
    limit = torch.tensor(9)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        calls.append(None)
        return j < limit

    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    first = scaledot.BlockMask.from_torch(mask)
    assert scaledot.BlockMask.from_torch(mask) is not None
    count = len(calls)
    again = scaledot.BlockMask.from_torch(mask)
    assert len(calls) == count
    assert torch.equal(again.to_dense(), first.to_dense())
