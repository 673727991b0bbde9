"""relative_bias: what the case library, which runs it with every kernel, does not show."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scaledot
from cases import Case, Inputs
from kernels_under_test import EVERY_KERNEL, forced, sdpa, sized
from op_calls import Calls
from varlen_cases import Packed, call

attend: Any = scaledot.scaled_dot_product_attention


def matrix(bias: Tensor, query_length: int, key_length: int, past: int = 0) -> Tensor:
    """(..., H, Lq, Lk): what T5 adds to the scores. Row i is at position i + past."""
    reach = bias.size(-1) // 2
    distance = torch.arange(key_length) - (torch.arange(query_length)[:, None] + past)
    return bias[..., reach + distance.clamp(-reach, reach)]


def tensors(rows: int = 6, keys: int = 9, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, heads, rows, 8), torch.randn(2, heads, keys, 8), torch.randn(2, heads, keys, 8)


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (4, 7), (1, 4, 7), (2, 1, 7), (2, 4, 7), (4, 1), (4, 99)])
def test_it_is_a_mask_of_its_distances(shape: tuple[int, ...], alignment: str) -> None:
    """And its gradient is that of the mask, summed over the distances, with the shape of the bias."""
    query, key, value = tensors()
    bias = torch.randn(shape, requires_grad=True)
    past = 9 - 6 if alignment == "lower_right" else 0
    found = attend(query, key, value, relative_bias=bias, causal_alignment=alignment)
    wanted = attend(query, key, value, matrix(bias, 6, 9, past))
    torch.testing.assert_close(found, wanted)
    cotangent = torch.randn_like(found)
    (mine,) = torch.autograd.grad(found, bias, cotangent)
    (right,) = torch.autograd.grad(wanted, bias, cotangent)
    assert mine.shape == shape
    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_distance_is_positive_for_later_keys() -> None:
    query, key, value = tensors(3, 3, 1)
    bias = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf, -torch.inf]])
    assert torch.equal(attend(query, key, value, relative_bias=bias), value)  # distance 0 only
    ahead = torch.tensor([[-torch.inf, 0.0, 0.0]])
    torch.testing.assert_close(
        attend(query, key, value, relative_bias=ahead), attend(query, key, value, window=(0, None))
    )


def test_a_broadcast_view_is_not_expanded() -> None:
    query, key, value = tensors()
    small = torch.randn(1, 4, 7)
    wanted = attend(query, key, value, relative_bias=small)
    assert torch.equal(attend(query, key, value, relative_bias=small.expand(2, 4, 7)), wanted)
    strided = torch.randn(1, 4, 14)[..., ::2].copy_(small)
    assert torch.equal(attend(query, key, value, relative_bias=strided), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_floating_dtype(dtype: torch.dtype) -> None:
    query, key, value = tensors()
    bias = torch.randn(4, 7).to(dtype).requires_grad_()
    output = attend(query, key, value, relative_bias=bias)
    torch.testing.assert_close(output, attend(query, key, value, relative_bias=bias.detach().float()))
    output.sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype == dtype


@EVERY_KERNEL
def test_minus_infinity_hides_a_key_with_nan(kernel: str) -> None:
    case = sized(Case("relative nan", query_length=20, key_length=20, relative="H", relative_reach=3), kernel, (3, 20))
    if "bf16" in kernel:
        case = case.with_(dtype="bfloat16")
    inputs = case.make()
    assert inputs.relative_bias is not None
    inputs.relative_bias[..., -1] = -torch.inf  # the keys that are at least 3 ahead
    wanted = sdpa(case, inputs)[0]
    inputs.key[..., 10:, :], inputs.value[..., 10:, :] = torch.nan, torch.nan
    found = sdpa(case, inputs)[0]
    rows = min(7, case.query_length)
    assert torch.equal(found[..., :rows, :], wanted[..., :rows, :])
    assert found[..., 9:, :].isnan().all()


THREADS = [
    Case("relative threads", batch=(1,), query_length=300, key_length=290, relative="H", relative_reach=40),
    Case("relative far", batch=(3,), query_length=130, key_length=500, relative="1", relative_reach=400),
    Case("relative gqa", heads=8, kv_heads=1, enable_gqa=True, query_length=150, key_length=260, relative="BH"),
    Case("relative mask", mask="float", mask_shape="1HQK", query_length=130, key_length=140, relative="B1"),
]


@EVERY_KERNEL
@pytest.mark.parametrize("case", THREADS, ids=lambda case: case.name)
def test_the_gradient_has_the_same_bits_for_any_number_of_threads(case: Case, kernel: str) -> None:
    found = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        inputs = case.with_(dtype="bfloat16" if "bf16" in kernel else "float32").make().requiring_grad()
        output, lse, _ = sdpa(case, inputs)
        assert inputs.relative_bias is not None
        found.append(torch.autograd.grad(output.float().square().sum() + lse.sum(), inputs.relative_bias)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_long_sequences_take_no_memory_for_a_matrix() -> None:
    """A matrix of one head would be 1 GiB."""
    program = """
