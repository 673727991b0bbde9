"""The function with torch's overrides, dispatch modes, tensor subclasses, FLOP counters and profilers; modules that are
copied, saved and hooked. test_sdpa_modes.py tests autocast, fake tensors and torch.compile."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import scaledot
from agreement import results_of
from recording_tensor import RecordingTensor
from scaledot.dropin import config_mha, self_attention, split_heads, torch_nn

attend: Any = scaledot.scaled_dot_product_attention


def qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, *(shape or (2, 2, 5, 8))).unbind()
    return query, key, value


# ------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize("which", range(5))
def test_any_argument_can_override_the_function(which: int) -> None:
    arguments: list[Tensor] = [*qkv(), torch.randn(5, 5), torch.rand(2)]
    arguments[which] = arguments[which].as_subclass(RecordingTensor)
    RecordingTensor.seen.clear()
    found = attend(*arguments[:4], alibi_slopes=arguments[4], is_causal=True, softcap=3.0)
    assert RecordingTensor.seen[0] is scaledot.scaled_dot_product_attention
    assert isinstance(found, RecordingTensor)
    plain = [t.as_subclass(Tensor) for t in arguments]
    wanted = attend(*plain[:4], alibi_slopes=plain[4], is_causal=True, softcap=3.0)
    assert torch.equal(found.as_subclass(Tensor), wanted)


def test_an_override_may_return_its_own_result() -> None:
    class Answers:
        calls: ClassVar[list[Any]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append((func, args, kwargs))
            return "answer"

    query, _, value = qkv()
    assert attend(query, Answers(), value, window=(1, 2), return_lse=True) == "answer"
    func, args, kwargs = Answers.calls[0]
    assert func is scaledot.scaled_dot_product_attention
    assert args[0] is query
    assert kwargs["window"] == (1, 2)
    assert kwargs["return_lse"] is True


def test_a_torch_function_mode_sees_the_function() -> None:
    class Mode(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(func)
            if func is scaledot.scaled_dot_product_attention:
                args = (*args[:5], True, *args[6:])  # is_causal
            return func(*args, **(kwargs or {}))

    query, key, value = qkv()
    with Mode() as mode:
        found = attend(query, key, value)
    assert mode.calls[0] is scaledot.scaled_dot_product_attention
    assert torch.equal(found, attend(query, key, value, is_causal=True))


def test_a_torch_dispatch_mode_sees_the_ops() -> None:
    class Mode(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    query, key, value = (t.requires_grad_() for t in qkv())
    with Mode() as mode:
        attend(query, key, value, dropout_p=0.2).sum().backward()
    ours = [name for name in mode.calls if name.startswith("scaledot")]
    assert ours == ["scaledot.sdpa_recorded.default", "scaledot.sdpa_backward.default"]


class Wrapped(Tensor):
    """A tensor that wraps another and unwraps it below autograd, as quantised or distributed tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapped: Wrapped = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        wrapped.inner = inner.detach()
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapped) else x

        result = func(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapped, result)


def test_a_wrapper_subclass_has_the_bits_of_plain_tensors() -> None:
    plain = [t.requires_grad_() for t in qkv()]
    wrapped = [Wrapped(t) for t in plain]
    found = attend(*wrapped, is_causal=True)
    wanted = attend(*plain, is_causal=True)
    assert isinstance(found, Wrapped)
    assert torch.equal(found.inner, wanted)
    grads = torch.autograd.grad(found, wrapped, Wrapped(torch.ones_like(wanted)))
    for mine, right in zip(grads, torch.autograd.grad(wanted, plain, torch.ones_like(wanted)), strict=True):
        assert isinstance(mine, Wrapped)
        assert torch.equal(mine.inner, right)


def test_the_result_for_a_parameter_is_a_plain_tensor() -> None:
    query = nn.Parameter(torch.randn(2, 2, 5, 8))
    assert type(attend(query, query, query)) is Tensor


def test_fake_tensors_need_no_memory() -> None:
    with FakeTensorMode():
        query = torch.empty(64, 128, 100_000, 128, dtype=torch.bfloat16, requires_grad=True)
        output, lse = attend(query, query, query, is_causal=True, return_lse=True)
        output.backward(torch.empty_like(output))
        assert query.grad is not None
        assert output.shape == query.shape
        assert lse.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- counters and profilers


