"""scaledot.dropin.sdpa: unmodified callers of F.scaled_dot_product_attention.

tests/external/op_info.py runs torch's own sample inputs.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.flop_counter import FlopCounterMode

from scaledot.dropin import sdpa

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@pytest.fixture(autouse=True)
def torch_own_afterwards() -> Iterator[None]:
    yield
    while sdpa._active:
        sdpa.deactivate()


# ------------------------------------------------------------------------------------- callers that are reached
def scripted(x: Tensor) -> Tensor:
    result: Tensor = torch.jit.script(attention_of)(x)
    return result


def attention_of(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


CALLERS: dict[str, Callable[[Tensor], Any]] = {
    "F": attention_of,
    "imported before": lambda x: imported_before(x, x, x),
    "the operator": lambda x: torch.ops.aten.scaled_dot_product_attention(x, x, x),
    "TorchScript": scripted,
    "no_grad": torch.no_grad()(attention_of),
    "inference_mode": torch.inference_mode()(attention_of),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(attention_of, x, use_reentrant=False),
    "func.grad": torch.func.grad(lambda x: attention_of(x).sum()),
    "per-sample gradients": torch.func.vmap(torch.func.grad(lambda x: attention_of(x).square().sum())),
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_callers_are_reached(caller: str) -> None:
    x = torch.randn(2, 3, 5, 8)
    expected = CALLERS[caller](x)
    with sdpa.activate() as activation:
        found = CALLERS[caller](x)
    assert activation.calls > 0
    assert not activation.fallthrough
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_autocast() -> None:
    x = torch.randn(2, 3, 5, 8)
    with sdpa.activate() as activation, torch.autocast("cpu", torch.bfloat16):
        assert attention_of(x).dtype == torch.bfloat16
    assert activation.calls == 1


def test_modules_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x, is_causal=True, src_mask=nn.Transformer.generate_square_subsequent_mask(5))
    with sdpa.activate() as activation:
        found = layer(x, is_causal=True, src_mask=nn.Transformer.generate_square_subsequent_mask(5))
    assert activation.calls == 1
    torch.testing.assert_close(found, expected)


def test_compile() -> None:
    x = torch.randn(2, 3, 5, 8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) * 2

    expected = function(x)
    torch._dynamo.reset()
    try:
        with sdpa.activate() as activation:
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            found = compiled(x)
            assert activation.calls > 0
            assert not activation.fallthrough
            torch.testing.assert_close(found, expected)
            expected_gradient = torch.autograd.grad(expected.sum(), x)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), x), expected_gradient)
    finally:
        torch._dynamo.reset()


def test_backward_works_after_deactivation() -> None:
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    with sdpa.activate():
        output = attention_of(x)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x), torch.autograd.grad(attention_of(x).sum(), x))


# ------------------------------------------------------------------------------------- calls that torch answers
class Wrapped(Tensor):
    """A subclass with its own rule for every operator, like DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.namespace == "aten", f"{function} has no rule"
        args = [t.as_subclass(Tensor) if isinstance(t, Wrapped) else t for t in args]
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


class Labelled(Tensor):
    """A subclass that operators treat as a plain tensor."""


def call(
    query: Tensor, key: Tensor | None = None, value: Tensor | None = None, mask: Tensor | None = None, **options: Any
) -> Callable[[], Tensor]:
    """A deferred call; key and value default to the query."""
    key = query if key is None else key
    value = key if value is None else value
    return lambda: F.scaled_dot_product_attention(query, key, value, mask, **options)


