"""Calls from many Python threads at once give the bits of serial calls; on free-threaded Python they run at once, and
importing scaledot leaves the global interpreter lock off."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from cases import Case
from kernels_under_test import sdpa
from scaledot.dropin.torch_nn import MultiheadAttention
from threads import in_threads

THREADS = 8


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that depend on the seed alone: torch's default generator is shared by all threads."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_gradients(call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """The results of the call, and the gradients of their sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    results = call(*leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    return [*(r.detach() for r in results), *torch.autograd.grad(sum(r.float().sum() for r in results), leaves)]


def every_output() -> list[Tensor]:
    def call(*tensors: Tensor) -> Any:
        return scaledot.scaled_dot_product_attention(
            *tensors, is_causal=True, enable_gqa=True, return_weights=True, return_lse=True
        )

    return with_gradients(
        call, random(1, 2, 4, 33, 24), random(2, 2, 2, 70, 24), random(3, 2, 2, 70, 40), random(4, 70)
    )


def half_precision() -> list[Tensor]:
    query, key, value = (random(seed, 3, 2, 200, 64, dtype=torch.bfloat16) for seed in (5, 6, 7))
    return with_gradients(lambda *t: scaledot.scaled_dot_product_attention(*t, window=(20, 0)), query, key, value)


def one_query() -> list[Tensor]:
    return [scaledot.scaled_dot_product_attention(random(8, 4, 1, 32), random(9, 4, 900, 32), random(10, 4, 900, 32))]


def dropout() -> list[Tensor]:
    case = Case("dropout", query_length=140, key_length=260, dropout_p=0.3, softcap=4.0, alibi="H")  # has its own seed
    inputs = case.make().requiring_grad()
    output, lse, _ = sdpa(case, inputs)
    return [output.detach(), lse.detach(), *torch.autograd.grad(output.sum(), list(inputs.differentiable().values()))]


def second_derivative() -> list[Tensor]:
    query, key, value = (random(seed, 2, 17, 8).requires_grad_() for seed in (11, 12, 13))
    output = scaledot.scaled_dot_product_attention(query, key, value, softcap=2.0)
    first = torch.autograd.grad(output.square().sum(), (query, key), create_graph=True)
    return [*(g.detach() for g in first), *torch.autograd.grad(sum(g.sum() for g in first), (query, key, value))]


def transforms() -> list[Tensor]:
    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaledot.scaled_dot_product_attention(query, key, value, is_causal=True).sin().sum()

    samples = [random(seed, 3, 2, 19, 16) for seed in (14, 15, 16)]
    return list(torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*samples))


def packed() -> list[Tensor]:
    offsets = torch.tensor([0, 5, 5, 80, 130])

    def call(*tensors: Tensor) -> Any:
        return scaledot.varlen_attention(*tensors, offsets, offsets, 75, 75, is_causal=True)

    return with_gradients(call, *(random(seed, 130, 2, 32) for seed in (17, 18, 19)))


def merged() -> list[Tensor]:
    halves = [
        scaledot.scaled_dot_product_attention(random(20, 2, 9, 16), key, key, return_lse=True)
        for key in random(21, 2, 2, 50, 16)
    ]
    return list(scaledot.merge_states(*halves[0], *halves[1]))


def module() -> list[Tensor]:
    return with_gradients(lambda x: SHARED(x, is_causal=True, need_weights=True), random(22, 2, 31, 32))


def torch_module() -> list[Tensor]:
    return with_gradients(lambda x: SHARED_TORCH(x, x, x), random(23, 2, 31, 32))


with torch.random.fork_rng():
    torch.manual_seed(0)
    SHARED = scaledot.MultiHeadAttention(32, 4)  # modules that all threads use
    SHARED_TORCH = MultiheadAttention(32, 4, batch_first=True)

JOBS = [
    every_output, half_precision, one_query, dropout, second_derivative,
    transforms, packed, merged, module, torch_module,
]  # fmt: skip


def assert_same(found: list[Tensor], wanted: list[Tensor], what: str) -> None:
    same = [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]
    assert all(same), f"{what}: {same}"


@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job.__name__))
def test_eight_threads_with_one_call(job: Callable[[], list[Tensor]]) -> None:
    wanted = job()

    def work(number: int) -> None:
        for _ in range(3):
            assert_same(job(), wanted, f"thread {number}")

    in_threads(work, THREADS)


def test_eight_threads_with_mixed_calls() -> None:
    wanted = [job() for job in JOBS]

    def work(number: int) -> None:
        for turn in range(3 * len(JOBS)):
            k = (number + turn * (1 + 2 * (number % 2))) % len(JOBS)  # two orders, from different beginnings
            assert_same(JOBS[k](), wanted[k], f"thread {number}: {JOBS[k].__name__}")

    in_threads(work, THREADS)


def test_gradients_of_eight_threads_add_up_in_one_leaf() -> None:
    """With queries of zero each of 4 keys has the weight 1/4, and 8 rows give each value the gradient 2, exactly."""
    value = torch.zeros(2, 4, 16, requires_grad=True)
    query = torch.zeros(2, 8, 16)

    def work(_: int) -> None:
        for _ in range(20):
            scaledot.scaled_dot_product_attention(query, query[:, :4], value).sum().backward()

    in_threads(work, THREADS)
    assert value.grad is not None
    assert torch.equal(value.grad, torch.full_like(value, 20 * THREADS * 2))


def test_first_calls_and_import_in_eight_threads() -> None:
    """Whatever is made at the first use is made once. The process is new."""
    program = """
import threading, torch
tensors = torch.randn(3, 2, 4, 150, 32)
start, found = threading.Barrier(8), [None] * 8

def work(number):
    start.wait()
    import scaledot
    leaf = tensors.clone().requires_grad_()
    output, weights = scaledot.scaled_dot_product_attention(*leaf, softcap=3.0, return_weights=True)
    text = str(scaledot.explain(*leaf))
    found[number] = [text, output.detach(), weights.detach(), *torch.autograd.grad(output.sum(), leaf)]

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert all(found), "a thread failed"
for results in found[1:]:
    for one, other in zip(results, found[0]):
        assert one == other if isinstance(one, str) else torch.equal(one, other)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs a free-threaded Python")
def test_the_lock_stays_off() -> None:
    program = """
import sys, torch
assert not sys._is_gil_enabled(), "torch turned the lock on"
import scaledot, scaledot.dropin.sdpa, scaledot.dropin.torch_nn
query = torch.randn(3, 2, 9, 8, requires_grad=True)
scaledot.scaled_dot_product_attention(*query).sum().backward()
assert not sys._is_gil_enabled(), "scaledot turned the lock on"
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program], check=True, env=environment)


def test_import_does_not_look_for_triton() -> None:
    """triton turns the lock on. A torch for CUDA requires it; with a torch for CPUs a failed import would go unseen."""
    program = """
import sys, torch

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "triton", "triton is imported"

sys.meta_path.insert(0, NoTriton())
import scaledot, scaledot.dropin.sdpa, scaledot.dropin.torch_nn
query = torch.randn(3, 2, 9, 8, requires_grad=True)
scaledot.scaled_dot_product_attention(*query).sum().backward()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