import resource, sys, torch, scaledot
relative = sys.argv[1] == "relative"
L = 16384
q, k, v = (torch.randn(1, 1, L, 64, requires_grad=True) for _ in range(3))
bias = torch.randn(1, 2 * L - 1, requires_grad=True) if relative else None
torch.set_num_threads(2)
scaledot.scaled_dot_product_attention(q, k, v, relative_bias=bias).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peak = {}
    for name in ("plain", "relative"):
        done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=True)
        peak[name] = int(done.stdout) * 1024
    assert peak["relative"] - peak["plain"] < 64 << 20


def test_explain_knows_it() -> None:
    query, key, value = tensors(70, 300)
    plain = scaledot.explain(query, key, value)
    bias = torch.randn(4, 257, requires_grad=True)
    plan = scaledot.explain(query, key, value, relative_bias=bias)
    assert plan.forward.kernel == plain.forward.kernel
    grows = plan.backward.workspace_bytes - plain.backward.workspace_bytes
    assert 4 * bias.numel() <= grows <= 64 * bias.numel()


def test_one_kernel_call_for_a_sum_of_everything() -> None:
    query, key, value = tensors()
    bias, mask = torch.randn(4, 7, requires_grad=True), torch.randn(6, 9)
    slopes = torch.rand(4)
    with Calls() as calls:
        attend(query, key, value, mask, relative_bias=bias, alibi_slopes=slopes, is_causal=True).sum().backward()
    assert calls.names == ["sdpa_recorded.default", "sdpa_backward.default"]


# ----------------------------------------------------------------------------------------------- packed sequences
def lengths_of(made: Any) -> list[tuple[int, int]]:
    return list(zip(made.packed.query_lengths, made.packed.key_lengths, strict=True))


@pytest.mark.parametrize("shape", [(13,), (2, 13), (1, 13), (1, 2, 13), (4, 1, 13), (4, 2, 13)])
def test_packed_sequences(shape: tuple[int, ...]) -> None:
    """Each sequence gets what it gets alone; one bias for all gets the sum of their gradients."""
    made = call(Packed("varlen relative"))
    bias = torch.randn(shape, requires_grad=True)
    output, lse = made.run(relative_bias=bias)
    one = Case("relative", batch=(), causal_alignment="lower_right")
    wanted_bias = torch.zeros_like(bias)
    for b, (found, found_lse) in enumerate(made.results((output, lse))):
        own = bias[b if bias.size(0) == 4 else 0] if bias.dim() == 3 else bias
        i = made.inputs[b]
        results = sdpa(one, Inputs(i.query, i.key, i.value, relative_bias=own))
        assert torch.equal(found, results[0])
        assert torch.equal(found_lse, results[1])
        wanted_bias += torch.autograd.grad(results[0].square().sum(), bias)[0]
    (gradient,) = torch.autograd.grad(output.square().sum(), bias)
    torch.testing.assert_close(gradient, wanted_bias, rtol=1e-5, atol=1e-5)


