"""The ops on a GPU: every case against the float64 oracle; streams, graphs, several devices, synchronisation.

Skipped without a GPU. tests/csrc tests the results of the kernels in a simulation.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import eager
import quantised_cache
import scaledot
from case_list import CASES, FEATURES
from cases import Case, Cotangents, Inputs
from kernels_under_test import explain, sdpa
from oracle import solve
from varlen_cases import Packed, call, cumulative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = ("float32", "float64", "bfloat16", "float16")

# Cases for the kernels of one GPU generation: 16-bit dtypes, aligned rows, several tiles in both directions.
ALIGNED = tuple(
    Case(
        f"aligned_{name}_{dim}_{dtype}",
        **{
            "query_length": 200, "key_length": 330, "head_dim": dim, "dtype": dtype,
            "layout": "contiguous", "grad_layout": "contiguous", **options,
        },
    )
    for name, options in {"plain": {}, **FEATURES}.items()
    for dim in (64, 128, 256)
    for dtype in ("bfloat16", "float16")
)  # fmt: skip


def moved(tensor: Tensor) -> Tensor:
    """A copy on the GPU with the same strides, in a copy of the whole poisoned buffer."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[arg-type]
    return memory.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def on_gpu(case: Case) -> Inputs:
    inputs = case.make().mapped(lambda t: moved(t.detach()))
    if inputs.dropout_seed is not None:
        inputs.dropout_seed = inputs.dropout_seed.cpu()  # either device works; another test passes it on the GPU
    return inputs


def cotangents_on_gpu(case: Case) -> Cotangents:
    return Cotangents(*(None if t is None else moved(t) for t in vars(case.cotangents()).values()))


def test_the_kernels_were_compiled() -> None:
    assert scaledot.build_info()["cuda_archs"], "built without CUDA kernels: set SCALEDOT_CUDA=1"


@pytest.mark.parametrize("case", [*CASES, *ALIGNED], ids=lambda case: case.name)
def test_forward(case: Case) -> None:
    output, lse, weights = sdpa(case, on_gpu(case))
    assert output.is_cuda
    solve(case).check_results((output.cpu(), lse.cpu(), weights.cpu()), case.return_weights)


@pytest.mark.parametrize("case", [*CASES, *ALIGNED], ids=lambda case: case.name)
def test_backward(case: Case) -> None:
    inputs, solution = on_gpu(case).requiring_grad(), solve(case)
    gradients = eager.gradients(sdpa(case, inputs), cotangents_on_gpu(case), inputs.differentiable())
    assert gradients.keys() == solution.gradients.keys()
    for name, gradient in gradients.items():
        solution.check(name, gradient.cpu())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "dropout_p": 0.2, "softcap": 5.0}], ids=str)
