"""Many calls, sizes beyond 2^31, interrupts, too little memory, changing inputs: no leak, and the process goes on."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import scaledot


def run(program: str, **environment: str) -> None:
    """Runs the program in another process, which has to end well."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


MANY = """
import gc, random, torch, scaledot
from bad_arguments import sdpa_arguments, varlen_arguments, paged_arguments

torch.set_num_threads(2)
drawn = random.Random(0)
module = scaledot.MultiHeadAttention(16, 2, dropout=0.1)
sdpa, packed, paged = sdpa_arguments(), varlen_arguments(), paged_arguments()
attend = scaledot.scaled_dot_product_attention

def gradients():
    query = sdpa["query"].requires_grad_()
    mask = torch.zeros(6, 7, requires_grad=True)
    output, lse = attend(**sdpa, attn_mask=mask, return_lse=True, dropout_p=0.1)
    torch.autograd.grad((output.sum(), lse.sum()), (query, mask))

def refused():
    for wrong in ({"scale": "x"}, {"dropout_p": 2.0}, {"key": None}, {"attn_mask": torch.zeros(5)}):
        try:
            attend(**sdpa | wrong)
        except (TypeError, ValueError):
            continue
        raise AssertionError(wrong)

calls = [
    lambda: attend(**sdpa, return_weights=True),
    lambda: attend(**sdpa, window=(1, drawn.randrange(5)), softcap=2.0, is_causal=True),
    lambda: attend(*(torch.randn(1, 2, drawn.randrange(1, 40), 8),) * 3),
    lambda: scaledot.varlen_attention(**packed, is_causal=True),
    lambda: scaledot.varlen_attention(**paged),
    lambda: scaledot.explain(**sdpa),
    lambda: module(torch.randn(2, drawn.randrange(1, 9), 16))[0].sum().backward(),
    gradients,
    refused,
]

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def play(count):
    for _ in range(count):
        calls[drawn.randrange(len(calls))]()

play(4000)
before = resident()
play(20000)
grown = resident() - before
assert grown < LIMIT, f"{grown} bytes more after 20000 calls"
print(grown)
"""
LIMIT = 3 << 20  # bytes: 150 a call, which is less than any object of torch that could be left behind


def test_memory_does_not_grow() -> None:
    run(f"import sys; sys.path[:0] = {sys.path!r}\nLIMIT = {LIMIT}\n{MANY}")


# ------------------------------------------------------------------------------------------------------------- 2^31
def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


LARGE: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any], list[tuple[int, ...]]]] = {
    "rows": ((1, 1, 2**31, 8), (1, 1, 5, 8), (1, 1, 5, 8), {}, [(1, 1, 2**31, 8)]),
    "keys": ((1, 1, 3, 8), (1, 1, 2**33, 8), (1, 1, 2**33, 4), {}, [(1, 1, 3, 4)]),
    "batch": ((2**31, 1, 3, 8), (2**31, 1, 3, 8), (1, 1, 3, 8), {}, [(2**31, 1, 3, 8)]),
    "heads": ((2**31 + 1, 3, 8), (2**31 + 1, 3, 8), (2**31 + 1, 3, 8), {}, [(2**31 + 1, 3, 8)]),
    "weights": ((1, 1, 2**20, 8),) * 3 + ({"return_weights": True}, [(1, 1, 2**20, 8), (1, 1, 2**20, 2**20)]),
    "width": ((2, 2, 2**31), (2, 2, 2**31), (2, 2, 2**31), {"return_lse": True}, [(2, 2, 2**31), (2, 2)]),
}


@pytest.mark.parametrize("name", LARGE)
def test_shapes_of_more_than_two_to_the_31_elements(name: str) -> None:
    query, key, value, options, wanted = LARGE[name]
    result = scaledot.scaled_dot_product_attention(meta(*query), meta(*key), meta(*value), **options)
    results = result if isinstance(result, tuple) else (result,)
    assert [tuple(r.shape) for r in results] == wanted
    gradient = torch.autograd.grad(
        scaledot.scaled_dot_product_attention(meta(*query).requires_grad_(), meta(*key), meta(*value)).sum(),
        [leaf := meta(*query).requires_grad_()],
        allow_unused=True,
    )
    assert gradient == (None,)
    assert leaf.shape == query


def test_more_weights_than_an_address_has_bits_for() -> None:
    rows = meta(1, 1, 2**33, 1)
    with pytest.raises(RuntimeError) as raised:
        scaledot.scaled_dot_product_attention(rows, rows, rows, return_weights=True)
    assert "\n" not in str(raised.value).strip()


def test_packed_shapes_of_more_than_two_to_the_31_elements() -> None:
    tokens, ends = meta(2**31 + 7, 1, 8), torch.empty(3, dtype=torch.int64, device="meta")
    output, lse = scaledot.varlen_attention(tokens, tokens, tokens, ends, ends, 2**31, 2**31, return_lse=True)
    assert (output.shape, lse.shape) == (tokens.shape, (1, 2**31 + 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, (2, 0), (2**22, 0)])
