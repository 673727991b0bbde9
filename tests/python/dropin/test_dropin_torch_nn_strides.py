"""A converted nn.MultiheadAttention gives its results the strides of torch's, so each runs in the other's programs."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import export, unflatten

from scaledot.dropin import torch_nn

X = torch.randn(3, 5, 8)
PADDING = torch.zeros(3, 5, dtype=torch.bool)
PADDING[1, 3:] = True
MODULES: dict[str, dict[str, Any]] = {
    "batch first": dict(batch_first=True),
    "length first": {},
    "odd heads": dict(batch_first=True, num_heads=1),
    "no bias": dict(batch_first=True, bias=False),
    "kdim": dict(batch_first=True, kdim=8, vdim=8, add_bias_kv=True),
    "zero_attn": dict(batch_first=True, add_zero_attn=True),
}  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {
    "plain": dict(need_weights=False),
    "weights": {},
    "weights of heads": dict(average_attn_weights=False),
    "padding": dict(key_padding_mask=PADDING),
    "floating mask": dict(attn_mask=torch.randn(5, 5), need_weights=False),
}  # fmt: skip


def pair(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    theirs = nn.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2} | options)
    ours = torch_nn.convert(nn.ModuleList([copy.deepcopy(theirs)]))[0]
    assert [type(theirs), type(ours)] == [nn.MultiheadAttention, torch_nn.MultiheadAttention]
    return theirs, ours  # type: ignore[return-value]


def to_meta(option: Any) -> Any:
    return option.to("meta") if isinstance(option, Tensor) else option


def strides(module: nn.Module, x: Tensor, options: dict[str, Any], self_attention: bool) -> list[Any]:
    key = x if self_attention else x.clone()
    results = module(x, key, key, **options)  # torch's fused operator gives empty weights to fake tensors, not None
    return [None if result is None or not result.numel() else result.stride() for result in results]


@pytest.mark.parametrize("where", ["training", "eval", "no_grad", "fake", "meta"])
@pytest.mark.parametrize("self_attention", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_strides_are_torchs(module: str, call: str, self_attention: bool, where: str) -> None:
    options, x = CALLS[call], X if MODULES[module].get("batch_first") else X.transpose(0, 1).contiguous()
    modules = [m.train(where == "training") for m in pair(**MODULES[module])]
    with torch.set_grad_enabled(where in ("training", "eval")):
        if where == "fake":
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                found = [strides(m, mode.from_tensor(x), options, self_attention) for m in modules]
        elif where == "meta":
            options = {name: to_meta(option) for name, option in options.items()}
            found = [strides(m.to("meta"), x.to("meta"), options, self_attention) for m in modules]
        else:
            found = [strides(m, x, options, self_attention) for m in modules]
    assert found[1] == found[0]


class Viewed(nn.Module):
    """Its view is one of torch's output, of which contiguous() copies nothing."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output.transpose(0, 1).contiguous().view(-1, 24)


@pytest.mark.parametrize("made_with", ["torch's", "ours"])
def test_a_program_runs_with_the_other_module(made_with: str) -> None:
    theirs, ours = pair(batch_first=True)
    first, second = (theirs, ours) if made_with == "torch's" else (ours, theirs)
    program = export(Viewed(first), (X,), preserve_module_call_signature=("attention",), strict=False)
    parts = unflatten(program)
    expected = parts(X)
    parts.attention = second
    torch.testing.assert_close(parts(X), expected)