def test_backward_of_blocks_that_add_in_order(dim: int, options: dict[str, Any]) -> None:
    """Many blocks add to the gradient of the same rows. It is right, and has the same bits in every run."""
    case = Case(
        "ordered", batch=(1,), heads=2, query_length=1000, key_length=1500, head_dim=dim, dtype="bfloat16",
        layout="contiguous", grad_layout="contiguous", **options,
    )  # fmt: skip
    inputs, cotangents, solution = on_gpu(case).requiring_grad(), cotangents_on_gpu(case), solve(case)
    for name, gradient in eager.gradients(sdpa(case, inputs), cotangents, inputs.differentiable()).items():
        solution.check(name, gradient.cpu())
    # More tiles than a GPU can run at a time.
    many = [t.detach().repeat(4, 16, 1, 1).requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    output = sdpa(case, Inputs(*many, dropout_seed=inputs.dropout_seed))[0]
    first = torch.autograd.grad(output, many, output, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(output, many, output, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_hopper_runs_the_sm90_backward(head_dim: int, mask: str) -> None:
    case = Case("hopper", head_dim=head_dim, dtype="bfloat16", layout="contiguous", grad_layout="contiguous", mask=mask)
    wanted = "sm90" if torch.cuda.get_device_capability() == (9, 0) else "generic"
    assert explain(case, on_gpu(case).requiring_grad())["backward"]["kernel"] == wanted


@pytest.mark.parametrize("dims", [(192, 128), (160, 96)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "bool", "softcap": 5.0}], ids=str)
def test_unequal_head_dims(dims: tuple[int, int], options: dict[str, Any]) -> None:
    case = Case(
        "unequal", query_length=300, key_length=410, head_dim=dims[0], value_dim=dims[1], dtype="bfloat16",
        layout="contiguous", **options,
    )  # fmt: skip
    output, lse, weights = sdpa(case, on_gpu(case))
    solve(case).check_results((output.cpu(), lse.cpu(), weights.cpu()), case.return_weights)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_clusters_give_the_bits_of_single_blocks(dims: tuple[int, int]) -> None:
    """On Hopper, an even number of query tiles of 128 rows runs in clusters of two blocks, an odd one does not."""
    shapes = ((1024, dims[0]), (700, dims[0]), (700, dims[1]))
    query, key, value = (torch.randn(2, 40, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    pairs = scaledot.scaled_dot_product_attention(query, key, value)
    single = scaledot.scaled_dot_product_attention(query[:, :, :896], key, value)
    assert torch.equal(pairs[:, :, :896], single)
    wanted = torch.nn.functional.scaled_dot_product_attention(query.float(), key.float(), value.float())
    torch.testing.assert_close(pairs.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 3)}], ids=str)
def test_packed_sequences(dims: tuple[int, int], options: dict[str, Any]) -> None:
    common = {"head_dim": dims[0], "value_dim": dims[1], "dtype": "bfloat16", "layout": "contiguous", **options}
    packed = Packed("packed", (300, 1, 129, 0, 64), (410, 70, 128, 30, 257), common)
    made = call(packed, requires_grad=False)
    tensors = {"query": made.query, "key": made.key, "value": made.value}
    tensors |= {"cu_seq_q": cumulative(packed.query_lengths), "cu_seq_k": cumulative(packed.key_lengths)}
    output, lse = made.run(**{name: tensor.cuda() for name, tensor in tensors.items()})
    for b, (case, results) in enumerate(zip(packed.cases(), made.results((output.cpu(), lse.cpu())), strict=True)):
        solution = solve(case, b)
        solution.check("output", results[0])
        solution.check("lse", results[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [36, 64, 128, 256])  # the generic kernel, then those for Hopper
@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_of_the_query_is_exact(packed: bool, dim: int, dtype: torch.dtype) -> None:
    """It owes nothing to the means of keys and values: see the low part of the output in docs/cpu_kernels.md."""
    generator = torch.Generator().manual_seed(1)
    drawn = (4 * (k in (1, 2)) + torch.randn(300, 3, dim, generator=generator) / 4 for k in range(4))
    *tensors, grad = (t.to(dtype).cuda() for t in drawn)
    lengths = torch.tensor([0, 120, 300], device="cuda")

    def attention(*rows: Tensor) -> Tensor:
        if packed and rows[0].dtype == dtype:
            return scaledot.varlen_attention(*rows, lengths, lengths, 180, 180)
        heads = [t.transpose(0, 1) for t in rows]
        spans = [(0, 120), (120, 300)] if packed else [(0, 300)]
        outputs = [scaledot.scaled_dot_product_attention(*(t[:, a:b] for t in heads)) for a, b in spans]
        return torch.cat(outputs, 1).transpose(0, 1)

    def grad_query(of: torch.dtype) -> Tensor:
        leaves = [t.to(of).requires_grad_() for t in tensors]
        return torch.autograd.grad(attention(*leaves), leaves[0], grad.to(of))[0].double()

    exact, kept = grad_query(torch.float64), grad_query(dtype)
    with scaledot.save_for_backward(False):
        rounded = grad_query(dtype)
    assert (kept - exact).norm() < (rounded - exact).norm() / 3


@pytest.mark.parametrize("seed", [(0, 0), (-1, -1), (2**62 + 12345, 2**40 + 7)])
def test_dropout_is_that_of_the_cpu(seed: tuple[int, int]) -> None:
    shape, p = (2, 3, 70, 133), 0.3
    wanted = torch.ops.scaledot.dropout_mask(torch.tensor(seed), *shape, p)
    found = torch.ops.scaledot.dropout_mask(torch.tensor(seed).cuda(), *shape, p)
    assert torch.equal(found.cpu(), wanted)
    case = Case("dropped", batch=(2,), heads=3, kv_heads=3, query_length=70, key_length=133, dropout_p=p)
    inputs = on_gpu(case.with_(return_weights=True))
    inputs.dropout_seed = torch.tensor(seed).cuda()
    weights = sdpa(case, inputs, return_weights=True)[2]
    assert torch.equal(weights.cpu() != 0, wanted)


def test_masks_are_those_of_the_cpu() -> None:
    query, key, slopes = torch.empty(2, 3, 37, 8), torch.empty(2, 3, 53, 8), torch.rand(3)
    arguments = {"is_causal": True, "causal_alignment": "lower_right", "window_left": 20}
    wanted = torch.ops.scaledot.sdpa_mask(query, key, slopes, **arguments)
    found = torch.ops.scaledot.sdpa_mask(query.cuda(), key.cuda(), slopes.cuda(), **arguments)
    assert torch.equal(found[0].cpu(), wanted[0])
    torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_every_run(dtype: str) -> None:
    case = Case(
        "bits", batch=(2,), heads=4, kv_heads=2, query_length=300, key_length=700, head_dim=96, value_dim=96,
        dtype=dtype, mask="float", mask_shape="1HQK", enable_gqa=True, dropout_p=0.1, return_weights=True,
    )  # fmt: skip
    inputs, cotangents = on_gpu(case).requiring_grad(), cotangents_on_gpu(case)

    def once() -> list[Tensor]:
        results = sdpa(case, inputs)
        return [*results, *eager.gradients(results, cotangents, inputs.differentiable()).values()]

    first = once()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


def test_double_backward() -> None:
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64, device="cuda").requires_grad_() for _ in range(3))
    mask = torch.randn(5, 5, dtype=torch.float64, device="cuda").requires_grad_()

    def attend(*tensors: Tensor) -> Tensor:
        seed = torch.tensor([1, 2])
        output: Tensor = torch.ops.scaledot.sdpa(*tensors, dropout_seed=seed, dropout_p=0.2, is_causal=True)[0]
        return output

    assert torch.autograd.gradcheck(attend, (query, key, value, mask))
    assert torch.autograd.gradgradcheck(attend, (query, key, value, mask))


