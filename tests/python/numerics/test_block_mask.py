"""scaledot.BlockMask: how it is made, and that a call with it is a call with the mask that it stands for."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask

import reference
import scaledot
from bad_arguments import refused
from kernels_under_test import FEW_ROWS, GENERAL
from scaledot import BlockMask
from scaledot.masks import document_mask

attend: Any = scaledot.scaled_dot_product_attention
SIZES: list[Any] = [16, (8, 24), (1, 1), (7, 100), 128, (64, 3)]
LENGTHS = [(40, 50), (1, 130), (129, 64)]


def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return key <= row


def banded(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return (row - key).abs() <= 9 * (head + 1) + batch


def random_mask(*shape: int) -> Tensor:
    """Blocks of 8 x 8 that are empty, full or random, so that every block size finds all kinds."""
    torch.manual_seed(3)
    *lead, rows, keys = shape
    kinds = torch.randint(0, 3, (*lead, -(-rows // 8), -(-keys // 8)))
    kinds = kinds.repeat_interleave(8, -2).repeat_interleave(8, -1)[..., :rows, :keys]
    return torch.where(kinds == 2, torch.rand(shape) < 0.5, kinds == 1)


def inputs(dtype: torch.dtype = torch.float64, lengths: tuple[int, int] = (40, 50), kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = ((2, 4, lengths[0], 8), (2, kv_heads, lengths[1], 8), (2, kv_heads, lengths[1], 6))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


# ------------------------------------------------------------------------------------------------ making one
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_from_dense_and_back(size: Any, lengths: tuple[int, int]) -> None:
    for lead in ((), (3,), (2, 3), (2, 1, 2)):
        mask = random_mask(*lead, *lengths)
        made = BlockMask.from_dense(mask, size)
        assert torch.equal(made.to_dense(), mask)
        assert made.shape == tuple(mask.shape)
        rows, keys = made.block_size
        assert made.blocks.shape == (*lead, -(-lengths[0] // rows), -(-lengths[1] // keys))
        for at in itertools.product(*map(range, made.blocks.shape)):
            *entry, m, n = at
            block = mask[tuple(entry)][m * rows : (m + 1) * rows, n * keys : (n + 1) * keys]
            number = int(made.blocks[at])
            assert number == (-1 if block.all() else number if block.any() else -2)
            assert (number >= 0) == (bool(block.any()) and not bool(block.all()))
        assert made.bits.size(0) == int((made.blocks >= 0).sum())  # memory for the partial blocks only
        assert made.sparsity() == pytest.approx(100 * float((made.blocks == -2).float().mean()))


def test_a_mask_that_is_all_the_same() -> None:
    for value, number in ((True, -1), (False, -2)):
        made = BlockMask.from_dense(torch.full((300, 70), value), 64)
        assert (made.blocks == number).all()
        assert made.bits.shape == (0, 64, 1)
        assert (made.to_dense() == value).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mask_mod", [causal, banded])
def test_from_mask_mod(mask_mod: Any, size: Any) -> None:
    made = BlockMask.from_mask_mod(mask_mod, 2, 3, 45, 70, size)
    assert torch.equal(made.to_dense(), create_mask(mask_mod, 2, 3, 45, 70, device="cpu"))
    shared = BlockMask.from_mask_mod(causal, None, None, 45, 70, size)
    assert shared.shape == (1, 1, 45, 70)


def test_a_mask_mod_may_index_tensors_and_ignore_arguments() -> None:
    """Rows and keys past the last one, in the last blocks, are never asked for."""
    ids = torch.arange(45) // 7
    table = torch.rand(45, 70) < 0.5
    for mask_mod, wanted in (
        (lambda b, h, i, j: ids[i] == j // 7, ids[:, None] == torch.arange(70) // 7),
        (lambda b, h, i, j: table[i][j], table),
        (lambda b, h, i, j: table[i, j], table),
        (lambda b, h, i, j: i.new_ones((), dtype=torch.bool), torch.ones(45, 70, dtype=torch.bool)),
    ):
        made = BlockMask.from_mask_mod(mask_mod, 1, 1, 45, 70, 32)
        assert torch.equal(made.to_dense()[0, 0], wanted)


@pytest.mark.parametrize("size", [16, (16, 32), 128], ids=str)
def test_from_torch(size: Any) -> None:
    for mask_mod, batch, heads in ((causal, None, None), (banded, 2, 3), (banded, 1, 3)):
        theirs = create_block_mask(mask_mod, batch, heads, 80, 100, device="cpu", BLOCK_SIZE=size)
        ours = BlockMask.from_torch(theirs)
        assert torch.equal(ours.to_dense(), create_mask(mask_mod, batch, heads, 80, 100, device="cpu"))
        rows, keys = size if isinstance(size, tuple) else (size, size)
        assert ours.block_size == (min(rows, 80), min(keys, 100))
        assert BlockMask.from_torch(theirs) is ours
        assert BlockMask.from_torch(ours) is ours


def test_a_mask_of_torch_without_partial_blocks() -> None:
    theirs = create_block_mask(lambda b, h, i, j: i // 16 == j // 16, 1, 1, 48, 64, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(
        BlockMask.from_torch(theirs).to_dense()[0, 0], torch.arange(48)[:, None] // 16 == torch.arange(64) // 16
    )


def test_only_partial_blocks_of_torch_are_evaluated_and_only_once() -> None:
    """In a mask whose blocks and mask_mod disagree, the blocks win."""
    calls: list[int] = []

    def even(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        calls.append(1)
        return key % 2 == 0

    one = torch.ones(1, 1, 2, dtype=torch.int32)
    theirs = TorchBlockMask.from_kv_blocks(
        one, torch.tensor([[[[0, 1], [1, 0]]]]).int(), one, torch.tensor([[[[1, 0], [2, 0]]]]).int(),
        BLOCK_SIZE=16, mask_mod=even, seq_lengths=(32, 48),
    )  # fmt: skip
    wanted = torch.zeros(32, 48, dtype=torch.bool)
    wanted[:16, 0:16:2] = wanted[:16, 16:32] = wanted[16:, 16:32:2] = wanted[16:, 32:] = True
    calls.clear()
    query, key, value = (t.detach() for t in inputs(lengths=(32, 48), kv_heads=4))
    for _ in range(3):
        found = attend(query, key, value, block_mask=theirs)
    assert len(calls) == 1  # torch.vmap calls it once for all blocks
    torch.testing.assert_close(found, attend(query, key, value, wanted))
    assert torch.equal(BlockMask.from_torch(theirs).to_dense()[0, 0], wanted)


def test_sizes_may_be_spelled_as_torch_takes_them() -> None:
    wanted = BlockMask.from_mask_mod(causal, 1, 2, 40, 50, 16)
    for integer in (numpy.int64, numpy.uint8, torch.tensor):
        sizes = [integer(size) for size in (1, 2, 40, 50)]
        made = BlockMask.from_mask_mod(causal, *sizes, block_size=integer(16))
        assert str(made) == str(wanted)
        assert torch.equal(made.bits, wanted.bits)


def test_a_mask_of_torch_whose_mask_mod_is_gone() -> None:
    sliced = create_block_mask(and_masks(causal, banded), 2, 3, 64, 64, device="cpu", BLOCK_SIZE=16)[:, :2]
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        attend(*inputs(lengths=(64, 64)), block_mask=sliced)


@pytest.mark.parametrize("is_causal", [False, True])
def test_document_mask(is_causal: bool) -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 3, 3, 4, 4]])
    wanted = ids[:, :, None] == ids[:, None, :]
    if is_causal:
        wanted &= torch.ones(8, 8).tril().bool()
    for size in (1, 3, 16):
        made = BlockMask.from_mask_mod(document_mask(ids, is_causal), 2, 1, 8, 8, size)
        assert torch.equal(made.to_dense()[:, 0], wanted)
        made = BlockMask.from_mask_mod(document_mask(ids[1], causal=is_causal), None, None, 8, 8, size)
        assert torch.equal(made.to_dense()[0, 0], wanted[1])
    theirs = create_block_mask(document_mask(ids, is_causal), 2, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    assert torch.equal(BlockMask.from_torch(theirs).to_dense()[:, 0], wanted)


def test_copies() -> None:
    made = BlockMask.from_dense(random_mask(2, 3, 40, 50), 16)
    for other in (made.to("cpu"), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other.to_dense(), made.to_dense())
        assert (other.block_size, other.lengths) == (made.block_size, made.lengths)
    assert made.to("meta").device.type == "meta"
    with pytest.raises(TypeError, match=r"device: got a torch\.dtype; needs"):
        made.to(torch.int32)  # type: ignore[arg-type]
    assert "shape=(2, 3, 40, 50)" in repr(made)
    assert "sparsity=" in repr(made)


def test_saved_and_loaded_as_weights_only(tmp_path: Path) -> None:
    made = BlockMask.from_dense(random_mask(2, 3, 40, 50), (8, 24))
    torch.save({"mask": made, "other": [made]}, tmp_path / "mask.pt")
    program = f"""
