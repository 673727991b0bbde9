"""dropin.sdpa gives its output the strides of torch's, so programs traced with one of the two run with the other."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import scaledot
from scaledot.dropin import sdpa

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is not supported"),
]

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "B, H, L, D": lambda: torch.randn(2, 4, 5, 8),
    "B, L, H, D": lambda: torch.randn(2, 5, 4, 8).transpose(1, 2),
    "L, B, H, D": lambda: torch.randn(5, 2, 4, 8).permute(1, 2, 0, 3),
    "H, L, B, D": lambda: torch.randn(4, 5, 2, 8).permute(2, 0, 1, 3),
    "a part of B, L, H, 3 D": lambda: torch.randn(2, 5, 4, 24).transpose(1, 2)[..., 8:16],
    "every other of B, 2 L, H, D": lambda: torch.randn(2, 10, 4, 8)[:, ::2].transpose(1, 2),
    "one batch entry": lambda: torch.randn(3, 5, 4, 8).transpose(1, 2)[1:2],
    "one head": lambda: torch.randn(2, 5, 4, 8).transpose(1, 2)[:, 2:3],
    "one row": lambda: torch.randn(2, 1, 4, 8).transpose(1, 2),
    "one row of many": lambda: torch.randn(2, 5, 4, 8).transpose(1, 2)[:, :, 3:4],
    "expanded batch": lambda: torch.randn(1, 4, 5, 8).expand(2, 4, 5, 8),
    "expanded heads": lambda: torch.randn(2, 1, 5, 8).expand(2, 4, 5, 8),
    "L, D last": lambda: torch.randn(2, 4, 8, 5).mT,
    "no batch entries": lambda: torch.randn(2, 5, 4, 8).transpose(1, 2)[:0],
    "no rows": lambda: torch.randn(2, 5, 4, 8).transpose(1, 2)[:, :, :0],
}

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "mask": lambda x: F.scaled_dot_product_attention(x, x, x, x.new_ones(x.size(-2), x.size(-2)).tril().bool()),
    "dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "wide values": lambda x: F.scaled_dot_product_attention(x, x, torch.cat([x, x], -1)),
    "grouped heads": lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True),
    "keys of one entry": lambda x: F.scaled_dot_product_attention(x, x[:1], x[:1]),
    "keys without a batch": lambda x: F.scaled_dot_product_attention(x, x.flatten(0, 1)[:1], x.flatten(0, 1)[:1]),
    "other keys": lambda x: F.scaled_dot_product_attention(x, *[torch.cat([x, x], 2)] * 2),
    "no keys": lambda x: F.scaled_dot_product_attention(x, x[:, :, :0], x[:, :, :0]),
    "5-D": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "3-D": lambda x: F.scaled_dot_product_attention(x.flatten(0, 1), x.flatten(0, 1), x.flatten(0, 1)),
}  # fmt: skip


def strides(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Those that mean something: not of a dimension of size 1, where torch's own differ, and not without elements."""
    try:
        with x.fake_mode if isinstance(x, FakeTensor) else contextlib.nullcontext():
            output = call(x)
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        return type(error)
    return output.numel() and [stride for stride, size in zip(output.stride(), output.shape, strict=True) if size > 1]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_torchs(name: str, layout: str) -> None:
    x, call = LAYOUTS[layout](), CALLS[name]
    inputs = [x, x.detach().requires_grad_(), FakeTensorMode().from_tensor(x)]
    expected = [strides(call, one) for one in inputs]
    with sdpa.activate() as activation:
        found = [strides(call, one) for one in inputs]
    assert found == expected
    assert activation.calls == 3 or activation.fallthrough.total() == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_number(layout: str) -> None:
    x = LAYOUTS[layout]()
    grad_output = torch.randn(x.shape)
    results = []
    with sdpa.activate() as activation:
        for function in (scaledot.scaled_dot_product_attention, F.scaled_dot_product_attention):
            leaf = x.detach().requires_grad_()
            output = function(leaf, leaf, leaf, is_causal=True)
            results.append((output, *torch.autograd.grad(output, leaf, grad_output)))
    assert activation.calls == 1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Flash attention kernel not used", "ignore:Flash Attention has been")
def test_strides_with_sdpa_kernel() -> None:
    """The strides are those of the kernel that is allowed. Where none is, the call still runs."""
    x = LAYOUTS["B, L, H, D"]()
    with sdpa.activate() as activation:
        with sdpa_kernel(SDPBackend.MATH):
            assert strides(CALLS["plain"], x) == [160, 40, 8, 1]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert strides(CALLS["plain"], x) == [160, 8, 32, 1]
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            assert strides(CALLS["plain"], x) == [160, 40, 8, 1]
    assert activation.calls == 3


# ------------------------------------------------------------------------------- programs traced on one side
class Viewed(nn.Module):
    """Its views and its contiguous(), which torch leaves out of traces where it does nothing, need torch's strides."""

    def __init__(self, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.dropout_p = dropout_p

    def forward(self, x: Tensor) -> Tensor:
        by_head = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        by_row = x.transpose(1, 2).contiguous().transpose(1, 2)
        other = F.scaled_dot_product_attention(by_row, by_row, by_row)
        dropped = F.scaled_dot_product_attention(by_row, by_row, torch.cat([by_row, by_row], -1))
        rows = x.size(1) * x.size(2)
        joined = by_head.contiguous().view(-1, rows * 8) + other.transpose(1, 2).contiguous().view(-1, rows * 8)
        return (
            joined
            + dropped[..., :8].contiguous().view(-1, rows * 8)
            + dropped.view(-1, rows, 16)[..., :1].flatten(1).mean()
        )


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x[0], x[0], x[0], need_weights=False)[0]
        return output


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "views": Viewed,
    "nn.MHA, batch first": lambda: Attention(batch_first=True),
    "nn.MHA, eval": lambda: Attention(batch_first=True).eval(),
}


def scripted(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, (x,), check_trace=False), file)
    file.seek(0)
    return torch.jit.load(file)  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "decompositions": lambda model, x: torch.export.export(model, (x,)).run_decompositions().module(),
    "trace": scripted,
    "compile": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compile, dynamic": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True),
}


def on_side(active: bool, call: Callable[[], Any]) -> Any:
    if not active:
        return call()
    with sdpa.activate():
        return call()


# torch's own decomposition of F.sdpa has other strides than F.sdpa, so torch alone cannot decompose `Viewed`.
PAIRS = [(name, maker) for name in PROGRAMS for maker in MAKERS if (name, maker) != ("views", "decompositions")]


@pytest.mark.parametrize(("name", "maker"), PAIRS)
@pytest.mark.parametrize("made_active", [False, True])
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean", "ignore:`isinstance.treespec")
def test_programs_run_on_the_other_side(name: str, maker: str, made_active: bool) -> None:
    torch.manual_seed(0)
    model, x = PROGRAMS[name](), torch.randn(2, 4, 5, 8, requires_grad=True)
    expected = model(x)
    grad_output = torch.randn_like(expected)
    expected_gradient = torch.autograd.grad(expected, x, grad_output)
    torch._dynamo.reset()
    program = on_side(made_active, lambda: MAKERS[maker](model, x.detach()))
    for run_active in (made_active, not made_active):

        def run() -> Any:
            output = program(x)
            return output, *torch.autograd.grad(output, x, grad_output)

        torch.testing.assert_close(on_side(run_active, run), (expected, *expected_gradient), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