X, MASK = torch.ones(2, 3, 4, 8), torch.ones(4, 4)
LEFT_TO_TORCH: dict[str, tuple[str, Callable[[], Any]]] = {
    # (the counted reason, the call)
    "mask and is_causal": ("attn_mask and is_causal together", call(X, mask=MASK.bool(), is_causal=True)),
    "mask dtype": ("attn_mask of dtype", call(X, mask=MASK.double())),
    "integer mask": ("attn_mask of dtype", call(X, mask=MASK.int())),
    "mask shape": ("attn_mask: got shape", call(X, mask=torch.ones(5, 5))),
    "mixed dtypes": ("key: got dtype", call(X, X.double(), X)),
    "integers": ("the dtype is torch.int32", call(X.int())),
    "complex": ("the dtype is", call(X + 0j)),
    "1-D": ("query: got shape", call(X[0, 0, 0], X)),
    "dropout 1.5": ("dropout_p", call(X, dropout_p=1.5)),
    "scale nan": ("scale", call(X, scale=math.nan)),
    "heads": ("key: got 2 heads", call(X, X[:, :2])),
    "heads of gqa": ("key: got 2 heads", call(X, X[:, :2], enable_gqa=True)),
    "head dim": ("key: got shape", call(X, X[..., :7], X)),
    "subclass": ("a tensor is a Wrapped", call(X.as_subclass(Wrapped))),
}


FORWARD_MODE: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "causal": ((), {"is_causal": True, "scale": 0.3}),
    "boolean mask": ((torch.arange(7) < torch.arange(5)[:, None] + 2,), {}),
    "floating mask": ((torch.linspace(-1, 1, 35, dtype=torch.float64).view(5, 7),), {}),
    "dropout": ((), {"dropout_p": 1.0}),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
@pytest.mark.parametrize("dims", [2, 3, 4])
def test_forward_mode(name: str, dims: int) -> None:
    """torch's fused kernels have none; its slower path, which ours is compared with, does."""
    masks, options = FORWARD_MODE[name]
    lead = (2, 3)[: dims - 2]
    primals = [torch.randn(*lead, length, 8, dtype=torch.float64) for length in (5, 7, 7)]
    tangents = [torch.randn_like(primal) for primal in primals]
    if masks and masks[0].is_floating_point():
        primals, tangents = [*primals, *masks], [*tangents, torch.randn_like(masks[0])]
        masks = ()

    def run(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, *masks, **options)

    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        wanted = torch.func.jvp(run, tuple(primals), tuple(tangents))
    with sdpa.activate() as activation:
        found = torch.func.jvp(run, tuple(primals), tuple(tangents))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
            dual = forward_ad.unpack_dual(run(*duals))
    assert activation.calls == 2
    assert not activation.fallthrough
    for one in (found, dual):
        for a, b in zip(one, wanted, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()


def test_forward_mode_over_a_gradient() -> None:
    x, tangent = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64).unbind()

    def gradient(x: Tensor) -> Any:
        return torch.func.grad(lambda x: attention_of(x).square().sum())(x)

    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        wanted = torch.func.jvp(gradient, (x,), (tangent,))
    with sdpa.activate() as activation:
        found = torch.func.jvp(gradient, (x,), (tangent,))
    assert activation.calls == 1
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_left_to_torch(name: str) -> None:
    reason, call = LEFT_TO_TORCH[name]
    expected = outcome(call)
    with sdpa.activate() as activation:
        found = outcome(call)
    assert activation.calls == 0
    assert list(activation.fallthrough.values()) == [1]
    assert reason in next(iter(activation.fallthrough))
    if isinstance(expected, tuple) and isinstance(expected[0], type):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: FlopCounterMode(display=False)])
