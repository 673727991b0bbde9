"""scaledot.masks: the masks, their agreement with is_causal and window, and their errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import scaledot
from scaledot.masks import causal_mask, padding_mask, sliding_window_mask


def rows(mask: Tensor) -> list[str]:
    return ["".join(".x"[int(attends)] for attends in row) for row in mask]


def test_causal() -> None:
    assert rows(causal_mask(3)) == ["x..", "xx.", "xxx"]
    assert rows(causal_mask(2, 4)) == ["x...", "xx.."]
    assert rows(causal_mask(2, 4, causal_alignment="lower_right")) == ["xxx.", "xxxx"]
    assert rows(causal_mask(3, 1, causal_alignment="lower_right")) == [".", ".", "x"]
    mask = causal_mask(3, device="meta")
    assert mask.device.type == "meta"
    assert mask.dtype == torch.bool


def test_sliding_window() -> None:
    assert rows(sliding_window_mask(4, window=(1, 0))) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(sliding_window_mask(3, window=(None, 1))) == ["xx.", "xxx", "xxx"]
    assert rows(sliding_window_mask(3, window=(None, None))) == ["xxx"] * 3
    assert rows(sliding_window_mask(2, 4, window=(1, 0), causal_alignment="lower_right")) == [".xx.", "..xx"]


def test_padding() -> None:
    assert padding_mask([1, 3]).shape == (2, 1, 1, 3)
    assert rows(padding_mask([1, 3])[:, 0, 0]) == ["x..", "xxx"]
    assert rows(padding_mask(torch.tensor([0, 2], dtype=torch.int32), 4)[:, 0, 0]) == ["....", "xx.."]
    assert rows(padding_mask([1, 2], 3, padding_side="left")[:, 0, 0]) == ["..x", ".xx"]
    assert padding_mask([]).shape == (0, 1, 1, 0)
    assert padding_mask([0, 0]).shape == (2, 1, 1, 0)


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3)])
def test_masks_agree_with_the_options(lengths: tuple[int, int], alignment: str) -> None:
    query = torch.randn(2, 3, lengths[0], 8)
    key, value = torch.randn(2, 2, 3, lengths[1], 8).unbind()

    def attend(**options: object) -> Tensor:
        return scaledot.scaled_dot_product_attention(query, key, value, return_weights=True, **options)[1]

    aligned = {"causal_alignment": alignment}
    torch.testing.assert_close(attend(attn_mask=causal_mask(*lengths, **aligned)), attend(is_causal=True, **aligned))
    for window in ((1, 0), (None, 2), (2, None), (0, 0)):
        torch.testing.assert_close(
            attend(attn_mask=sliding_window_mask(*lengths, window=window, **aligned)),
            attend(window=window, **aligned),
        )


def test_masks_combine_by_and() -> None:
    query = torch.randn(2, 3, 4, 8)
    mask = causal_mask(4) & padding_mask([4, 2])
    assert mask.shape == (2, 1, 4, 4)
    weights = scaledot.scaled_dot_product_attention(query, query, query, mask, return_weights=True)[1]
    assert (weights > 0).equal(mask.expand(2, 3, 4, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: causal_mask(-1), ValueError, "query_length: got -1"),
        (lambda: causal_mask(3, -2), ValueError, "key_length: got -2"),
        (lambda: causal_mask(3.0), TypeError, "query_length: got 3.0"),
        (lambda: causal_mask(True), TypeError, "query_length: got True"),
        (lambda: causal_mask(3, causal_alignment="right"), ValueError, "causal_alignment: got 'right'"),
        (lambda: sliding_window_mask(3, window=2), TypeError, "window: got 2"),
        (lambda: sliding_window_mask(3, window=(1, 2, 3)), TypeError, "window: got"),
        (lambda: sliding_window_mask(3, window=(-1, 0)), ValueError, "window: got a left side of -1; needs at least 0"),
        (
            lambda: sliding_window_mask(3, window=(0, -1)),
            ValueError,
            "window: got a right side of -1; needs at least 0",
        ),
        (lambda: sliding_window_mask(3, window=(1.5, 0)), TypeError, r"window: got a left side of 1\.5"),
        (lambda: padding_mask("ab"), TypeError, "lengths: got 'ab', a str; needs a tensor or a sequence of integers"),
        (lambda: padding_mask(None), TypeError, "lengths: got None; needs a tensor"),
        (lambda: padding_mask([[1], [2, 3]]), TypeError, "lengths: got a list; needs a tensor"),
        (lambda: padding_mask([1], torch.ones(9)), TypeError, r"key_length: got a torch.Tensor of shape \(9,\); needs"),
        (lambda: padding_mask(3), ValueError, "lengths: got shape"),
        (lambda: padding_mask([[1], [2]]), ValueError, "lengths: got shape"),
        (lambda: padding_mask([1.5]), TypeError, "lengths: got dtype"),
        (lambda: padding_mask([True]), TypeError, "lengths: got dtype"),
        (lambda: padding_mask([-1]), ValueError, "lengths: got -1"),
        (lambda: padding_mask([3], 2), ValueError, "key_length: got 2; needs at least 3"),
        (lambda: padding_mask([3], padding_side="top"), ValueError, "padding_side: got 'top'"),
    ],
)
def test_errors(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
