"""Short calls save their softmax for the backward: the rule, the gradients in both ways, and torch's transforms."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import scaledot
from cases import Case
from kernels_under_test import sdpa as case_sdpa
from scaledot import explain, save_for_backward, scaled_dot_product_attention

MIB = 1 << 20


def inputs(
    length: int = 64, keys: int | None = None, dim: int = 32, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Values are wider than keys, so that short calls save their softmax."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((length, dim), (keys or length, dim), (keys or length, dim + 8))
    query, key, value = (torch.randn(2, 3, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return query, key, value


def gradients(attention: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    output = attention(*leaves)
    generator = torch.Generator().manual_seed(3)
    return torch.autograd.grad(output, leaves, torch.randn(output.shape, generator=generator).to(output.dtype))


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes of the tensors that a call saves for the backward and that are none of its inputs and outputs."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(sizes.values())


# ------------------------------------------------------------------------------------------------ the rule
@pytest.mark.parametrize(
    ("query", "key", "value_dim", "dtype", "kept"),
    [
        ((1, 8, 256, 64), (1, 8, 256, 64), 96, torch.float32, 256),
        ((1, 8, 256, 64), (1, 8, 256, 64), 64, torch.float32, 0),  # nothing that pays
        ((1, 8, 512, 64), (1, 8, 512, 64), 96, torch.float32, 256),  # half of the keys fit
        ((1, 8, 512, 128), (1, 8, 512, 128), 192, torch.float32, 512),
        ((1, 8, 640, 64), (1, 8, 640, 64), 96, torch.float32, 0),  # less than half of them
        ((1, 8, 256, 64), (1, 8, 256, 64), 96, torch.float64, 256),
        ((1, 8, 256, 64), (1, 8, 256, 64), 96, torch.bfloat16, 0),
        ((1, 8, 15, 64), (1, 8, 256, 64), 96, torch.float32, 0),
        ((1, 8, 256, 64), (1, 8, 15, 64), 96, torch.float32, 0),
        ((1, 8, 16, 64), (1, 8, 17, 64), 96, torch.float32, 17),
        ((1, 8, 256, 64), (1, 8, 100, 64), 96, torch.float32, 100),
        ((1, 8, 16384, 64), (1, 8, 16384, 64), 96, torch.float32, 0),
        ((512, 8, 256, 64), (512, 8, 256, 64), 96, torch.float32, 0),  # more than 64 MiB
    ],
)
def test_the_rule(query: tuple[int, ...], key: tuple[int, ...], value_dim: int, dtype: torch.dtype, kept: int) -> None:
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in (query, key))
    v = torch.empty(*key[:-1], value_dim, dtype=dtype, device="meta")
    found = explain(q, k, v).saved
    assert found is not None
    assert found.keys == kept
    assert bool(found.reason) == (kept < key[-2])
    assert (f"the softmax of {kept} keys" if kept else "no softmax") in str(found)
    assert ("  saves " in str(explain(q, k, v))) == (kept > 0 or dtype == torch.bfloat16)


def test_the_options_of_the_rule() -> None:
    """Dropout and a mask's gradient keep weights; a mask without one, and any other option, do not."""
    x, mask = torch.empty(1, 8, 256, 64), torch.zeros(256, 256)
    for options, kept in (
        (dict(), 0),
        (dict(is_causal=True), 0),
        (dict(dropout_p=0.1), 256),
        (dict(attn_mask=mask), 0),
        (dict(attn_mask=mask.clone().requires_grad_()), 256),
        (dict(attn_mask=mask.clone().requires_grad_(), is_causal=True), 256),
        (dict(dropout_p=0.1, softcap=2.0), 0),
    ):
        choice = explain(x, x, x, **options).saved
        assert choice is not None
        assert choice.keys == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_softmax_bytes_are_bounded(dtype: torch.dtype) -> None:
    """By the bytes of query, key, value and output, and by 64 MiB."""
    for heads, length, keys, dim in itertools.product((1, 8, 64), (16, 100, 512, 3000), (17, 130, 700, 9000), (8, 128)):
        q, k = (torch.empty(4, heads, n, dim, dtype=dtype, device="meta") for n in (length, keys))
        found = explain(q, k, k, dropout_p=0.1).saved
        assert found is not None
        assert found.bytes <= min(2 * (q.nbytes + k.nbytes), 64 * MIB)
        assert found.keys in (0, keys) or (2 * found.keys >= keys and found.keys % 128 == 0)