def test_refusals_in_modes_are_left_to_torch(mode: Any) -> None:
    """Where Python runs below the kernel, an error of the op would reach the caller."""
    with mode():
        query, mask = torch.ones(2, 3, 4, 8), torch.ones(5, 5)
        expected = outcome(call(query, mask=mask))
        with sdpa.activate() as activation:
            found = outcome(call(query, mask=mask))
            assert call(query)().shape == query.shape
    assert found[0] is expected[0]
    assert activation.calls == 1
    assert [reason.split(";")[0] for reason in activation.fallthrough] == ["attn_mask: got shape (5, 5)"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_dispatch_keys_are_not_reached() -> None:
    """The meta device, nested tensors and vmap have their own dispatch keys."""
    lengths = [torch.ones(5, 3, 8), torch.ones(2, 3, 8)]
    jagged = torch.nested.nested_tensor(lengths, layout=torch.jagged).transpose(1, 2)
    with sdpa.activate() as activation:
        assert attention_of(torch.ones(2, 3, 5, 8, device="meta")).device.type == "meta"
        assert attention_of(jagged).is_nested
        torch.func.vmap(attention_of)(torch.ones(2, 1, 3, 5, 8))
    assert activation.calls == sum(activation.fallthrough.values()) == 0


def test_plain_subclasses_run_in_scaledot() -> None:
    x = torch.randn(2, 3, 4, 8)
    expected = attention_of(x)
    with sdpa.activate() as activation:
        found = attention_of(x.as_subclass(Labelled))
        parameter = attention_of(nn.Parameter(x))
    assert activation.calls == 2
    assert isinstance(found, Labelled)
    torch.testing.assert_close(found.as_subclass(Tensor), expected)
    torch.testing.assert_close(parameter, expected)


# --------------------------------------------------------------------------------------- activate, deactivate
def ours_runs() -> bool:
    """Whether scaledot runs the call, by the name of the graph's node."""
    output = attention_of(torch.randn(1, 1, 3, 4, requires_grad=True))
    name = type(output.grad_fn).__name__ if output.grad_fn is not None else ""
    return "ScaledDotProduct" not in name


def test_torch_is_restored() -> None:
    for _ in range(3):
        assert not ours_runs()
        activation = sdpa.activate()
        assert ours_runs()
        assert activation.active
        sdpa.deactivate()
        assert not activation.active
        assert not ours_runs()
    sdpa.deactivate()  # nothing to do
    activation.deactivate()
    keys = [torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU]
    op = torch.ops.aten.scaled_dot_product_attention.default
    assert not any(op.has_kernel_for_dispatch_key(key) for key in keys)


def test_nested_activations_count_separately() -> None:
    with sdpa.activate() as outer:
        attention_of(torch.randn(1, 1, 3, 4))
        with sdpa.activate() as inner:
            attention_of(torch.randn(1, 1, 3, 4))
        assert not inner.active
        assert ours_runs()
    assert not ours_runs()
    assert (outer.calls, inner.calls) == (3, 1)


def test_activations_end_in_any_order() -> None:
    first, second = sdpa.activate(), sdpa.activate()
    first.deactivate()
    first.deactivate()
    assert ours_runs()
    second.deactivate()
    assert not ours_runs()


def test_an_exception_ends_the_activation() -> None:
    with pytest.raises(KeyError), sdpa.activate():
        raise KeyError
    assert not ours_runs()


def test_activation_holds_in_all_threads() -> None:
    found: list[bool] = []
    with sdpa.activate() as activation:
        threads = [threading.Thread(target=lambda: found.append(ours_runs())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 4
    assert activation.calls == 4


def test_printed_report() -> None:
    with sdpa.activate() as activation:
        attention_of(torch.randn(1, 1, 3, 4))
        reason, wrong = LEFT_TO_TORCH["head dim"]
        outcome(wrong)
        outcome(wrong)
    first, second = str(activation).splitlines()
    assert first == "scaledot ran 1 of 3 calls of F.scaled_dot_product_attention"
    assert second.startswith(f"  left to torch, 2 times: {reason}")
    assert repr(activation) == f"<Activation, ended: {str(activation).splitlines()[0]}>"
    with sdpa.activate() as activation:
        assert repr(activation).startswith("<Activation, in force: scaledot ran 0 of 0 calls")


def test_import_activates_nothing() -> None:
    program = """
import sys, torch, scaledot, scaledot.dropin.sdpa, scaledot.dropin.transformers
op = torch.ops.aten.scaled_dot_product_attention.default
assert not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.AutogradCPU)
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_torchs_registry_activates_scaledot() -> None:
    """Importing registers and activates nothing; torch's functions activate and restore."""
    assert "scaledot" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    assert not ours_runs()
    attention.activate_flash_attention_impl("scaledot")
    try:
        assert attention.current_flash_attention_impl() == "scaledot"
        assert ours_runs()
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert not ours_runs()
