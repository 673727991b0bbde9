"""torch.fx.symbolic_trace, which torchvision's feature extractor and FX quantisation call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import scaledot
from scaledot import scaled_dot_product_attention
from scaledot.dropin.split_heads import SplitHeadAttention
from scaledot.dropin.torch_nn import convert


class Block(nn.Module):
    def __init__(self, attention: nn.Module, **options: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList([attention])
        self.linear = nn.Linear(16, 16)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.layers[0](x, x, x, **self.options)[0])


class Call(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x, window=(2, 0), is_causal=True) + 1


class Checked(nn.Module):
    """SplitHeadAttention checks its inputs, and is no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SplitHeadAttention(8, 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)


BLOCKS = {
    "converted": lambda: convert(Block(nn.MultiheadAttention(16, 4, batch_first=True))),
    "converted, options": lambda: convert(
        Block(nn.MultiheadAttention(16, 4, batch_first=True), need_weights=True, average_attn_weights=False)
    ),
    "scaledot": lambda: Block(scaledot.MultiHeadAttention(16, 4)),
    "scaledot, options": lambda: Block(scaledot.MultiHeadAttention(16, 4), is_causal=True, window=(1, 0)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_module_is_one_call(name: str) -> None:
    model = BLOCKS[name]()
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["layers.0", "linear"]
    x = torch.randn(2, 5, 16, requires_grad=True)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)
    expected = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(copy.deepcopy(traced)(x).sum(), x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", BLOCKS)
def test_fx_quantisation_quantises_the_other_layers(name: str) -> None:
    model, x = BLOCKS[name]().eval(), torch.randn(2, 5, 16)
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    torch.testing.assert_close(prepared(x), model(x), rtol=0, atol=0)
    quantised = convert_fx(prepared)
    assert type(quantised.linear) is not nn.Linear
    assert (quantised(x) - model(x)).abs().max() < 0.1


def test_function_is_one_call() -> None:
    traced = torch.fx.symbolic_trace(Call())
    assert scaled_dot_product_attention in [node.target for node in traced.graph.nodes]
    x = torch.randn(2, 4, 5, 8)
    torch.testing.assert_close(traced(x), Call()(x), rtol=0, atol=0)


def test_errors_name_what_torch_fx_can_trace() -> None:
    with pytest.raises(TypeError, match=r"X: got a torch\.Proxy; needs a torch\.Tensor; torch\.fx records .*fx\.wrap"):
        torch.fx.symbolic_trace(Checked())
    with pytest.raises(TypeError, match="module that is traced must contain it"):
        torch.fx.symbolic_trace(scaledot.MultiHeadAttention(16, 4))