def test_what_is_saved_is_what_explain_says() -> None:
    for length, dim in ((64, 32), (512, 64)):
        tensors = [t.requires_grad_() for t in inputs(length, dim=dim)]
        on = saved_bytes(lambda: scaled_dot_product_attention(*tensors))  # noqa: B023
        with save_for_backward(False):
            off = saved_bytes(lambda: scaled_dot_product_attention(*tensors))  # noqa: B023
            choice = explain(*tensors).saved
            assert choice is not None
            assert choice.keys == choice.bytes == 0
            assert choice.reason == "save_for_backward is off"
        choice = explain(*tensors).saved
        assert choice is not None
        assert on - off == choice.bytes > 0
    with torch.no_grad():
        assert saved_bytes(lambda: scaled_dot_product_attention(*tensors)) == 0


def test_what_is_never_saved() -> None:
    tensors = [t.requires_grad_() for t in inputs()]
    for options, reason in (
        (dict(softcap=2.0), "softcap"),
        (dict(return_weights=True), "the backward reads the returned weights"),
        (dict(return_weights=True, dropout_p=0.1), "weights are returned"),
    ):
        choice = explain(*tensors, **options).saved
        assert choice is not None
        assert choice.keys == 0
        assert reason in choice.reason


def test_the_environment_variable_turns_it_off() -> None:
    program = (
        "import torch, scaledot; x = torch.empty(1, 2, 64, 64);"
        "print(scaledot.explain(x, x, x, dropout_p=0.1).saved.keys)"
    )
    for variable, value, saved in (
        ("SCALEDOT_SAVE_FOR_BACKWARD", "0", "0"),
        ("SCALEDOT_SAVE_FOR_BACKWARD", "1", "64"),
        ("SCALEDOT_KEEP_WEIGHTS", "0", "0"),  # the former name
    ):
        environment = {**os.environ, variable: value}
        command = [sys.executable, "-c", program]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == saved


def test_the_context_manager_restores_what_was_set() -> None:
    x = torch.empty(1, 2, 64, 64)

    def kept() -> int:
        choice = explain(x, x, x, dropout_p=0.1).saved
        assert choice is not None
        return choice.keys

    def fail() -> None:
        with save_for_backward(False):
            with save_for_backward(True):
                assert kept() == 64
            assert kept() == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert kept() == 64
    with pytest.raises(TypeError, match="enabled: got"), save_for_backward("no"):  # type: ignore[arg-type]
        pass


# ------------------------------------------------------------------------------------------------ gradients
FEATURES: dict[str, dict[str, Any]] = {
    "value_dim": {},
    "causal": dict(is_causal=True),
    "window": dict(window=(9, 4)),
    "dropout": dict(dropout_p=0.3),
    "padding": dict(attn_mask=(torch.arange(150) < 111).expand(2, 1, 1, 150)),
    "float_mask": dict(attn_mask=torch.linspace(-2, 2, 150 * 150).view(150, 150)),
    "masked_score": dict(attn_mask=torch.arange(150) % 3 > 0, masked_score=-2.5),
    "alibi": dict(alibi_slopes=torch.tensor([0.1, 0.2, 0.3])),
    "relative": dict(relative_bias=torch.linspace(-1, 1, 21).expand(3, 21)),
    "weights": dict(return_weights=True),
}


def output_of(*tensors: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(5)
    result = scaled_dot_product_attention(*tensors, **options)
    if isinstance(result, tuple):
        return torch.cat([result[0], result[1]], -1)  # with a gradient of the weights
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FEATURES)
def test_both_ways_agree(name: str, dtype: torch.dtype) -> None:
    """`weights`: 144 keys, whose returned weights the backward reads, against 150, whose rows are not whole vectors."""
    options = dict(FEATURES[name])
    for option, value in options.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            options[option] = value.to(dtype)
    tensors = inputs(150, 144 if name == "weights" else None, dim=80, dtype=dtype)
    kept = gradients(lambda *t: output_of(*t, **options), *tensors)
    with save_for_backward(False):
        if name == "weights":  # transposed memory of the weights cannot serve
            wide = [torch.cat([t, torch.zeros_like(t[..., :6, :])], -2) for t in tensors[1:]]
            mask = torch.arange(150) < 144

            def padded(*t: Tensor) -> Tensor:
                query, key, value = t[0], *(torch.cat([x, torch.zeros_like(x[..., :6, :])], -2) for x in t[1:])
                output, weights = scaled_dot_product_attention(query, key, value, mask, return_weights=True)
                return torch.cat([output, weights[..., :144]], -1)

            assert wide[0].shape[-2] == 150
            computed = gradients(padded, *tensors)
        else:
            computed = gradients(lambda *t: output_of(*t, **options), *tensors)
    for a, b in zip(kept, computed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4 if dtype == torch.float32 else 1e-11, atol=2e-6)
        if name == "value_dim":
            assert not torch.equal(a, b)  # they do not round alike: what was saved is used