def test_the_packed_gradient_has_the_same_bits_for_any_number_of_threads() -> None:
    found = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        made = call(Packed("varlen relative", query_lengths=(37, 5, 0, 170, 1), key_lengths=(53, 90, 7, 170, 33)))
        torch.manual_seed(1)
        bias = torch.randn(2, 41, requires_grad=True)
        found.append(torch.autograd.grad(made.run(relative_bias=bias)[0].square().sum(), bias)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_pages() -> None:
    torch.manual_seed(0)
    pool, query = torch.randn(7, 4, 2, 8), torch.randn(3, 2, 8)
    table, used = torch.tensor([[4, 1, 3], [0, 6, 5]]), torch.tensor([10, 7])
    bias, cu_seq_q = torch.randn(2, 9), torch.tensor([0, 2, 3])
    found = scaledot.varlen_attention(
        query, pool, pool, cu_seq_q, None, 2, 10, seqused_k=used, block_table=table, relative_bias=bias
    )
    for b, rows in enumerate((slice(0, 2), slice(2, 3))):
        keys = pool[table[b]].flatten(0, 1)[: used[b]].transpose(0, 1)
        alone = attend(
            query[rows].transpose(0, 1), keys, keys, relative_bias=bias, causal_alignment="lower_right"
        ).transpose(0, 1)
        torch.testing.assert_close(found[rows], alone)


def test_a_double_backward_of_packed_sequences() -> None:
    packed = Packed("varlen relative", query_lengths=(3, 2), key_lengths=(4, 2), common={"dtype": "float64"})
    made = call(packed, requires_grad=False)
    for shape in ((2, 5), (1, 2, 5), (2, 1, 5)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda bias: made.run(relative_bias=bias)[0], (bias,))


# ---------------------------------------------------------------------------------------------- modules, transforms
def test_the_module() -> None:
    torch.manual_seed(0)
    layer, x = scaledot.MultiHeadAttention(32, 4, num_kv_heads=2), torch.randn(2, 9, 32)
    bias = nn.Parameter(torch.randn(4, 7))
    output, weights = layer(x, relative_bias=bias, need_weights=True, is_causal=True)
    wanted, wanted_weights = layer(x, attn_mask=matrix(bias, 9, 9), need_weights=True, is_causal=True)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(weights, wanted_weights)
    output.sum().backward()
    assert bias.grad is not None
    assert bias.grad.abs().sum() > 0


def test_compile_with_dynamic_shapes() -> None:
    bias = torch.randn(4, 7, requires_grad=True)

    def step(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        output: Tensor = attend(query, key, value, relative_bias=bias, causal_alignment="lower_right")
        return output.square().sum()

    fast = torch.compile(step, fullgraph=True, dynamic=True)
    for rows, keys in ((6, 9), (13, 20), (33, 34)):
        made = tensors(rows, keys)
        (found,) = torch.autograd.grad(fast(*made, bias), bias)
        (wanted,) = torch.autograd.grad(step(*made, bias), bias)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 1, 7)])
def test_vmap_gives_a_gradient_for_each_sample(shape: tuple[int, ...]) -> None:
    query, key, value = (t.double() for t in tensors())
    queries, biases = torch.randn(3, *query.shape, dtype=torch.float64), torch.randn(3, *shape, dtype=torch.float64)

    def loss(query: Tensor, bias: Tensor) -> Tensor:
        output: Tensor = attend(query, key, value, relative_bias=bias)
        return output.square().sum()

    gradients = torch.func.grad(loss, argnums=(0, 1))
    for in_dims in ((0, 0), (None, 0), (0, None)):
        given = [t if d == 0 else t[0] for t, d in zip((queries, biases), in_dims, strict=True)]
        with Calls() as calls:
            found = torch.vmap(gradients, in_dims=in_dims)(*given)
        assert calls.names == ["sdpa_recorded.default", "sdpa_backward.default"]
        for k in range(3):
            wanted = gradients(*(t[k] if d == 0 else t for t, d in zip(given, in_dims, strict=True)))
            for mine, right in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine[k], right)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 1, 7), (1, 2, 7)])
