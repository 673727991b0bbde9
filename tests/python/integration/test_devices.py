"""Devices and layouts without kernels: every op and function says so in one line that names the argument."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from bad_arguments import IGNORED_WARNINGS, refused, sdpa_arguments, varlen_arguments
from op_calls import op_of, tensor_ops

pytestmark = IGNORED_WARNINGS

DEVICES = [
    "xpu:0", "mps", "hpu", "xla", "ipu", "lazy", "vulkan", "mtia", "maia", "fpga", "ve", "hip", "privateuseone:0",
]  # fmt: skip
if not scaledot.build_info()["cuda_archs"]:
    DEVICES.append("cuda:1")
# Keys under which torch may call an op. Every one must have a kernel, if only one that refuses.
KEYS = [
    "CPU", "CUDA", "HIP", "XLA", "MPS", "IPU", "XPU", "HPU", "VE", "Lazy", "MTIA", "MAIA", "PrivateUse1", "PrivateUse2",
    "PrivateUse3", "Meta", "FPGA", "Vulkan", "Metal", "MkldnnCPU", "QuantizedCPU", "QuantizedCUDA", "QuantizedXPU",
    "QuantizedPrivateUse1", "SparseCPU", "SparseCUDA", "SparseXPU", "SparsePrivateUse1", "SparseCsrCPU",
    "SparseCsrCUDA", "SparseCsrXPU", "NestedTensorCPU", "NestedTensorCUDA", "NestedTensorXPU", "NestedTensorHPU",
    "NestedTensorPrivateUse1",
]  # fmt: skip


class OnDevice(Tensor):
    """A tensor with a device but no data. Without __torch_dispatch__ torch calls the kernel of that device."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called outside of on_device()")


def tensor_on(device: str, like: Tensor, requires_grad: bool = False) -> Tensor:
    made: Tensor = torch.Tensor._make_wrapper_subclass(
        OnDevice, like.shape, dtype=like.dtype, device=device, requires_grad=requires_grad
    )
    return made


def on_device(call: Callable[..., object], arguments: dict[str, Any]) -> None:
    with torch._C._DisableTorchDispatch():
        call(**arguments)


def any_arguments(op: Any, tensor: Tensor) -> dict[str, Any]:
    """Arguments of the right types: `tensor` for each tensor that the op needs."""
    values = {"Tensor": tensor, "float": 0.0, "bool": False, "int": 1, "SymInt": 1, "str": "none"}
    arguments: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.real_type)
        if kind.startswith("Optional"):
            arguments[argument.name] = None
        elif kind == "List[bool]":
            arguments[argument.name] = [True] * argument.N
        else:
            arguments[argument.name] = values[kind]
    return arguments


@pytest.mark.parametrize("name", tensor_ops())
def test_every_key_has_a_kernel(name: str) -> None:
    missing = [key for key in KEYS if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key)]
    assert not missing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", tensor_ops())
def test_ops_refuse_other_devices(name: str, device: str) -> None:
    op = op_of(name)
    cpu = torch.randn(2, 4, 6, 8)
    tensors = [a.name for a in op._schema.arguments if str(a.type) == "Tensor"]
    if device.startswith("cuda"):  # has a kernel, which refuses mixed devices first
        tensors = [name for name in tensors if name != "out"][:1]
    for changed in tensors:
        arguments = any_arguments(op, cpu)
        arguments[changed] = tensor_on(device, cpu)
        with refused(changed, f"on {device}; needs cpu"):
            on_device(op, arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_functions_refuse_other_devices(requires_grad: bool, device: str) -> None:
    for function, arguments in (
        (scaledot.scaled_dot_product_attention, sdpa_arguments()),
        (scaledot.explain, sdpa_arguments()),
        (scaledot.varlen_attention, varlen_arguments()),
        (scaledot.explain_varlen, varlen_arguments()),
    ):
        moved = {
            name: tensor_on(device, value, requires_grad and value.is_floating_point())
            if isinstance(value, Tensor)
            else value
            for name, value in arguments.items()
        }
        with pytest.raises(NotImplementedError) as raised:
            on_device(function, moved)
        message = str(raised.value).splitlines()[0]
        assert re.fullmatch(rf"query: got a tensor on {device}; needs cpu( or cuda)?: .*query\.cpu\(\).*", message)
        varlen = "varlen" in function.__name__
        assert ("F.scaled_dot_product_attention" in message) == (not varlen and not device.startswith("cuda"))
        # The rest is torch's, a C++ stack trace if it is asked for.
        assert "Could not run" not in str(raised.value)


@pytest.mark.skipif(not scaledot.build_info()["cuda_archs"], reason="a build without GPU kernels refuses every GPU")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_on_two_gpus_are_refused(requires_grad: bool) -> None:
    """Needs no GPU: nothing is read before the devices are compared."""
    trained = ("query", "key", "value")
    more = {"attn_mask": torch.randn(6, 7), "alibi_slopes": torch.rand(4), "relative_bias": torch.randn(4, 9)}
    for function, arguments in (
        (scaledot.scaled_dot_product_attention, {**sdpa_arguments(), **more}),
        (scaledot.varlen_attention, varlen_arguments()),
    ):
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        for changed in tensors.keys() - {"query"}:
            moved = {
                name: tensor_on("cuda:1" if name == changed else "cuda:0", value, requires_grad and name in trained)
                for name, value in tensors.items()
            }
            with refused(changed, "on cuda:1; needs to be on query's device, cuda:0"):
                on_device(function, {**arguments, **moved})


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_fake_tensors_of_any_device_work(device: str) -> None:
    """Shapes need no kernel: a program for another machine can be traced here."""
    with torch._subclasses.FakeTensorMode():
        query = torch.empty(2, 4, 6, 8, device=device)
        output, weights = scaledot.scaled_dot_product_attention(query, query, query, return_weights=True)
        assert output.device.type == weights.device.type == device
        assert output.shape == (2, 4, 6, 8)


def test_a_device_with_a_fallback_to_the_cpu_uses_it() -> None:
    """torch runs ops that such a device lacks on the CPU. The refusal must not stand in its way."""
    program = """
import torch, scaledot
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakIdKeyDictionary

_setup_privateuseone_for_python_backend("toy")
data, library = WeakIdKeyDictionary(), torch.library.Library("aten", "IMPL")

def empty(size, dtype=None, **options):
    return torch._C._acc.create_empty_tensor(size, dtype)

def empty_strided(size, stride, dtype=None, **options):
    return empty(size, dtype)

def copy(source, target, non_blocking=False):
    if target.device.type == "cpu":
        target.copy_(data[source])
    else:
        data[target] = source.clone()
    return target

for name, kernel in ("empty.memory_format", empty), ("empty_strided", empty_strided), ("_copy_from", copy):
    library.impl(name, kernel, "PrivateUse1")
x = torch.randn(2, 4, 6, 8)
there = x.to("toy")
attend = scaledot.scaled_dot_product_attention
try:
    attend(there, there, there)
except NotImplementedError as error:
    print(str(error).splitlines()[0])
fallback = torch.library.Library("_", "IMPL")
fallback.fallback(lambda op, *args, **kwargs: op(*args, **kwargs), "PrivateUse1")
output, lse = attend(there, there, there, is_causal=True, return_lse=True)
wanted, wanted_lse = attend(x, x, x, is_causal=True, return_lse=True)
print(output.device, lse.device, torch.equal(output.cpu(), wanted), torch.equal(lse.cpu(), wanted_lse))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("query: got a tensor on toy:0; needs cpu")
    assert second == "toy:0 toy:0 True True"