@pytest.mark.parametrize("scales", ["none", "heads", "sequences"])
@pytest.mark.parametrize("dtype", quantised_cache.DTYPES)
@pytest.mark.parametrize("cache", quantised_cache.CACHES)
@pytest.mark.parametrize("name", quantised_cache.LENGTHS)
def test_quantised_cache(name: str, cache: str, dtype: str, scales: str) -> None:
    made = quantised_cache.make(name, cache, dtype, scales, dims=(64, 128))
    if scales == "none":  # moderate scores
        made.query = made.query * (0.01 if cache == "int8" else 0.2)
    on_device = made.cuda()
    pages = {n: t if t is None else t.cuda() for n, t in quantised_cache.paged(made, 16).items()}
    for changes in ({}, pages):
        output, lse = on_device.run(**changes, is_causal=True)
        quantised_cache.check_rule(made, (output.cpu(), lse.cpu()), is_causal=True)


def test_explain_names_the_kernel_for_a_quantised_cache() -> None:
    cache = torch.zeros(9, 2, 64, device="cuda", dtype=torch.int8)
    cu_seq = torch.tensor([0, 3, 3, 9], device="cuda")
    explanation = scaledot.explain_varlen(cache.bfloat16(), cache, cache, cu_seq, cu_seq, 6, 6)
    kernel = "sm90" if torch.cuda.get_device_capability() == (9, 0) else "generic_quantised"
    assert [(choice.kernel, choice.sequences) for choice in explanation.forward.kernels] == [(kernel, 3)]
    assert explanation.backward is None


def test_explain_reports_the_generic_kernel() -> None:
    case = Case("explain", return_weights=True, dtype="bfloat16")
    plan = explain(case, on_gpu(case))
    assert plan["device"] == "cuda"
    assert plan["forward"]["kernel"] == plan["backward"]["kernel"] == "generic"
    assert plan["capability"] == scaledot.build_info()["cuda_status"]