def test_vmap_of_packed_sequences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    queries, biases = torch.randn(3, 5, 2, 8, dtype=torch.float64), torch.randn(3, *shape, dtype=torch.float64)
    key = torch.randn(6, 2, 8, dtype=torch.float64)
    cu_seq_q, cu_seq_k = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 6])

    def loss(query: Tensor, bias: Tensor) -> Tensor:
        output = scaledot.varlen_attention(query, key, key, cu_seq_q, cu_seq_k, 3, 4, relative_bias=bias)
        assert isinstance(output, Tensor)
        return output.square().sum()

    gradients = torch.func.grad(loss, argnums=(0, 1))
    for in_dims in ((0, 0), (None, 0), (0, None)):
        given = [t if d == 0 else t[0] for t, d in zip((queries, biases), in_dims, strict=True)]
        found = torch.vmap(gradients, in_dims=in_dims)(*given)
        for k in range(3):
            wanted = gradients(*(t[k] if d == 0 else t for t, d in zip(given, in_dims, strict=True)))
            for mine, right in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine[k], right)


def test_forward_mode_and_hessian() -> None:
    query, key, value = (t.double() for t in tensors(3, 4))
    bias = torch.randn(4, 5, dtype=torch.float64)

    def loss(bias: Tensor) -> Tensor:
        output: Tensor = attend(query, key, value, relative_bias=bias)
        return output.square().sum()

    exact = torch.func.hessian(lambda b: attend(query, key, value, matrix(b, 3, 4)).square().sum())(bias)
    torch.testing.assert_close(torch.func.hessian(loss)(bias), exact)


def test_a_part_of_a_larger_attention() -> None:
    """The distances of a part count from its diagonal, and the gradients of the parts add up."""
    query, key, value = (t.double() for t in tensors(8, 10))
    bias = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    output, lse, _ = torch.ops.scaledot.sdpa(query, key, value, relative_bias=bias)
    cotangent = torch.randn_like(output)
    (wanted,) = torch.autograd.grad(output, bias, cotangent)
    total = torch.zeros_like(bias)
    for rows in (slice(0, 3), slice(3, 8)):
        for keys in (slice(0, 4), slice(4, 10)):
            part = [rows.start - keys.start, rows.start, keys.start, 0, 0, 4]
            *_, gradient, _ = torch.ops.scaledot.sdpa_backward(
                cotangent[:, :, rows], None, None, query[:, :, rows], key[:, :, keys], value[:, :, keys], None, None,
                None, bias.detach(), *[None] * 6, output[:, :, rows].detach(),
                lse[:, :, rows].detach(), None, None, 0.0, False, None, False, "upper_left", None, None, None, None,
                part, None, None, [False] * 4 + [True, False],
            )  # fmt: skip
            total += gradient
    torch.testing.assert_close(total, wanted)


def test_the_default_kernel_is_not_special() -> None:
    query, key, value = tensors(70, 150)
    bias = torch.randn(4, 41)
    wanted = attend(query, key, value, relative_bias=bias)
    with forced("default"):
        torch.testing.assert_close(attend(query, key, value, relative_bias=bias), wanted)


@pytest.mark.parametrize("masked_score", [-torch.inf, -2.0])
def test_a_replaced_score_has_no_gradient(masked_score: float) -> None:
    query, key, value = tensors()
    bias = torch.randn(4, 5, requires_grad=True)
    allowed = torch.ones(6, 9, dtype=torch.bool).tril(0)  # no key after the row's own position
    output = attend(query, key, value, allowed, relative_bias=bias, masked_score=masked_score)
    (gradient,) = torch.autograd.grad(output.square().sum(), bias)
    assert not gradient[:, 3:].any()
    assert gradient[:, :3].all()
