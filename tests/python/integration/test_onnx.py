"""torch.onnx.export(dynamo=True), as it is, and the exported models in ONNX Runtime."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import scaledot
from scaledot.dropin import torch_nn

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _without_log() -> Iterator[None]:
    """torch's exporter warns of each operator of torchvision, which is not needed."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Function(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **tensors: Tensor) -> Any:
        return scaledot.scaled_dot_product_attention(query, key, value, **tensors, **self.options)


class Plain(Function):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, value)


def qkv(dtype: torch.dtype = torch.float32, rows: int = 10, keys: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(2, 4, rows, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 8)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def doubled(tensor: Any) -> Any:
    return tensor.double() if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor


def check(model: nn.Module, args: tuple[Any, ...], kwargs: Any = None, **options: Any) -> list[str]:
    """The operators of the exported model. ONNX Runtime's results are those of `model` in float64, but for rounding."""
    kwargs = kwargs or {}
    program = torch.onnx.export(model, args, kwargs=kwargs, dynamo=True, verbose=False, **options)
    assert program is not None
    exact = copy.deepcopy(model).double()(*map(doubled, args), **{name: doubled(t) for name, t in kwargs.items()})
    wanted = [t for t in (exact if isinstance(exact, tuple) else (exact,)) if t is not None]
    for found, result in zip(program(*args, **kwargs), wanted, strict=True):
        rounding = 4 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), result, rtol=rounding, atol=rounding)
    return [node.op_type for node in program.model.graph]


def _near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() % 3 < 2


CALLS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True, "causal_alignment": "lower_right"}, {}),
    "results": ({"window": (3, 1), "softcap": 5.0, "return_weights": True, "return_lse": True}, {}),
    "mask": ({"scale": 0.3}, {"attn_mask": torch.rand(2, 1, 10, 12) < 0.5, "alibi_slopes": torch.rand(4)}),
    "bias": ({"softcap": 1.7}, {"relative_bias": torch.randn(4, 15)}),
    "blocks": ({"block_mask": scaledot.BlockMask.from_mask_mod(_near, None, None, 100, 140, 70)}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CALLS)
def test_the_function_runs_in_onnx_runtime(name: str, dtype: torch.dtype) -> None:
    options, tensors = CALLS[name]
    lengths = (100, 140) if name == "blocks" else (10, 12)
    check(Function(enable_gqa=True, **options), qkv(dtype, *lengths), tensors)


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("is_causal", [False, True])
def test_plain_calls_are_the_attention_operator(opset: int, is_causal: bool) -> None:
    query = torch.randn(2, 4, 10, 16)
    options = {"opset_version": opset}
    assert "Attention" in check(Function(is_causal=is_causal), (query, query, query), **options)
    assert "Attention" in check(Function(enable_gqa=True, is_causal=is_causal), qkv(), **options)
    assert "Attention" not in check(Function(enable_gqa=True, window=(2, 2)), qkv(), **options)


def test_score_functions_run_in_onnx_runtime() -> None:
    bias = torch.randn(4, 21)
    check(Plain(enable_gqa=True, score_mod=lambda s, b, h, i, j: torch.tanh(s) + bias[h, i - j + 11]), qkv())


def test_sizes_may_change() -> None:
    batch, rows, keys = Dim("batch"), Dim("rows"), Dim("keys")
    model = Plain(enable_gqa=True, is_causal=True, causal_alignment="lower_right")
    shapes = {0: batch, 2: rows}, {0: batch, 2: keys}, {0: batch, 2: keys}
    program = torch.onnx.export(model, qkv(), dynamo=True, verbose=False, dynamic_shapes=shapes)
    assert program is not None
    query, key, value = qkv(keys=30)
    given = query[:1, :, :5], key[:1], value[:1]
    torch.testing.assert_close(program(*given)[0], model(*given))


def test_modules_run_in_onnx_runtime() -> None:
    x, key_mask = torch.randn(3, 7, 16), torch.arange(7) < torch.tensor([[7], [5], [2]])
    check(scaledot.MultiHeadAttention(16, 4, num_kv_heads=2).eval(), (x,), {"key_mask": key_mask, "is_causal": True})
    plain = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    check(torch_nn.convert(plain), (x, x, x), {"key_padding_mask": ~key_mask})
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    check(torch_nn.convert(layer), (x,), {"src_key_padding_mask": ~key_mask})


def test_dropout_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="decompose") as error:
        torch.onnx.export(Function(dropout_p=0.5), (torch.randn(1, 2, 4, 8),) * 3, dynamo=True, verbose=False)
    causes = [error.value]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert "dropout_p: got a number above 0, which has no decomposition" in "".join(map(str, causes))