def test_explain_varlen_has_one_kernel_for_all_sequences() -> None:
    query = torch.randn(9, 2, 64, device="cuda", dtype=torch.bfloat16)
    cu_seq = torch.tensor([0, 3, 3, 9], device="cuda")
    explanation = scaledot.explain_varlen(query, query, query, cu_seq, cu_seq, 6, 6, dropout_p=0.1)
    assert explanation.device == "cuda"
    assert explanation.backward is not None
    for one in (explanation.forward, explanation.backward):
        assert [(choice.kernel, choice.sequences) for choice in one.kernels] == [("generic", 3)]
        assert [refusal.kernel for refusal in one.kernels[0].refused] == ["sm90"]
    plain = scaledot.explain_varlen(query, query, query, cu_seq, cu_seq, 6, 6)
    wanted = "sm90" if torch.cuda.get_device_capability() == (9, 0) else "generic"
    assert [choice.kernel for choice in plain.forward.kernels] == [wanted]


def test_no_call_synchronises() -> None:
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.randn(128, 128, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, weights = scaledot.scaled_dot_product_attention(
            query, query, query, mask, dropout_p=0.1, is_causal=True, return_weights=True
        )
        torch.autograd.grad([output, weights], [query, mask], [output, weights])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_op_runs_on_the_current_stream() -> None:
    query = torch.randn(2, 4, 512, 64, device="cuda")
    wanted = scaledot.scaled_dot_product_attention(query, query, query)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # work on a wrong stream would read the input too early
        late = torch.empty_like(query).copy_(query)
        found = scaledot.scaled_dot_product_attention(late, late, late)
    stream.synchronize()
    assert torch.equal(found, wanted)


def captured_after_a_call(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `call`, and its results, which replays overwrite. A call before it loads the kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def test_a_graph_replays_with_new_inputs_and_new_dropout() -> None:
    query = torch.randn(2, 4, 70, 64, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        output, weights = scaledot.scaled_dot_product_attention(query, query, query, dropout_p=0.5, return_weights=True)
        return output, weights

    graph, (output, weights) = captured_after_a_call(call)
    kept = []
    for _ in range(2):
        query.normal_()
        graph.replay()
        torch.testing.assert_close(weights @ query, output, rtol=1e-5, atol=1e-5)
        kept.append(weights != 0)
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_graph_of_a_forward_and_a_backward_in_bfloat16(packed: bool, dropout_p: float, dims: tuple[int, int]) -> None:
    """A replay reads the inputs and draws a dropout seed. It gives the bits of a call without a graph, if the generator
    is in the same state."""

    def randn(heads: int, dim: int) -> Tensor:
        shape = (400, heads, dim) if packed else (2, heads, 200, dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    inputs = [randn(heads, dim).requires_grad_() for heads, dim in ((4, dims[0]), (2, dims[0]), (2, dims[1]))]
    cotangent = randn(4, dims[1])
    cu_seq = torch.tensor([0, 130, 130, 400], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "dropout_p": dropout_p}

    def call() -> list[Tensor]:
        if packed:
            output = scaledot.varlen_attention(*inputs, cu_seq, cu_seq, 270, 270, **options)
        else:
            output = scaledot.scaled_dot_product_attention(*inputs, **options)
        return [output.detach(), *torch.autograd.grad(output, inputs, cotangent)]

    graph, captured = captured_after_a_call(call)
    for seed in range(2):
        with torch.no_grad():
            for tensor in (*inputs, cotangent):
                tensor.normal_()
        torch.cuda.manual_seed(seed)
        wanted = call()
        for _ in range(2):
            torch.cuda.manual_seed(seed)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))
    graph.replay()  # the state of the generator has moved on
    assert torch.equal(captured[0], wanted[0]) == (dropout_p == 0)


def test_a_graph_reads_the_dropout_seed_that_it_was_given() -> None:
    case = Case(
        "seeded", query_length=200, key_length=330, head_dim=64, dtype="bfloat16", causal=True, dropout_p=0.2,
        layout="contiguous", grad_layout="contiguous",
    )  # fmt: skip
    inputs, cotangents = on_gpu(case).requiring_grad(), cotangents_on_gpu(case)
    seed = inputs.dropout_seed = torch.tensor([1, 2], device="cuda")

    def call() -> list[Tensor]:
        results = sdpa(case, inputs)
        return [results[0].detach(), *eager.gradients(results, cotangents, inputs.differentiable()).values()]

    graph, captured = captured_after_a_call(call)
    outputs = []
    for numbers in ((1, 2), (-3, 2**40)):
        seed.copy_(torch.tensor(numbers))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True))
        outputs.append(captured[0].clone())
    assert not torch.equal(*outputs)


