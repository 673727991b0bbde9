"""DTensor's rules for the ops, tensor-parallel modules, DDP and FSDP on several processes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import scaledot
from context_parallel import mesh_of
from ranks import Ranks
from scaledot.distributed import tensor_parallel

R, BATCH, HEADS = Replicate(), Shard(0), Shard(1)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensors(kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(4, 4, 19, 8), (4, kv_heads, 23, 8), (4, kv_heads, 23, 12)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout_p": 0.4, "is_causal": True, "causal_alignment": "lower_right"},
    "bool_mask": {"attn_mask": (4, 1, 1, 23), "return_weights": True},
    "blocks": {"block_mask": (4, 1, 19, 23), "return_weights": True},
    "blocks_heads": {"block_mask": (4, 19, 23), "is_causal": True},
    "bias": {"attn_mask": (4, 19, 23), "alibi_slopes": (4,), "return_lse": True},
    "relative": {"relative_bias": (4, 11), "is_causal": True},
    "relative_all": {"relative_bias": (4, 4, 11), "return_lse": True},
    "bias_all": {"attn_mask": (4, 4, 19, 23), "alibi_slopes": (4, 4), "window": (5, 3)},
    "bias_rows": {"attn_mask": (19, 23), "softcap": 2.0},
}


def run_sharded(ranks: str, placements: tuple[Placement, ...], kv_heads: int, option: str) -> list[str]:
    """The differences between DTensors sharded this way and whole tensors, as texts; [] if there are none."""
    mesh, inputs, options = mesh_of(ranks), tensors(kv_heads), dict(OPTIONS[option])
    generator = torch.Generator().manual_seed(5)
    for name in ("attn_mask", "alibi_slopes", "relative_bias"):
        if name in options:
            options[name] = torch.rand(options[name], generator=generator)
    if option == "bool_mask":
        options["attn_mask"] = options["attn_mask"] < 0.7
    if "block_mask" in options:
        shown = torch.rand(options["block_mask"], generator=generator) < 0.7
        options["block_mask"] = scaledot.BlockMask.from_dense(shown, (4, 8))
    learnt = "attn_mask" if option.startswith("bias") else "relative_bias" if option.startswith("relative") else None
    results = []
    for sharded in False, True:
        leaves = [t.clone() for t in inputs]
        arguments = dict(options)
        if sharded:
            kv = [R if p == HEADS and kv_heads == 1 else p for p in placements]
            leaves = [distribute_tensor(leaves[0], mesh, placements)]
            leaves += [distribute_tensor(t.clone(), mesh, kv) for t in inputs[1:]]
            if learnt:
                arguments[learnt] = distribute_tensor(arguments[learnt], mesh, [R] * mesh.ndim)
        leaves = [t.requires_grad_() for t in leaves]
        if learnt:
            arguments[learnt] = arguments[learnt].clone().detach().requires_grad_()
            leaves.append(arguments[learnt])
        torch.manual_seed(6)
        with CommDebugMode() as communication, warnings.catch_warnings():
            warnings.simplefilter("error")
            found = scaledot.scaled_dot_product_attention(*leaves[:3], enable_gqa=True, **arguments)
        found = found if isinstance(found, tuple) else (found,)
        if sharded:
            assert found[0].placements == placements, found[0].placements
            # Only the seed is sent, once for each dimension of the mesh.
            seeds = mesh.ndim if "dropout_p" in options else 0
            assert communication.get_total_counts() <= seeds, communication.get_comm_counts()
        gradients = torch.autograd.grad(sum(whole(f).square().sum() for f in found), leaves)
        results.append([whole(t) for t in (*found, *gradients)])
    wrong = []
    for number, (a, b) in enumerate(zip(*results, strict=True)):
        try:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            wrong.append(f"{number}: {error}")
    return wrong


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("ranks", "placements"),
    [("2", (R,)), ("2", (BATCH,)), ("2", (HEADS,)), ("4", (BATCH,)), ("2x2", (BATCH, HEADS)), ("2x2", (HEADS, R))],
)
def test_rules(four: Ranks, ranks: str, placements: tuple[Placement, ...], kv_heads: int, option: str) -> None:
    assert four.run(run_sharded, ranks, placements, kv_heads, option) == [[]] * 4


def run_redistributed(dropout_p: float) -> tuple[list[str], bool]:
    """A sequence-sharded DTensor: the warnings, and whether the result is right."""
    mesh, inputs = mesh_of("2"), tensors(2)
    torch.manual_seed(1)
    wanted = scaledot.scaled_dot_product_attention(*inputs, enable_gqa=True, dropout_p=dropout_p)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = [distribute_tensor(t, mesh, [Shard(2)]) for t in inputs]
        found = scaledot.scaled_dot_product_attention(*sharded, enable_gqa=True, dropout_p=dropout_p)
    return [str(w.message) for w in caught], torch.allclose(whole(found), wanted, atol=1e-5)


def test_a_sharded_sequence_is_gathered_with_a_warning(four: Ranks) -> None:
    for said, right in four.run(run_redistributed, 0.3):
        assert right
        assert [text.split(":")[0] for text in said] == ["query", "key", "value"]
        assert all("redistributed" in text and "context_parallel_attention" in text for text in said)


def run_raw_op() -> bool:
    """The op itself on DTensors, with dropout but without a part: nothing may be sharded then."""
    mesh, inputs = mesh_of("2"), tensors(4)
    seed = torch.tensor([3, 4])
    wanted = torch.ops.scaledot.sdpa(*inputs, None, None, seed, dropout_p=0.5)
    sharded = [distribute_tensor(t, mesh, [HEADS]) for t in inputs]
    found = torch.ops.scaledot.sdpa(*sharded, None, None, distribute_tensor(seed, mesh, [R]), dropout_p=0.5)
    return all(torch.allclose(whole(a), b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_the_op_itself(four: Ranks) -> None:
    assert all(four.run(run_raw_op))


def run_plain_key() -> None:
    query, key, value = tensors(4)
    scaledot.scaled_dot_product_attention(distribute_tensor(query, mesh_of("2"), [R]), key, value)


def test_plain_tensors_among_dtensors(four: Ranks) -> None:
    for kind, text in four.errors(run_plain_key):
        assert kind == "TypeError"
        assert "key: got a plain tensor" in text


# --------------------------------------------------------------------------------------------------------- modules
def run_tensor_parallel(ranks: str, kv_heads: int, dropout: float) -> list[str]:
    mesh = mesh_of(ranks)
    torch.manual_seed(1)
    module = scaledot.MultiHeadAttention(32, 4, num_kv_heads=kv_heads, dropout=dropout)
    parallel = tensor_parallel(copy.deepcopy(module), mesh)
    x, mask = torch.randn(2, 19, 32, requires_grad=True), torch.rand(2, 19) < 0.7
    results = []
    for each in module, parallel:
        torch.manual_seed(7)
        output, weights = each(x, is_causal=True, key_mask=mask, need_weights=True)
        gradients = torch.autograd.grad(output.square().sum(), [x, *each.parameters()])
        results.append([output, whole(weights), *map(whole, gradients)])
    wrong = []
    for number, (a, b) in enumerate(zip(*results, strict=True)):
        try:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        except AssertionError as error:
            wrong.append(f"{number}: {error}")
    return wrong


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("ranks", "kv_heads"), [("2", 4), ("2", 2), ("4", 4)])
def test_tensor_parallel(four: Ranks, ranks: str, kv_heads: int, dropout: float) -> None:
    assert four.run(run_tensor_parallel, ranks, kv_heads, dropout) == [[]] * 4


def run_bad_tensor_parallel(kv_heads: int) -> None:
    tensor_parallel(scaledot.MultiHeadAttention(32, 4, num_kv_heads=kv_heads), mesh_of("4"))


def test_heads_that_ranks_do_not_divide(four: Ranks) -> None:
    for kind, text in four.errors(run_bad_tensor_parallel, 2):
        assert (kind, text.split(":")[0]) == ("ValueError", "num_kv_heads")


def run_wrapped(wrapper: str) -> list[float]:
    """Largest differences of parameters after three steps, each rank with its own batch, from one process with all."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(16, 16), _Attention(16))
    wrapped: nn.Module = copy.deepcopy(module)
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(wrapped)
    else:
        fully_shard(wrapped[1])  # type: ignore[index]
        fully_shard(wrapped)
    for model, rows in (module, slice(None)), (wrapped, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(3):
            x = torch.randn(8, 11, 16, generator=generator)[rows]
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    pairs = zip(module.parameters(), wrapped.parameters(), strict=True)
    return [float((a - whole(b)).abs().max()) for a, b in pairs]


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = scaledot.MultiHeadAttention(width, 4, num_kv_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, is_causal=True)[0]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrapped_modules_train_as_one_process_does(four: Ranks, wrapper: str) -> None:
    for differences in four.run(run_wrapped, wrapper):
        assert max(differences) < 1e-5