def test_expanded_keys_of_two_to_the_31_elements(window: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """2^23 keys of width 256 that share one row. Every weight is the same, so the output is that row of value."""
    keys, width = 2**23, 256
    query, key, value = (torch.randn(1, 1, 1, width).to(dtype) for _ in range(3))
    output, lse = scaledot.scaled_dot_product_attention(
        query,
        key.expand(1, 1, keys, width),
        value.expand(1, 1, keys, width),
        window=window,
        causal_alignment="lower_right",
        return_lse=True,
    )
    live = keys if window is None else window[0] + 1
    score = float((query.double() * key.double()).sum()) / math.sqrt(width)
    torch.testing.assert_close(
        lse.double(), torch.full_like(lse, score + math.log(live)).double(), rtol=1e-5, atol=1e-4
    )
    tolerance = 1e-3 if dtype == torch.float32 else 8e-3  # a sum of millions of weights
    torch.testing.assert_close(output, value, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------------------------- interrupt, memory
def test_an_interrupt_is_raised_when_the_call_returns() -> None:
    """Kernels do not look for signals. Python raises KeyboardInterrupt after the call, and the process goes on."""
    run("""
import os, signal, threading, torch, scaledot
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
query = torch.randn(1, 8, 4000, 64)
small = query[:, :, :100]
wanted = scaledot.scaled_dot_product_attention(small, small, small)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for _ in range(1000):
        scaledot.scaled_dot_product_attention(query, query, query)
except KeyboardInterrupt:
    assert torch.equal(scaledot.scaled_dot_product_attention(small, small, small), wanted)
else:
    raise AssertionError("no interrupt")
""")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_too_little_memory_is_an_error_and_leaves_nothing(dtype: str) -> None:
    """The address space is limited to a little more at a time, so that every allocation of the calls fails once."""
    program = f"""
import resource, torch, scaledot
torch.set_num_threads(2)
query = torch.randn(1, 2, 40, 64, dtype=torch.{dtype}).requires_grad_()
key = torch.randn(1, 2, 24000, 64, dtype=torch.{dtype}).requires_grad_()
ends_q, ends_k = torch.tensor([0, 10, 40]), torch.tensor([0, 4000, 24000])
pages, hard = 4096, resource.getrlimit(resource.RLIMIT_AS)[1]

def size(field):
    with open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * pages

def packed():
    tensors = [t[0].transpose(0, 1) for t in (query, key, key)]
    return torch.autograd.grad(scaledot.varlen_attention(*tensors, ends_q, ends_k, 30, 20000).sum(), (query, key))

def dense():
    output, weights = scaledot.scaled_dot_product_attention(query, key, key, return_weights=True)
    return torch.autograd.grad(output.sum() + weights.square().sum(), (query, key))

for call in (dense, packed):
    wanted = call()
    call()
    resident, failed, passed = size(1), 0, 0
    for step in range(0, 96, 2):
        resource.setrlimit(resource.RLIMIT_AS, (size(0) + step * 2**20, hard))
        try:
            found = call()
            passed += 1
        except (RuntimeError, MemoryError) as error:
            found, message = None, str(error)
            failed += 1
            assert "memory" in message and len(message.splitlines()) == 1, message
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        assert found is None or all(map(torch.equal, found, wanted))
        del found
    assert failed, f"{{call.__name__}}: the limit was never reached"
    assert all(map(torch.equal, call(), wanted))
    assert size(1) - resident < 64 * 2**20, f"{{size(1) - resident}} bytes more"
    print(call.__name__, failed, passed)
"""
    # Every array is then mapped when it is made. Otherwise glibc may keep freed memory, and the calls need no more.
    run(program, MALLOC_MMAP_THRESHOLD_="65536")


# ----------------------------------------------------------------------------------------------- inputs that change
def test_inputs_that_another_thread_changes() -> None:
    """Lengths, pages, blocks and seeds are overwritten during the calls, through arrays, so that torch knows nothing.

    Such a call has any result or an error that names the argument. It stays inside its memory: the calls afterwards
    give what those before gave. `bash tests/sanitize torch tests/python/input/test_hostile.py` guards that memory.
    """
    run("""
import threading, time, torch, scaledot
torch.set_num_threads(2)
rows, sequences, pages = 600, 6, 80
query, key, value = torch.randn(3, rows, 2, 16).unbind()
bias = torch.randn(2, 401, requires_grad=True)
even = torch.arange(0, rows + 1, rows // sequences)
uneven = torch.tensor([0, 1, 2, 3, 4, 5, rows])
ends = even.clone()
pool = torch.randn(pages, 8, 2, 16)
table, used = torch.arange(pages).view(4, 20).int(), torch.full((4,), 150).int()
blocks = scaledot.BlockMask.from_dense(torch.rand(2, 300, 300) < 0.5, block_size=64)
dense = torch.randn(1, 2, 300, 16)
good = [t.clone() for t in (ends, table, used, blocks.blocks)]

def packed():
    output = scaledot.varlen_attention(query, key, value, ends, ends, rows, rows, relative_bias=bias, is_causal=True)
    return torch.autograd.grad(output.square().sum(), bias)[0]

def paged():
    heads = query[:4]
    return scaledot.varlen_attention(
        heads, pool, pool, torch.arange(5), None, 1, 160, seqused_k=used, block_table=table
    )

def masked():
    return scaledot.scaled_dot_product_attention(dense, dense, dense, block_mask=blocks)

def write():
    arrays = [t.numpy() for t in (ends, table, used, blocks.blocks)]
    bad = [[uneven, even // 2], [good[1] * 1000, -good[1]], [good[2] * 3], [good[3] + 99]]
    while not done.is_set():
        for array, values, first in zip(arrays, bad, good):
            for value in (*values, first):
                array[...] = value
                time.sleep(0)  # the other thread may want the lock of Python

calls = [packed, paged, masked]
wanted = [call() for call in calls]
done = threading.Event()
writer = threading.Thread(target=write, daemon=True)
writer.start()
refused = 0
for number in range(150):
    try:
        calls[number % 3]()
    except ValueError as error:
        assert str(error).split(":")[0] in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table", "blocks"), error
        refused += 1
done.set()
writer.join()
assert refused, "nothing was changed during a call"
assert all(torch.equal(call(), result) for call, result in zip(calls, wanted))
""")
