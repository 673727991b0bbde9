"""Packed sequences on DTensors: heads are sharded, and nothing else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import scaledot
from context_parallel import mesh_of
from ranks import Ranks

R, HEADS = Replicate(), Shard(1)
CU_SEQ = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
LONGEST = 7

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (3, 0), "softcap": 2.0},
    "slopes": {"alibi_slopes": (4,), "is_causal": True},
    "slopes_of_each": {"alibi_slopes": (3, 4)},
    "relative": {"relative_bias": (4, 9)},
    "relative_of_each": {"relative_bias": (3, 4, 9), "is_causal": True},
    "tree": {"attn_mask": (12, 5)},
    "tree_of_each": {"attn_mask": (4, 12, 5), "is_causal": True},
    "used": {"seqused_k": torch.tensor([3, 0, 7])},
}


def tensors(kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(12, 4, 8), (12, kv_heads, 8), (12, kv_heads, 6)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def attend(*leaves: Tensor, **options: Any) -> Any:
    return scaledot.varlen_attention(
        *leaves, CU_SEQ, CU_SEQ, LONGEST, LONGEST, enable_gqa=True, return_lse=True, **options
    )


def run_sharded(ranks: str, placements: tuple[Placement, ...], kv_heads: int, option: str) -> list[str]:
    """The differences between DTensors sharded this way and whole tensors, as texts; [] if there are none."""
    mesh, inputs, options = mesh_of(ranks), tensors(kv_heads), dict(OPTIONS[option])
    for name in ("alibi_slopes", "relative_bias", "attn_mask"):
        if name in options:
            options[name] = torch.rand(options[name], generator=torch.Generator().manual_seed(5))
    results = []
    for sharded in False, True:
        leaves = [t.clone() for t in inputs]
        if sharded:
            kv = [R if kv_heads == 1 else p for p in placements]
            leaves = [distribute_tensor(t, mesh, p) for t, p in zip(leaves, (placements, kv, kv), strict=True)]
        leaves = [t.requires_grad_() for t in leaves]
        for name in {"relative_bias", "attn_mask"} & options.keys():
            bias = whole(options[name]).detach().clone()
            bias = distribute_tensor(bias, mesh, [R] * mesh.ndim) if sharded else bias
            leaves.append(bias.detach().requires_grad_())
            options[name] = leaves[-1]
        with CommDebugMode() as communication, warnings.catch_warnings():
            warnings.simplefilter("error")
            output, lse = attend(*leaves[:3], **options)
        if sharded:
            assert output.placements == placements
            assert lse.placements == tuple(Shard(0) if p == HEADS else R for p in placements)
            assert communication.get_total_counts() == 0, communication.get_comm_counts()
        loss = whole(output).square().sum() + whole(lse).where(whole(lse).isfinite(), 0).square().sum()
        results.append([whole(t) for t in (output, lse, *torch.autograd.grad(loss, leaves))])
    wrong = []
    for number, (a, b) in enumerate(zip(*results, strict=True)):
        try:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            wrong.append(f"{number}: {error}")
    return wrong


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("ranks", "placements", "kv_heads"),
    [("2", (R,), 4), *(("2", (HEADS,), heads) for heads in (4, 2, 1)), ("4", (HEADS,), 4), ("2x2", (HEADS, R), 2)],
)
def test_rules(four: Ranks, ranks: str, placements: tuple[Placement, ...], kv_heads: int, option: str) -> None:
    assert four.run(run_sharded, ranks, placements, kv_heads, option) == [[]] * 4


def run_pages() -> list[bool]:
    """A cache in pages, sharded by head."""
    mesh, generator = mesh_of("2"), torch.Generator().manual_seed(4)
    query = torch.randn(2, 4, 8, generator=generator)
    key, value = (torch.randn(5, 4, 2, 8, generator=generator) for _ in range(2))  # 5 pages of 4 tokens
    table, used = torch.tensor([[4, 0], [1, 3]]), torch.tensor([6, 3])

    def decode(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return scaledot.varlen_attention(
            q, k, v, torch.tensor([0, 1, 2]), None, 1, 8, seqused_k=used, block_table=table, enable_gqa=True
        )

    found = decode(*(distribute_tensor(t, mesh, [Shard(t.dim() - 2)]) for t in (query, key, value)))
    return [found.placements == (HEADS,), torch.allclose(whole(found), decode(query, key, value), atol=1e-6)]


def test_pages(four: Ranks) -> None:
    assert four.run(run_pages) == [[True, True]] * 4


def run_redistributed(dropout_p: float, dim: int) -> tuple[list[str], bool]:
    mesh, inputs = mesh_of("2"), tensors(4)
    torch.manual_seed(1)
    wanted = attend(*inputs, dropout_p=dropout_p)[0]
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = attend(*(distribute_tensor(t, mesh, [Shard(dim)]) for t in inputs), dropout_p=dropout_p)[0]
    return [str(w.message) for w in caught], torch.allclose(whole(found), wanted, atol=1e-5)


@pytest.mark.parametrize(("dropout_p", "dim"), [(0.0, 0), (0.4, 1)])
def test_what_cannot_be_sharded_is_gathered_with_a_warning(four: Ranks, dropout_p: float, dim: int) -> None:
    for said, right in four.run(run_redistributed, dropout_p, dim):
        assert right
        assert [text.split(":")[0] for text in said] == ["query", "key", "value"]
        assert all("redistributed" in text for text in said)


def run_plain_key() -> None:
    query, key, value = tensors(4)
    attend(distribute_tensor(query, mesh_of("2"), [R]), key, value)


def test_plain_tensors_among_dtensors(four: Ranks) -> None:
    for kind, text in four.errors(run_plain_key):
        assert kind == "TypeError"
        assert "key: got a plain tensor" in text