import torch, scaledot
loaded = torch.load({str(tmp_path / "mask.pt")!r}, weights_only=True)
mask = loaded["mask"]
assert type(mask) is scaledot.BlockMask and mask is loaded["other"][0]
torch.save(mask.to_dense(), {str(tmp_path / "dense.pt")!r})
query, key = torch.ones(2, 3, 40, 8), torch.ones(2, 3, 50, 8)
scaledot.scaled_dot_product_attention(query, key, key, block_mask=mask)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert torch.equal(torch.load(tmp_path / "dense.pt", weights_only=True), made.to_dense())


# ------------------------------------------------------------------------------------------------ calls
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": dict(is_causal=True, causal_alignment="lower_right"),
    "window": dict(window=(12, 5)),
    "bias": dict(attn_mask=torch.linspace(-2, 2, 4 * 50, dtype=torch.float64).view(4, 1, 50)),
    "bool": dict(attn_mask=torch.arange(50) % 5 != 0),
    "masked_score": dict(attn_mask=torch.arange(50) % 5 != 0, masked_score=-1.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.1, 0.2, 0.0, 0.4], dtype=torch.float64)),
    "softcap": dict(softcap=1.5),
}


@pytest.mark.parametrize("lead", [(), (1, 1), (4,), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients(name: str, lead: tuple[int, ...], kernel: str) -> None:
    mask = BlockMask.from_dense(random_mask(*lead, 40, 50), (8, 16))
    found, wanted = [], []
    for function, into in ((attend, found), (reference.attention, wanted)):
        leaves = inputs()
        options = dict(OPTIONS[name])
        bias = options.get("attn_mask")
        if bias is not None and bias.is_floating_point():
            options["attn_mask"] = bias.clone().requires_grad_()
            leaves.append(options["attn_mask"])
        asked = dict(return_weights=True, return_lse=True) if function is attend else {}
        results = function(*leaves[:3], enable_gqa=True, block_mask=mask, **options, **asked)
        output, weights, lse = results if function is attend else (results[0], results[2], results[1])
        loss = output.square().sum() + weights.square().sum() + torch.where(lse == -torch.inf, 0.0, lse).sum()
        into += [output, weights, lse, *torch.autograd.grad(loss, leaves)]
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", GENERAL + FEW_ROWS, indirect=True)
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_over_many_keys(rows: int, kernel: str) -> None:
    mask = random_mask(2, 1, rows, 1500)
    query, key, value = (t.detach() for t in inputs(lengths=(rows, 1500), kv_heads=2))
    found = attend(query, key, value, enable_gqa=True, block_mask=BlockMask.from_dense(mask, (128, 64)))
    wanted = attend(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(found, wanted)


def test_rows_without_keys_are_zero(kernel: str) -> None:
    mask = random_mask(40, 50)
    mask[7:20] = False
    leaves = inputs()
    output, weights, lse = attend(
        *leaves, enable_gqa=True, block_mask=BlockMask.from_dense(mask, 8), return_weights=True, return_lse=True
    )
    grads = torch.autograd.grad(output.sum() + (weights * weights).sum(), leaves)
    assert (output[:, :, 7:20] == 0).all()
    assert (weights[:, :, 7:20] == 0).all()
    assert (lse[:, :, 7:20] == -torch.inf).all()
    assert (grads[0][:, :, 7:20] == 0).all()
    assert all(torch.isfinite(g).all() for g in grads)


def test_what_is_hidden_may_be_nan(kernel: str) -> None:
    mask = torch.ones(40, 50, dtype=torch.bool)
    mask[:, 11:37] = False
    query, key, value = inputs()
    with torch.no_grad():
        key[:, :, 11:37], value[:, :, 11:37] = torch.nan, torch.inf
    output = attend(query, key, value, enable_gqa=True, block_mask=BlockMask.from_dense(mask, 16))
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert torch.isfinite(output).all()
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[1][:, :, 11:37] == 0).all()
    assert (grads[2][:, :, 11:37] == 0).all()


def test_dropout_drops_what_it_drops_with_a_dense_mask(kernel: str) -> None:
    mask, arguments = random_mask(2, 4, 40, 50), inputs(torch.float32)
    found = []
    for option in ({"block_mask": BlockMask.from_dense(mask, 16)}, {"attn_mask": mask}):
        torch.manual_seed(5)
        found.append(attend(*arguments, dropout_p=0.4, enable_gqa=True, return_weights=True, **option)[1])
    assert torch.equal(found[0] == 0, found[1] == 0)
    torch.testing.assert_close(*found)


def test_higher_derivatives() -> None:
    mask = BlockMask.from_dense(random_mask(4, 6, 9), (4, 3))
    torch.manual_seed(2)
    leaves = [torch.randn(2, 4, length, 3, dtype=torch.float64, requires_grad=True) for length in (6, 9, 9)]

    def function(*tensors: Tensor) -> Any:
        return attend(*tensors, block_mask=mask, return_weights=True, is_causal=True, causal_alignment="lower_right")

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_lengths_of_zero() -> None:
    for rows, keys in ((0, 5), (5, 0), (0, 0)):
        made = BlockMask.from_dense(torch.ones(rows, keys, dtype=torch.bool))
        query, key = torch.randn(2, 2, rows, 4), torch.randn(2, 2, keys, 4)
        output = attend(query, key, key, block_mask=made)
        assert output.shape == query.shape
        assert (output == 0).all()


def test_the_module() -> None:
    torch.manual_seed(0)
    module = scaledot.MultiHeadAttention(16, 4, num_kv_heads=2)
    x, mask = torch.randn(2, 40, 16), random_mask(2, 1, 40, 40)
    block_mask = BlockMask.from_dense(mask, 16)
    keys = torch.arange(40) < torch.tensor([[30], [40]])
    for batched in (True, False):
        some, dense = (x, mask) if batched else (x[0], mask[0])
        of_one = block_mask if batched else BlockMask.from_dense(dense, 16)
        padding = keys if batched else keys[0]
        found = module(some, block_mask=of_one, key_mask=padding, need_weights=True)
        wanted = module(some, attn_mask=dense, key_mask=padding, need_weights=True)
        torch.testing.assert_close(found, wanted)


def test_explain() -> None:
    query, key, value = (t.detach() for t in inputs())
    plan = scaledot.explain(query, key, value, enable_gqa=True, block_mask=BlockMask.from_dense(random_mask(40, 50)))
    assert plan.sdpa == "cannot: it has no block_mask"
    assert plan.forward.kernel == scaledot.explain(query, key, value, enable_gqa=True).forward.kernel


# ------------------------------------------------------------------------------------------------ torch's transforms
def test_compile_with_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v, m: attend(q, k, v, block_mask=m, is_causal=True), fullgraph=True, dynamic=True,
        backend="aot_eager",
    )  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (40, 56, 72):
            mask = BlockMask.from_dense(random_mask(2, 4, length, length), 16)
            leaves = inputs(torch.float32, (length, length), kv_heads=4)
            found, wanted = function(*leaves, mask), attend(*leaves, block_mask=mask, is_causal=True)
            assert torch.equal(found, wanted)
            for ours, theirs in zip(*(torch.autograd.grad(o.sum(), leaves) for o in (found, wanted)), strict=True):
                assert torch.equal(ours, theirs)
    torch._dynamo.reset()


def test_compile_with_a_mask_of_torch() -> None:
    torch._dynamo.reset()
    theirs = create_block_mask(causal, None, None, 40, 50, device="cpu", BLOCK_SIZE=16)
    leaves = [t.detach() for t in inputs(torch.float32)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, block_mask=theirs, enable_gqa=True)

    with pytest.raises(Exception, match="from_torch"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    torch._dynamo.reset()
    wanted = attend(*leaves, block_mask=BlockMask.from_torch(theirs), enable_gqa=True)
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves), wanted)
    torch._dynamo.reset()


