"""dropin.flash_attn: the forward and backward passes that ring attention and diffusers call by private names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from scaledot.dropin import flash_attn
from scaledot.dropin.flash_attn import flash_attn_func, flash_attn_varlen_func


@pytest.fixture
def interface() -> Iterator[Any]:
    flash_attn.install()
    yield importlib.import_module("flash_attn.flash_attn_interface")
    flash_attn.uninstall()


def qkv(length: int = 9, keys: int = 13) -> tuple[Tensor, ...]:
    q = torch.randn(2, length, 4, 8, requires_grad=True)
    k, v = torch.randn(2, 2, keys, 2, 8).unbind()
    return q, k.requires_grad_(), v.requires_grad_()


def merged(states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys, as rings merge them."""
    lses = torch.stack([lse for _, lse in states])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().transpose(-2, -1).unsqueeze(-1)
    return (torch.stack([out for out, _ in states]) * weights).sum(0), lse


OPTIONS = [
    {"causal": True},
    {"window": (3, 2), "softcap": 5.0},
    {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_dense_passes(interface: Any, options: dict[str, Any]) -> None:
    q, k, v = qkv()
    causal, window, softcap = options.get("causal", False), options.get("window", (-1, -1)), options.get("softcap", 0.0)
    shared = (0.0, 0.3, causal, *window, softcap, options.get("alibi_slopes"))
    out, lse, dmask, rng_state = interface._wrapped_flash_attn_forward(q, k, v, *shared, False)
    wanted, wanted_lse, _ = flash_attn_func(
        q, k, v, 0.0, 0.3, causal, window, softcap, options.get("alibi_slopes"), return_attn_probs=True
    )
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    assert (dmask.numel(), out.is_contiguous()) == (0, True)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(wanted, (q, k, v), dout)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    with torch.no_grad():
        softmax_d = interface._wrapped_flash_attn_backward(
            dout, q, k, v, out, lse, dq, dk, dv, *shared, False, rng_state
        )
    torch.testing.assert_close((dq, dk, dv), gradients)
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(1, 2))


def test_two_parts_of_a_ring(interface: Any) -> None:
    """The backward of each part with the output and lse of all keys, as ring_flash_attn and diffusers call it."""
    q, k, v = qkv(8, 16)
    shared = (0.0, 8**-0.5, False, -1, -1, 0.0, None)
    parts = [slice(0, 8), slice(8, 16)]
    with torch.no_grad():
        states = [interface._flash_attn_forward(q, k[:, p], v[:, p], *shared, False)[:2] for p in parts]
        out, lse = merged(states)
        wanted = flash_attn_func(q, k, v)
        torch.testing.assert_close(out, wanted)
        dout = torch.randn_like(out)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        for p in parts:
            part = torch.empty_like(q)
            interface._flash_attn_backward(
                dout, q, k[:, p], v[:, p], out, lse, part, dk[:, p], dv[:, p], *shared, False, None
            )
            dq += part
    gradients = torch.autograd.grad(flash_attn_func(q, k, v), (q, k, v), dout)
    torch.testing.assert_close((dq, dk, dv), gradients)


def test_packed_passes(interface: Any) -> None:
    q = torch.randn(10, 4, 8, requires_grad=True)
    k, v = torch.randn(2, 12, 2, 8).unbind()
    k.requires_grad_(), v.requires_grad_()
    ends = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = (*ends, 6, 7)
    out, lse, _, rng_state = interface._flash_attn_varlen_forward(q, k, v, *lengths, 0, 0.4, True)
    wanted, wanted_lse, _ = flash_attn_varlen_func(q, k, v, *lengths, 0.0, 0.4, True, return_attn_probs=True)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(wanted, (q, k, v), dout)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with torch.no_grad():
        strided = lse.t().contiguous().t()  # as ring_flash_attn passes it
        softmax_d = interface._flash_attn_varlen_backward(
            dout, q, k, v, out, strided, dq, dk, dv, *lengths, 0, 0.4, True, -1, -1, 0.0, None, False, rng_state
        )
    torch.testing.assert_close((dq, dk, dv), gradients)
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).t())


def test_pages(interface: Any) -> None:
    q, keys = torch.randn(3, 2, 8), torch.randn(2, 6, 4, 2, 8)
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    ends = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0, 7, 11], dtype=torch.int32)
    out, _, _, _ = interface._flash_attn_varlen_forward(q, *keys, *ends, 2, 7, 0.0, 0.4, True, block_table=table)
    wanted = flash_attn_varlen_func(q, *keys, *ends, 2, 7, 0.0, 0.4, True, block_table=table)
    torch.testing.assert_close(out, wanted)


def test_dropout_is_that_of_the_forward(interface: Any) -> None:
    q, k, v = (x.detach() for x in qkv())
    shared = (0.3, 0.3, False, -1, -1, 0.0, None)
    out, lse, weights, rng_state = interface._flash_attn_forward(q, k, v, *shared, True)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2)))
    dout, dv = torch.randn_like(out), torch.empty_like(v)
    interface._flash_attn_backward(dout, q, k, v, out, lse, None, None, dv, *shared, False, rng_state)
    wanted = torch.einsum("bhij,bihd->bjhd", weights, dout).unflatten(2, (2, 2)).sum(3)
    torch.testing.assert_close(dv, wanted)
    with pytest.raises(ValueError, match="rng_state: got None with dropout_p > 0; needs the fourth result"):
        interface._flash_attn_backward(dout, q, k, v, out, lse, None, None, dv, *shared, False)


def test_refused_by_name(interface: Any) -> None:
    q, ends = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    packed = (q, q, q, ends, ends, 4, 4)
    with pytest.raises(ValueError, match="leftpad_k: got a tensor; needs None"):
        interface._flash_attn_varlen_forward(*packed, 0.0, 0.4, True, leftpad_k=ends[1:])
    with pytest.raises(ValueError, match="return_softmax: got True with dropout_p > 0; needs False"):
        interface._flash_attn_varlen_forward(*packed, 0.5, 0.4, True, return_softmax=True)
    with pytest.raises(ValueError, match="k: got a head dimension of 4; needs 8, as q"):
        interface._flash_attn_forward(q[None], q[None, ..., :4], q[None], 0.0, 1.0, False, -1, -1, 0.0, None, False)
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.ops"):
        importlib.import_module("flash_attn.ops.triton.cross_entropy")


def test_signatures_are_those_that_libraries_read(interface: Any) -> None:
    """ring_flash_attn fills calls from the defaults of a function's signature."""
    packed = inspect.getfullargspec(interface._flash_attn_varlen_forward)
    assert packed.args[-12:] == [
        "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes",
        "return_softmax", "block_table", "leftpad_k", "seqused_k", "zero_tensors",
    ]  # fmt: skip
    assert packed.defaults == (-1, -1, 0.0, None, False, None, None, None, False)
    for name in ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_backward"):
        assert "window_size_left" in inspect.getfullargspec(getattr(interface, name)).args
        assert getattr(interface, f"_wrapped{name}") is getattr(interface, name)