@pytest.mark.parametrize("mask", ["padding", "inf", "causal", "blocks"])
def test_nan_in_a_masked_key_changes_no_bit(mask: str) -> None:
    """A mask decides what is masked, never the numbers that are saved."""
    length = 150
    hidden = slice(140, length)  # keys that no row attends to
    options: dict[str, Any] = {}
    if mask == "padding":
        options["attn_mask"] = (torch.arange(length) < 140).expand(2, 1, 1, length)
    elif mask == "inf":
        options["attn_mask"] = torch.zeros(length, length).masked_fill(torch.arange(length) >= 140, -math.inf)
    elif mask == "causal":
        options["is_causal"] = True
    else:
        shown = (torch.arange(length) < 140).expand(length, length)
        options["block_mask"] = scaledot.BlockMask.from_dense(shown, block_size=16)
    query, key, value = inputs(length, dim=80)
    if mask == "causal":
        query = query[..., :140, :]
    found = []
    for poison in (0.0, math.nan, math.inf):
        key, value = key.clone(), value.clone()
        key[..., hidden, :] = value[..., hidden, :] = poison
        found.append(gradients(lambda *t: output_of(*t, **options), query, key, value))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["causal", "dropout", "float_mask"])
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5, 17):
        torch.set_num_threads(threads)
        found.append(gradients(lambda *t: output_of(*t, **FEATURES[name]), *inputs(150, dim=80)))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ------------------------------------------------------------------------------------------------ torch's transforms
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_compile() -> None:
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=False)
    wanted = gradients(attention, *inputs())
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, *inputs()), wanted, strict=True))
    tensors = [t.requires_grad_() for t in inputs()]
    assert saved_bytes(lambda: compiled(*tensors)) > 0


def test_compile_with_symbolic_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (40, 64, 96):
        with save_for_backward(False):
            wanted = gradients(attention, *inputs(length))
        found = gradients(compiled, *inputs(length))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # nothing is saved


def test_functorch() -> None:
    wanted = gradients(lambda *t: attention(*t).sum() * torch.ones(()), *inputs())
    loss = lambda *t: attention(*t).sum()  # noqa: E731
    scale = torch.randn((), generator=torch.Generator().manual_seed(3))
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs())
    close(tuple(scale * g for g in found), wanted)
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs())
    close(each, found)
    samples = torch.func.vmap(attention)
    close(gradients(samples, *inputs()), gradients(attention, *inputs()))
    tangents = inputs(seed=9)
    _, along = torch.func.jvp(torch.func.grad(loss), inputs(), tangents)
    with save_for_backward(False):
        _, exact = torch.func.jvp(torch.func.grad(loss), inputs(), tangents)
    close((along,), (exact,))
    nested = torch.func.grad(lambda *t: torch.func.grad(loss)(*t).square().sum())(*inputs())
    with save_for_backward(False):
        exact = torch.func.grad(lambda *t: torch.func.grad(loss)(*t).square().sum())(*inputs())
    torch.testing.assert_close(nested, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    again = lambda *t: checkpoint(attention, *t, use_reentrant=use_reentrant)  # noqa: E731
    leaves = [[t.requires_grad_() for t in inputs()] for _ in range(2)]
    for one, function in zip(leaves, (attention, again), strict=True):
        function(*one).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True) if a.grad is not None)


def test_double_backward() -> None:
    small = [t.requires_grad_() for t in inputs(33, dim=4, dtype=torch.float64)]
    small = [t[:1, :1].detach().requires_grad_() for t in small]
    assert explain(*small).saved.keys == 0  # type: ignore[union-attr]
    query, key, value = (t[:1, :1].detach().requires_grad_() for t in inputs(32, dim=16, dtype=torch.float64))
    assert explain(query, key, value).saved.keys == 32  # type: ignore[union-attr]
    assert torch.autograd.gradgradcheck(attention, (query, key, value), fast_mode=True)


def test_autocast() -> None:
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(attention, *tensors)
    wanted = gradients(lambda *t: attention(*(x.bfloat16() for x in t)), *tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# ------------------------------------------------------------------------------------------------ the ops
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": dict(dropout_p=0.3),
    "bool_mask": dict(mask="bool", masked_score=-3.0),
    "bias": dict(mask="float", mask_shape="1HQK"),
    "2d": dict(batch=(), heads=None),
}