def test_vmap_over_everything_else() -> None:
    mask = BlockMask.from_dense(random_mask(4, 40, 50), 16)
    query, key, value = (t.detach() for t in inputs(kv_heads=4))
    found = torch.vmap(lambda q, k, v: attend(q, k, v, block_mask=mask))(query, key, value)
    torch.testing.assert_close(found, attend(query, key, value, block_mask=mask))


def test_vmap_over_masks() -> None:
    dense = random_mask(3, 4, 40, 50)
    masks = [BlockMask.from_dense(one, 16) for one in dense]
    count = max(one.bits.size(0) for one in masks)
    bits = torch.stack([torch.nn.functional.pad(m.bits, (0, 0, 0, 0, 0, count - m.bits.size(0))) for m in masks])
    blocks = torch.stack([m.blocks for m in masks])
    query, key, value = (t.detach()[0] for t in inputs(kv_heads=4))

    def one(numbers: Tensor, words: Tensor) -> Any:
        return attend(query, key, value, block_mask=BlockMask(numbers, words, (16, 16), (40, 50)))

    wanted = torch.stack([attend(query, key, value, mask) for mask in dense])
    torch.testing.assert_close(torch.vmap(one)(blocks, bits), wanted)


# ------------------------------------------------------------------------------------------------ bad input
def working() -> BlockMask:
    return BlockMask.from_dense(random_mask(2, 4, 40, 50), 16)


MASKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a list": ([1], ("block_mask", "[1]", "scaledot.BlockMask")),
    "a dense mask": (torch.ones(40, 50, dtype=torch.bool), ("block_mask", "torch.Tensor", "scaledot.BlockMask")),
    "other lengths": (
        BlockMask.from_dense(torch.ones(40, 49, dtype=torch.bool)),
        ("block_mask", "40 queries and 49 keys", "40 and 50"),
    ),
    "other heads": (BlockMask.from_dense(random_mask(3, 40, 50)), ("block_mask", "(3, 1, 1)", "(2, 4, 1, 1)")),
    "another batch": (BlockMask.from_dense(random_mask(3, 1, 40, 50)), ("block_mask", "(3, 1, 1, 1)")),
    "too many dimensions": (BlockMask.from_dense(random_mask(2, 2, 4, 40, 50)), ("block_mask", "(2, 2, 4, 1, 1)")),
    "another device": (BlockMask.from_dense(random_mask(40, 50)).to("meta"), ("block_mask", "meta", "cpu")),
}


@pytest.mark.parametrize("function", [attend, scaledot.explain])
@pytest.mark.parametrize("name", MASKS)
def test_bad_masks(name: str, function: Any) -> None:
    mask, needed = MASKS[name]
    with refused(*needed):
        function(*inputs(), enable_gqa=True, block_mask=mask)


CHANGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "blocks alone": (lambda a: {"block_bits": None}, ("blocks", "block_bits", "block_shape")),
    "shape alone": (lambda a: {"blocks": None, "block_bits": None}, ("blocks", "a part")),
    "blocks int64": (lambda a: {"blocks": a["blocks"].long()}, ("blocks", "int64", "int32")),
    "bits int32": (lambda a: {"block_bits": a["block_bits"].int()}, ("block_bits", "int32", "int64")),
    "bits 2-D": (lambda a: {"block_bits": a["block_bits"][0]}, ("block_bits", "(16, 1)")),
    "bits of another size": (lambda a: {"block_bits": a["block_bits"][:, :8]}, ("block_bits", "16")),
    "sparse": (lambda a: {"blocks": a["blocks"].to_sparse()}, ("blocks", "Sparse")),
    "three numbers": (lambda a: {"block_shape": [16, 16, 40]}, ("block_shape", "[16, 16, 40]")),
    "a block without rows": (lambda a: {"block_shape": [0, 16, 40, 50]}, ("block_shape", "[0, 16, 40, 50]")),
    "too few blocks": (lambda a: {"blocks": a["blocks"][..., :2]}, ("block_mask", "(2, 4, 3, 2)", "(2, 4, 3, 4)")),
    "a number too large": (lambda a: {"blocks": a["blocks"] + 1000}, ("blocks", "the number", "block_bits")),
    "a number too small": (lambda a: {"blocks": a["blocks"] - 1}, ("blocks", "-3", "-2 (empty)")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_bad_arguments_of_the_op(name: str) -> None:
    mask = working()
    arguments: dict[str, Any] = dict(blocks=mask.blocks, block_bits=mask.bits, block_shape=[16, 16, 40, 50])
    query, key, value = inputs()
    torch.ops.scaledot.sdpa(query, key, value, enable_gqa=True, **arguments)
    change, needed = CHANGES[name]
    with refused(*needed):
        torch.ops.scaledot.sdpa(query, key, value, enable_gqa=True, **{**arguments, **change(arguments)})


def test_a_mask_whose_storage_was_resized() -> None:
    mask = working()
    for name, tensor in (("blocks", mask.blocks), ("block_bits", mask.bits)):
        tensors = {"blocks": mask.blocks, "block_bits": mask.bits, name: tensor.clone()}
        tensors[name].untyped_storage().resize_(8)
        with refused(name, "resized"):
            torch.ops.scaledot.sdpa(*inputs(), enable_gqa=True, block_shape=[16, 16, 40, 50], **tensors)


made: Any = BlockMask
MAKERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "dense array": (lambda: made.from_dense(numpy.ones((4, 5), bool)), ("mask", "numpy.ndarray")),
    "dense float": (lambda: made.from_dense(torch.ones(4, 5)), ("mask", "float32", "torch.bool")),
    "dense 1-D": (lambda: made.from_dense(torch.ones(4, dtype=torch.bool)), ("mask", "(4,)", "(..., Lq, Lk)")),
    "block of none": (lambda: made.from_dense(torch.ones(4, 5) > 0, 0), ("block_size", "0", "at least 1")),
    "block of three": (lambda: made.from_dense(torch.ones(4, 5) > 0, (1, 2, 3)), ("block_size", "(1, 2, 3)")),
    "block of half": (lambda: made.from_dense(torch.ones(4, 5) > 0, 2.5), ("block_size", "2.5", "an integer")),
    "no function": (lambda: made.from_mask_mod(3, 1, 1, 4, 5), ("mask_mod", "3", "a function")),
    "scores": (lambda: made.from_mask_mod(lambda b, h, i, j: i + j, 1, 1, 4, 5), ("mask_mod", "int64", "bool")),
    "negative": (lambda: made.from_mask_mod(causal, 1, 1, -4, 5), ("Lq", "-4", "at least 0")),
    "no mask of torch": (lambda: made.from_torch(7), ("block_mask", "7", "scaledot.BlockMask")),
    "ids float": (lambda: document_mask(torch.ones(4)), ("ids", "float32", "integers")),
    "ids 3-D": (lambda: document_mask(torch.ones(1, 2, 3).long()), ("ids", "(1, 2, 3)", "(B, L) or (L,)")),
}


@pytest.mark.parametrize("name", MAKERS)
def test_bad_makings(name: str) -> None:
    make, needed = MAKERS[name]
    with refused(*needed):
        make()
