"""scaledot.dropin.flex_attention: torch's signature, torch's results, and the gradients that torch lacks on a CPU."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

import scaledot
from bad_arguments import refused
from scaledot.dropin.flex_attention import flex_attention
from scaledot.score_mods import alibi, compose, relative_bias, softcap

SLOPES = torch.tensor([0.1, 0.3, 0.0, 0.7], dtype=torch.float64)
TABLE = torch.linspace(-1, 1, 2 * 4 * 21, dtype=torch.float64).sin().view(2, 4, 21)
SCORE_MODS: dict[str, Any] = {
    "none": None,
    "softcap": softcap(1.5),
    "softcap, NumPy": softcap(numpy.float32(1.5)),  # type: ignore[arg-type]
    "alibi": alibi(SLOPES),
    "alibi_batch": alibi(torch.stack([SLOPES, SLOPES.flip(0)])),
    "relative": relative_bias(TABLE[0, 1]),
    "relative_heads": relative_bias(TABLE[0]),
    "relative_batch": relative_bias(TABLE),
    "relative_one_head": relative_bias(TABLE[:, :1]),
    "all": compose(softcap(2), relative_bias(TABLE[0]), alibi(SLOPES)),
    "both": compose(softcap(2), alibi(SLOPES)),
    "nested": compose(compose(softcap(2.5)), compose(), alibi(SLOPES)),
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": lambda b, h, i, j: j <= i,
    "heads": lambda b, h, i, j: (i - j).abs() <= 5 * (h + 1) + b,
    "empty_rows": lambda b, h, i, j: (j <= i) & (i > 6),
}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(kv_heads: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 40, 8), (2, kv_heads, 56, 8), (2, kv_heads, 56, 6))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def mask_of(name: str) -> Any:
    mask_mod = MASKS[name]
    return None if mask_mod is None else theirs.create_block_mask(mask_mod, 2, 4, 40, 56, device="cpu", BLOCK_SIZE=16)


def formula(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, scale: float | None) -> Any:
    """(output, lse) with all scores in memory, from the functions as torch calls them."""
    group = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    score = query @ key.mT * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    places = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    if score_mod is not None:
        score = score_mod(score, *places)
    if mask_mod is not None:
        score = torch.where(mask_mod(*places), score, -math.inf)
    empty = (score == -math.inf).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, score), -1))
    lse = torch.logsumexp(torch.where(empty, 0.0, score), -1).masked_fill(empty[..., 0], -math.inf)
    return weights @ value, lse


def test_the_signature_is_torchs() -> None:
    ours, torchs = (inspect.signature(f).parameters for f in (flex_attention, theirs.flex_attention))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in torchs.values()
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score_mod", SCORE_MODS)
def test_results_and_gradients(score_mod: str, mask: str) -> None:
    for kv_heads, scale in ((4, None), (2, 0.3)):
        found, wanted = [], []
        for function, into in ((flex_attention, found), (formula, wanted)):
            leaves = [t.requires_grad_() for t in inputs(kv_heads)]
            if function is flex_attention:
                output, lse = flex_attention(
                    *leaves, SCORE_MODS[score_mod], mask_of(mask), scale, kv_heads != 4, return_lse=True
                )
            else:
                output, lse = formula(*leaves, SCORE_MODS[score_mod], MASKS[mask], scale)
            loss = output.square().sum() + torch.where(lse == -math.inf, 0.0, lse).square().sum()
            into += [output, lse, *torch.autograd.grad(loss, leaves)]
        for ours, exact in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score_mod", SCORE_MODS)
def test_torch_gives_the_same(score_mod: str, mask: str) -> None:
    """One definition of a score_mod runs in both."""
    arguments = (*inputs(), SCORE_MODS[score_mod], mask_of(mask))
    request = theirs.AuxRequest(lse=True)
    wanted, wanted_aux = theirs.flex_attention(*arguments, return_aux=request)
    found, found_aux = flex_attention(*arguments, return_aux=request)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert type(found_aux) is type(wanted_aux)
    torch.testing.assert_close(found_aux.lse, wanted_aux.lse.to(found_aux.lse.dtype), rtol=1e-6, atol=1e-6)
    assert found_aux.max_scores is None


def test_a_table_gets_its_gradient() -> None:
    wanted, found = [], []
    for function, into in ((formula, wanted), (flex_attention, found)):
        table = TABLE.clone().requires_grad_()
        arguments = (*inputs(), relative_bias(table), None, None)
        output = function(*arguments)[0] if function is formula else flex_attention(*arguments[:4])
        into.append(torch.autograd.grad(output.square().sum(), table)[0])
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("table", [torch.zeros(2, 4), torch.zeros(()), torch.zeros(1, 1, 1, 3)])
def test_a_table_of_another_shape(table: Tensor) -> None:
    with pytest.raises(ValueError, match=r"table: got shape .*; needs \(N,\), \(H, N\) or \(B, H, N\)"):
        relative_bias(table)


def test_what_is_returned() -> None:
    arguments = inputs()
    output = flex_attention(*arguments)
    assert isinstance(output, Tensor)
    one, aux = flex_attention(*arguments, return_aux=theirs.AuxRequest())
    assert torch.equal(one, output)
    assert aux.lse is None
    assert torch.equal(flex_attention(*arguments, kernel_options={"BLOCK_M": 32}), output)


def test_our_block_mask() -> None:
    mask = scaledot.BlockMask.from_mask_mod(MASKS["heads"], 2, 4, 40, 56, 16)
    assert torch.equal(flex_attention(*inputs(), None, mask), flex_attention(*inputs(), None, mask_of("heads")))


def test_compiles_once_for_all_lengths() -> None:
    """In one graph, with the tensors of the score_mods as inputs."""

    def run(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, table: Tensor, mask: Any) -> Any:
        score_mod = compose(softcap(2.0), relative_bias(table), alibi(slopes))
        return flex_attention(query, key, value, score_mod, mask)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    slopes, table = SLOPES.clone(), TABLE[0].clone().requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (40, 56, 72):
            torch.manual_seed(length)
            leaves = [torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
            mask = scaledot.BlockMask.from_mask_mod(MASKS["heads"], 2, 4, length, length, 16)
            found, wanted = (function(*leaves, slopes, table, mask) for function in (compiled, run))
            assert torch.equal(found, wanted)
            both = (torch.autograd.grad(out.square().sum(), (*leaves, table)) for out in (found, wanted))
            assert all(map(torch.equal, *both))


def test_vmap() -> None:
    queries, (_, key, value) = torch.randn(3, 2, 4, 40, 8, dtype=torch.float64), inputs()
    mask, score_mod = scaledot.BlockMask.from_mask_mod(MASKS["causal"], 1, 1, 40, 56, 16), SCORE_MODS["both"]

    def run(query: Tensor) -> Any:
        return flex_attention(query, key, value, score_mod, mask)

    torch.testing.assert_close(torch.vmap(run)(queries), torch.stack([run(query) for query in queries]))
    gradients = torch.func.grad(lambda query: run(query).square().sum())
    torch.testing.assert_close(torch.vmap(gradients)(queries), torch.stack([gradients(query) for query in queries]))


OTHERS: dict[str, Any] = {
    "a function": lambda score, b, h, i, j: score + 1,
    "another order": compose(alibi(SLOPES), softcap(2.0)),
    "twice": compose(alibi(SLOPES), alibi(SLOPES)),
    "with a function": compose(softcap(2.0), lambda score, b, h, i, j: score * (1 + b) - i),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_score_mods(name: str) -> None:
    arguments = (*inputs(), OTHERS[name], mask_of("causal"))
    torch.testing.assert_close(flex_attention(*arguments), theirs.flex_attention(*arguments))


def test_bad_input() -> None:
    arguments = inputs()
    with pytest.raises(NotImplementedError, match="return_aux: got a request for max_scores"):
        flex_attention(*arguments, return_aux=theirs.AuxRequest(max_scores=True))
    with pytest.raises(TypeError) as raised:
        flex_attention(*arguments, return_aux=True)
    needs = "a torch.nn.attention.flex_attention.AuxRequest, or None"
    assert str(raised.value) == f"return_aux: got True, a bool; needs {needs}"
    for changes, needed in (
        ({"return_lse": True, "return_aux": theirs.AuxRequest(lse=True)}, ("return_lse", "return_aux")),
        ({"kernel_options": 3}, ("kernel_options", "3", "a dict")),
        ({"block_mask": torch.ones(40, 56)}, ("block_mask", "torch.Tensor")),
        ({"scale": math.nan}, ("scale", "nan")),
    ):
        with refused(*needed):
            flex_attention(*arguments, **changes)  # type: ignore[arg-type]
    for make, needed in (
        (lambda: softcap(0.0), ("c", "0.0", "above 0")),
        (lambda: softcap("3"), ("c", "'3'", "a number")),  # type: ignore[arg-type]
        (lambda: alibi([0.5]), ("slopes", "a list")),  # type: ignore[arg-type]
        (lambda: alibi(torch.ones(3).long()), ("slopes", "int64", "floating")),
        (lambda: alibi(torch.ones(1, 2, 3)), ("slopes", "(1, 2, 3)", "(H,)")),
        (lambda: compose(3), ("score_mods", "3", "functions")),  # type: ignore[arg-type]
    ):
        with refused(*needed):
            make()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
def test_strides_are_those_of_query_as_torchs(order: tuple[int, ...]) -> None:
    shape = (2, 4, 5, 8)
    inverse = [order.index(d) for d in range(4)]
    query = torch.randn([shape[d] for d in order]).permute(inverse)
    for value in (query, torch.cat([query, query], -1)):
        found, expected = flex_attention(query, query, value), theirs.flex_attention(query, query, value)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, scaledot.scaled_dot_product_attention(query, query, value), rtol=0, atol=0)
    torch.testing.assert_close(
        flex_attention(query[:, :1], query, query),
        scaledot.scaled_dot_product_attention(query[:, :1], query, query),
        rtol=0,
        atol=0,
    )