def make(name: str) -> tuple[Case, Any]:
    case = Case(f"saved {name}", **{**dict(query_length=9, key_length=7, head_dim=4), **CASES[name]})
    return case, case.make().mapped(lambda t: t.clone(memory_format=torch.preserve_format))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_opcheck_of_the_forward(name: str, requires_grad: bool) -> None:
    case, given = make(name)
    if requires_grad:
        given = given.requiring_grad()
    opcheck(
        torch.ops.scaledot.sdpa_recorded.default, tuple(given.tensors().values()), {**case.options(), "saved_keys": 7}
    )


@pytest.mark.parametrize("name", CASES)
def test_opcheck_of_the_backward(name: str) -> None:
    case, given = make(name)
    options = {**case.options(), "saved_keys": 7}
    output, lse, _, saved = torch.ops.scaledot.sdpa_recorded(*given.tensors().values(), **options)
    assert saved.shape == (*output.shape[:-1], 16)
    assert saved.dtype == lse.dtype
    cotangents = case.cotangents()
    wants_mask = given.attn_mask is not None and given.attn_mask.is_floating_point()
    opcheck(
        torch.ops.scaledot.sdpa_backward.default,
        (cotangents.output, cotangents.lse, None, *given.tensors().values(), output, lse, None, saved),
        {**options, "part": None, "output_mask": [True, True, True, wants_mask, False, False]},
    )


def test_saved_softmax_are_the_softmax(kernel: str) -> None:
    query, key, value = inputs(50, 200)
    for keys in (128, 200):
        _, lse, _, saved = torch.ops.scaledot.sdpa_recorded(query, key, value, saved_keys=keys)
        wanted = (query.double() @ key.double().mT / math.sqrt(32) - lse.double().unsqueeze(-1)).exp()
        torch.testing.assert_close(saved[..., :keys].double(), wanted[..., :keys], rtol=1e-5, atol=1e-7)


def test_bad_arguments() -> None:
    query, key, value = inputs(50, 200)
    for keys in (0, -1, 201, 100, 256):
        with pytest.raises(ValueError, match=rf"saved_keys: got {keys}; needs the 200 keys"):
            torch.ops.scaledot.sdpa_recorded(query, key, value, saved_keys=keys)
    for options in (dict(softcap=2.0), dict(return_weights=True), dict(part=[0, 0, 0, 0, 0, 3])):
        with pytest.raises(ValueError, match="saved_keys: got a number with"):
            torch.ops.scaledot.sdpa_recorded(query, key, value, saved_keys=200, **options)
    refused = "saved_keys: got a number for torch.bfloat16; needs None, or torch.float32 or torch.float64"
    with pytest.raises(ValueError, match=refused):
        torch.ops.scaledot.sdpa_recorded(*(t.bfloat16() for t in (query, key, value)), saved_keys=200)


def test_the_case_library_saves_softmax() -> None:
    """So that test_sdpa_backward covers both ways."""
    case = Case("kept", value_dim=24)
    tensors = [t for t in case.make().requiring_grad().tensors().values() if t is not None]
    assert explain(*tensors[:3]).saved.keys == case.key_length  # type: ignore[union-attr]
    assert saved_bytes(lambda: case_sdpa(case, case.make().requiring_grad())) > 0


def is_on() -> bool:
    before: bool = torch.ops.scaledot.save_for_backward(True)
    torch.ops.scaledot.save_for_backward(before)
    return before


def test_the_setting_holds_from_the_call_on_and_a_with_statement_ends_it() -> None:
    try:
        with save_for_backward(False):
            assert not is_on()
            save_for_backward(True)
            assert is_on()
        assert is_on()
        save_for_backward(False)
        assert not is_on()
        with save_for_backward(True):
            assert is_on()
        assert not is_on()
    finally:
        save_for_backward(True)


def test_a_decorated_function_has_the_setting_in_each_call() -> None:
    @save_for_backward(False)
    def off() -> bool:
        return is_on()

    assert is_on()

    @save_for_backward(True)
    def on() -> bool:
        return is_on()

    assert [off(), is_on(), off(), is_on()] == [False, True, False, True]
    with save_for_backward(False):
        assert [on(), is_on()] == [True, False]


def test_the_former_name_warns() -> None:
    with pytest.warns(FutureWarning, match="scaledot.keep_weights is now scaledot.save_for_backward"):
        setting = scaledot.keep_weights(False)
    with setting:
        assert not is_on()
    assert is_on()