# Kernels are loaded at their first call, which is during the capture. No other call may come before. Only torch's
# threads for the backward are started.
FIRST_CALL_IN_A_GRAPH = """
import torch, scaledot
query = torch.randn(1, 2, 150, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.autograd.grad(query * query, query, query.detach())

def call():
    output = scaledot.scaled_dot_product_attention(query, query, query, is_causal=True)
    return output.detach(), *torch.autograd.grad(output, query, query.detach())

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = call()
graph.replay()
torch.cuda.synchronize()
assert all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True))
"""


def test_the_first_call_of_a_process_can_be_captured() -> None:
    subprocess.run([sys.executable, "-c", FIRST_CALL_IN_A_GRAPH], check=True)


needs_two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def results_on(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of a dense call, and of one over packed sequences, always of the same numbers."""
    generator = torch.Generator().manual_seed(1)
    dense = [torch.randn(2, 4, 300, 64, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    packed = [torch.randn(300, 4, 64, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    offsets = torch.tensor([0, 70, 300], device=device)
    results = []
    for output, inputs in (
        (scaledot.scaled_dot_product_attention(*dense, is_causal=True), dense),
        (scaledot.varlen_attention(*packed, offsets, offsets, 230, 230), packed),
    ):
        assert output.device == inputs[0].device
        results += [output.detach(), *torch.autograd.grad(output, inputs, output.detach())]
    return results


@needs_two_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_device_that_is_not_the_current_one(dtype: torch.dtype) -> None:
    """If the devices are of one kind, results have the same bits."""
    wanted, found = results_on("cuda:0", dtype), results_on("cuda:1", dtype)
    alike = torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.to(b.device), b, **({"rtol": 0, "atol": 0} if alike else {}))
    assert torch.cuda.current_device() == 0
    query = torch.randn(1, 2, 40, 32, device="cuda:1", dtype=dtype, requires_grad=True)
    scaledot.scaled_dot_product_attention(query, query, query, dropout_p=0.1).sum().backward()


@needs_two_devices
def test_two_devices_from_two_threads() -> None:
    wanted = [[t.clone() for t in results_on(device, torch.bfloat16)] for device in ("cuda:0", "cuda:1")]
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(results_on, f"cuda:{k % 2}", torch.bfloat16) for k in range(40)]
        for k, run in enumerate(runs):
            assert all(torch.equal(a, b) for a, b in zip(run.result(), wanted[k % 2], strict=True))


def test_autocast() -> None:
    query = torch.randn(2, 4, 64, 32, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert scaledot.scaled_dot_product_attention(query, query, query).dtype == torch.bfloat16


def test_tensors_on_two_devices_are_refused() -> None:
    query = torch.randn(2, 4, 64, 32, device="cuda")
    with pytest.raises(ValueError, match=r"^key: got a tensor on cpu; needs to be on query's device, cuda"):
        scaledot.scaled_dot_product_attention(query, query.cpu(), query)
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match=r"^value: got a tensor on cuda:1; needs to be on query's device, cuda:0"):
            scaledot.scaled_dot_product_attention(query, query, query.to("cuda:1"))


def test_results_with_2_to_the_32_scores() -> None:
    """Compares the last rows of 2^17 x 2^15 scores."""
    rows, keys, dim = 2**17, 2**15, 16
    query, key = (torch.randn(1, 1, n, dim, device="cuda", dtype=torch.bfloat16) for n in (rows, keys))
    mask = torch.rand(rows, keys, device="cuda") > 0.5
    output = scaledot.scaled_dot_product_attention(query, key, key, mask)
    last = slice(rows - 50, rows)
    scores = query[0, 0, last].double() @ key[0, 0].double().T / dim**0.5
    wanted = torch.softmax(scores.masked_fill(~mask[last], -torch.inf), -1) @ key[0, 0].double()
    torch.testing.assert_close(output[0, 0, last].double(), wanted, rtol=2e-2, atol=2e-3)