@pytest.mark.parametrize(
    ("heads", "kv_heads", "value_dim"), [(4, 4, 8), (4, 2, 8), (4, 4, 6)], ids=["plain", "gqa", "value_dim"]
)
def test_flops_are_those_of_torch(heads: int, kv_heads: int, value_dim: int) -> None:
    query = torch.randn(2, heads, 16, 8, requires_grad=True)
    key = torch.randn(2, kv_heads, 24, 8, requires_grad=True)
    value = torch.randn(2, kv_heads, 24, value_dim, requires_grad=True)
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    with FlopCounterMode(display=False) as counter:
        output = attend(query, key, value, enable_gqa=kv_heads != heads)
        output.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    # The formulas of torch 2.11 need a KV head for every query head; those of 2.13 give the same count.
    shapes = query.shape, (2, heads, *key.shape[2:]), (2, heads, *value.shape[2:])
    assert counts[torch.ops.scaledot.sdpa_recorded] == sdpa_flop_count(*shapes)
    wanted = sdpa_backward_flop_count(output.shape, *shapes)
    assert counts[torch.ops.scaledot.sdpa_backward] == wanted
    assert counter.get_total_flops() == sum(counts.values())


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 2, 5, 8)], ids=["2d", "3d", "5d"])
def test_flops_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    query = torch.randn(shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        attend(query, query, query)
    assert counter.get_total_flops() == 2 * query.numel() * 5 * 2


@pytest.mark.parametrize("imports", ["", "import scaledot", "import torch.utils.flop_counter", "both"])
def test_flops_in_any_order_of_imports(imports: str) -> None:
    """The formulas are registered whether the counter is imported before scaledot, after it, or by several threads."""
    before = """
from threading import Thread
threads = [Thread(target=__import__, args=(name,)) for name in 4 * ["torch.utils.flop_counter", "scaledot"]]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    program = f"""
import torch
{before if imports == "both" else imports}
from torch.utils.flop_counter import FlopCounterMode
import scaledot, inspect
with FlopCounterMode(display=False) as counter:
    scaledot.scaled_dot_product_attention(*torch.randn(3, 1, 5, 8))
assert counter.get_total_flops() == 2 * 5 * 5 * 2 * 8, counter.get_total_flops()
assert "class FlopCounterMode" in inspect.getsource(torch.utils.flop_counter)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.filterwarnings("ignore")  # the profiler warns
def test_the_profiler_shows_the_ops_and_nodes() -> None:
    query, key, value = (t.requires_grad_() for t in qkv())
    with torch.profiler.profile(record_shapes=True, with_flops=True) as profile:
        attend(query, key, value).sum().backward()
    events = {event.key: event for event in profile.key_averages(group_by_input_shape=True)}
    assert "scaledot::sdpa" in events
    assert "scaledot::sdpa_backward" in events
    assert any("ScaledotSdpaBackward" in name for name in events)
    assert events["scaledot::sdpa"].input_shapes[0] == [2, 2, 5, 8]
    assert "ScaledotSdpaBackward" in attend(query, key, value).grad_fn.name()


# ------------------------------------------------------------------------------------------------ global switches


def test_deterministic_algorithms_change_no_bit() -> None:
    """The op is always deterministic. It also writes all memory, so fill_uninitialized_memory changes nothing."""
    query, key, value = qkv()
    bias = torch.randn(5, 5)
    runs = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        leaves = [t.clone().requires_grad_() for t in (query, key, value, bias)]
        torch.manual_seed(2)
        output, weights = attend(*leaves, dropout_p=0.2, return_weights=True)
        runs.append([output, weights, *torch.autograd.grad(output.sum() + weights.sum(), leaves)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_registered(device: str) -> None:
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}[device]
    for op in ("scaledot::sdpa", "scaledot::explain"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_modules_is_that_of_torch(dtype: torch.dtype) -> None:
    torch_layer = nn.MultiheadAttention(16, 2, batch_first=True)
    ours = torch_nn.convert(copy.deepcopy(torch_layer))
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype):
        layer = scaledot.MultiHeadAttention(16, 2)(x)[0]
        found, wanted = ours(x, x, x, need_weights=False)[0], torch_layer(x, x, x, need_weights=False)[0]
    assert layer.dtype == dtype
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


def test_saving_an_inference_tensor_is_the_error_of_torch() -> None:
    with torch.inference_mode():
        query, key, value = qkv()
        assert attend(query, key, value).is_inference()
    other = torch.randn(2, 2, 5, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        attend(other, key, value)


def test_saved_tensor_hooks_see_the_saved_tensors() -> None:
    """The backward uses the tensors that the hooks return."""
    query, key, value = (t.requires_grad_() for t in qkv())
    wanted = torch.autograd.grad(attend(query, key, value).square().sum(), (query, key, value))
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = attend(query, key, value)
    assert len(packed) == 5  # query, key, value, output, lse
    for mine, right in zip(torch.autograd.grad(output.square().sum(), (query, key, value)), wanted, strict=True):
        assert torch.equal(mine, right)
    written = key.clone()
    output = attend(query, written, value)
    written.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# ------------------------------------------------------------------------------------------------ modules

MODULES: dict[str, Any] = {
    "MultiHeadAttention": lambda: scaledot.MultiHeadAttention(16, 2),
    "torch_nn": lambda: torch_nn.MultiheadAttention(16, 2, batch_first=True),
    "converted": lambda: torch_nn.convert(nn.MultiheadAttention(16, 2, batch_first=True)),
    "config_mha": lambda: config_mha.MultiHeadAttention({"d_model": 16, "num_heads": 2}),
    "self_attention": lambda: self_attention.MultiHeadAttention(16, 2, 0.0),
    "split_heads": lambda: split_heads.SplitHeadAttention(16, 16, 2),
}


def arguments(name: str, x: Tensor) -> tuple[Tensor, ...]:
    return (x,) if name == "split_heads" else (x, x, x)


def first(name: str, module: nn.Module, x: Tensor) -> Tensor:
    return results_of(module(*arguments(name, x)))[0]


@pytest.mark.parametrize("name", MODULES)
def test_copies_of_modules_give_the_same_bits(name: str) -> None:
    module, x = MODULES[name](), torch.randn(2, 5, 16)
    wanted = first(name, module, x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert type(other) is type(module)
        assert torch.equal(first(name, other, x), wanted)
        assert {p.data_ptr() for p in other.parameters()}.isdisjoint(p.data_ptr() for p in module.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_functional_call_and_the_meta_device(name: str) -> None:
    module, x = MODULES[name](), torch.randn(2, 5, 16)
    other = MODULES[name]()
    found = results_of(torch.func.functional_call(other, dict(module.named_parameters()), arguments(name, x)))[0]
    assert torch.equal(found, first(name, module, x))
    on_meta = copy.deepcopy(module).to("meta")
    assert first(name, on_meta, x.to("meta")).shape == found.shape
    on_meta.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert torch.equal(first(name, on_meta, x), found)


@pytest.mark.parametrize("name", MODULES)
def test_all_hooks_of_modules_are_called(name: str) -> None:
    module, x = MODULES[name](), torch.randn(2, 5, 16, requires_grad=True)
    called: list[str] = []
    module.register_forward_pre_hook(lambda *a: called.append("forward_pre"))
    module.register_forward_hook(lambda *a: called.append("forward"))
    module.register_full_backward_hook(lambda *a: called.append("backward"))
    module.register_state_dict_post_hook(lambda *a: called.append("state_dict"))
    module.register_load_state_dict_pre_hook(lambda *a: called.append("load_pre"))
    module.register_load_state_dict_post_hook(lambda *a: called.append("load_post"))
    # torch calls backward hooks for tensors and tuples of them only; config_mha returns a dataclass.
    warns = pytest.warns(UserWarning, match="For backward hooks to be called, module output should be a Tensor")
    with warns if name == "config_mha" else contextlib.nullcontext():
        first(name, module, x).sum().backward()
    module.load_state_dict(module.state_dict())
    assert called[:2] == ["forward_pre", "forward"]
    wanted = {"forward_pre", "forward", "state_dict", "load_pre", "load_post"}
    assert set(called) == wanted | (set() if name == "config_mha" else {"backward"})


def test_parametrizations_and_pruning_reach_the_projections() -> None:
    layer, x = scaledot.MultiHeadAttention(16, 2), torch.randn(2, 5, 16)
    assert layer.out_proj is not None
    nn.utils.parametrizations.orthogonal(layer.q_proj)
    nn.utils.parametrizations.weight_norm(layer.out_proj)
    layer(x)[0].square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_function_mode_can_redirect_f_sdpa() -> None:
    """A mode can redirect torch's function, instead of patching it."""

    class Redirect(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                func = attend
            return func(*args, **(kwargs or {}))

    query, key, value = qkv()
    with Redirect():
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(found, attend(query, key, value, is_causal=True))
