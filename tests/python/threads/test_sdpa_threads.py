"""Results have the same bits for any number of threads, in each run, in concurrent Python threads and after a fork."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import eager
from cases import DTYPES, Case
from kernels_under_test import assert_runs, forced, pairs, sdpa
from threads import in_threads

# Sizes with many tasks (several tiles in both directions) and with few (one query, many keys).
CASES = [
    Case("threads plain", query_length=150, key_length=170, head_dim=32),
    Case("threads causal", query_length=260, key_length=260, head_dim=24, causal=True, heads=1, batch=(1,)),
    Case("threads gqa", heads=4, kv_heads=2, enable_gqa=True, query_length=70, key_length=140, dropout_p=0.2),
    Case(
        "threads heads", batch=(1,), heads=9, kv_heads=1, enable_gqa=True, query_length=200, key_length=140, causal=True
    ),
    Case(
        "threads decode",
        batch=(1,),
        heads=2,
        query_length=1,
        key_length=900,
        head_dim=32,
        return_weights=True,
    ),
    Case("threads few rows", batch=(1,), heads=2, query_length=3, key_length=1500, dropout_p=0.1),
    Case("threads mask", query_length=130, key_length=140, mask="float", mask_shape="K", batch=(3,)),
    Case("threads bias", query_length=130, key_length=70, mask="inf", mask_shape="1HQK", return_weights=True),
    Case("threads softcap", query_length=90, key_length=300, softcap=3.0, alibi="BH", window=(50, 20)),
    Case("threads broadcast", query_length=90, key_length=80, batch=(3,), key_batch=(1,), value_batch=()),
]


def run(case: Case) -> list[Tensor]:
    inputs = case.make().requiring_grad()
    results = sdpa(case, inputs)
    gradients = eager.gradients(results, case.cotangents(), inputs.differentiable())
    return [*(r.detach() for r in results), *gradients.values()]


def assert_same(found: list[Tensor], wanted: list[Tensor], what: str) -> None:
    assert len(found) == len(wanted)
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"{what}: result {index} differs by {(a - b).abs().max()}"


EACH = pairs([case.with_(dtype=dtype, name=f"{case.name} {dtype}") for case in CASES for dtype in DTYPES], ("forward",))


@pytest.mark.parametrize(("case", "kernel"), EACH, indirect=["kernel"])
def test_same_bits_for_any_number_of_threads(case: Case, kernel: str) -> None:
    found = {}
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found[threads] = run(case)
        assert_same(run(case), found[threads], f"a second run with {threads} threads")
    assert_same(found[2], found[1], "2 threads")
    assert_same(found[5], found[1], "5 threads")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(kernel: str, dtype: str) -> None:
    """Keys that exceed the cache are processed in several chunks for many rows, in one for few rows."""
    case = Case(
        "threads runs", batch=(1,), heads=2, query_length=260, key_length=4500, head_dim=128, dropout_p=0.1, dtype=dtype
    ).with_(mask="bool", mask_shape="K")
    inputs = case.make()
    assert_runs(kernel, case, inputs)
    output, lse, _ = sdpa(case, inputs)
    few = 150
    inputs.query = inputs.query[..., :few, :]
    few_output, few_lse, _ = sdpa(case, inputs)
    assert_same([output[..., :few, :], lse[..., :few]], [few_output, few_lse], f"{few} of 260 rows")


def test_a_head_has_the_same_bits_among_any_number_of_heads(kernel: str) -> None:
    """The keys of many heads are packed a few heads at a time."""
    case = Case("threads heads packed", batch=(1,), heads=4, query_length=260, key_length=4500, head_dim=128)
    inputs = case.make()
    assert_runs(kernel, case, inputs)
    output, lse, _ = sdpa(case, inputs)
    for head in range(4):
        one = case.make()
        for name in ("query", "key", "value"):
            setattr(one, name, getattr(inputs, name)[:, head : head + 1])
        own_output, own_lse, _ = sdpa(case, one)
        wanted = [output[:, head : head + 1], lse[:, head : head + 1]]
        assert_same([own_output, own_lse], wanted, f"head {head} of 4")


def test_same_bits_in_concurrent_python_threads(kernel: str) -> None:
    wanted = [run(case) for case in CASES]

    def work(number: int) -> None:
        for turn in range(2 * len(CASES)):
            k = (2 * number + turn) % len(CASES)
            assert_same(run(CASES[k]), wanted[k], CASES[k].name)

    in_threads(work, 4)


class Attending(Dataset[list[Tensor]]):
    """A data set whose items are attention results, computed in the worker process."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def __len__(self) -> int:
        return len(CASES)

    def __getitem__(self, index: int) -> list[Tensor]:
        with forced(self.kernel):
            return run(CASES[index])


@pytest.fixture
def two_threads() -> None:
    torch.set_num_threads(2)


def test_same_bits_in_forked_data_loader_workers(kernel: str, two_threads: None) -> None:
    """The workers are forked after the parent has used its thread pool."""
    wanted = [run(case) for case in CASES]
    loader = DataLoader(Attending(kernel), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120)
    for k, found in enumerate(loader):
        assert_same(found, wanted[k], CASES[k].name)


def test_same_bits_after_os_fork() -> None:
    """The parent has used its thread pool, and the child does not set its number of threads."""
    program = """
import os, signal, torch, scaledot
torch.set_num_threads(2)
query, key, value = torch.randn(3, 2, 4, 300, 64).unbind()
wanted = scaledot.scaled_dot_product_attention(query, key, value)
child = os.fork()
if child == 0:
    signal.alarm(100)
    found = scaledot.scaled_dot_product_attention(query, key, value)
    os._exit(0 if found.numpy().tobytes() == wanted.numpy().tobytes() else 3)  # torch.equal would wait for threads
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_backward_in_another_thread_than_forward() -> None:
    case = CASES[1]
    inputs = case.make().requiring_grad()
    wanted = run(case)
    output, lse, weights = sdpa(case, inputs)
    found: list[Tensor] = []

    def work() -> None:
        found.extend(eager.gradients((output, lse, weights), case.cotangents(), inputs.differentiable()).values())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert_same([output.detach(), lse.detach(), weights.detach(), *found], wanted, "backward elsewhere")
