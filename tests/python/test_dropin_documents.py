"""scaledot.dropin.{config_mha, self_attention, steps, split_heads} against the documents' own code (tests/documents)."""

from __future__ import annotations

import inspect
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import DTYPES, OpCounter, check_agreement, zeros_for_empty_rows
from documents import config_mha as document_config_mha
from documents import function as document_function
from documents import self_attention as document_self_attention
from documents import split_heads as document_split_heads
from documents import steps as document_steps
from scaledot.dropin import attend, config_mha, self_attention, split_heads, steps
from torch import nn

MODULES = {
    "config_mha": (config_mha, document_config_mha, "MultiHeadAttention", ({"d_model": 24, "num_heads": 4},)),
    "SelfAttention": (self_attention, document_self_attention, "SelfAttention", (4, 5, 3)),
    "SelfAttentionV2": (self_attention, document_self_attention, "SelfAttentionV2", (6, 5, 7)),
    "MultiHeadAttention": (self_attention, document_self_attention, "MultiHeadAttention", (24, 4)),
}


def pair(name: str, *arguments, **options) -> tuple[nn.Module, nn.Module]:
    """(ours, the document's) with the same parameters, in eval mode; each loads the other's state_dict."""
    our_module, their_module, class_name, defaults = MODULES[name]
    ours = getattr(our_module, class_name)(*(arguments or defaults), **options)
    theirs = getattr(their_module, class_name)(*(arguments or defaults), **options)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours.eval(), theirs.eval()


def parameter_names(function) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", MODULES)
def test_interface_and_parameters_are_the_documents(name: str) -> None:
    our_module, their_module, class_name, arguments = MODULES[name]
    ours, theirs = getattr(our_module, class_name), getattr(their_module, class_name)
    assert parameter_names(ours.__init__) == parameter_names(theirs.__init__)
    assert parameter_names(ours.forward) == parameter_names(theirs.forward)
    torch.manual_seed(7)
    first = ours(*arguments)
    torch.manual_seed(7)
    second = theirs(*arguments)
    assert list(first.state_dict()) == list(second.state_dict())
    assert [n for n, _ in first.named_modules()] == [n for n, _ in second.named_modules()]
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    public = [attribute for attribute in vars(second) if not attribute.startswith("_")]
    assert {a: getattr(first, a) for a in public} == {a: getattr(second, a) for a in public}
    pair(name)


@pytest.mark.parametrize("name", MODULES)
def test_runs_in_the_kernels(name: str) -> None:
    ours, _ = pair(name)
    x = torch.randn(2, 3, ours.get_parameter("Wq.weight" if name == "config_mha" else "W_q.weight").size(1))
    with OpCounter() as ops:
        ours(x, x, x) if name == "config_mha" else ours(x)
    assert ops.count["scaledot.sdpa"] == 1
    assert not ops.count["aten._softmax"]


# -------------------------------------------------------------------------------------------------------- config_mha


def config_masks() -> dict[str, torch.Tensor | None]:
    binary = torch.rand(2, 1, 9, 11) < 0.4
    binary[..., 0] = False
    return {
        "none": None,
        "bool": binary,
        "int": binary.int(),
        "float": binary.float(),
        "per head": (torch.rand(2, 4, 9, 11) < 0.3).float(),
        "broadcast": binary[:1, :, :1].float(),
        "causal": torch.ones(1, 1, 9, 11).triu(1),
        "soft": torch.rand(1, 1, 9, 11) * 1e-9,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", config_masks())
def test_config_mha(mask: str, dtype: torch.dtype) -> None:
    ours, theirs = pair("config_mha")
    attn_mask = config_masks()[mask]
    if dtype == torch.float16 and attn_mask is not None:
        if mask == "soft":
            pytest.skip("1e-9 is not a float16 number")
        attn_mask = attn_mask.bool()  # as a floating mask its gradient would be infinite
    inputs = {"querys": torch.randn(2, 5, 24), "keys": torch.randn(2, 7, 24), "values": torch.randn(2, 7, 24)}
    check_agreement(ours, theirs, inputs | {"attn_mask": attn_mask}, dtype)  # the mask is cut to 5 x 7


def test_config_mha_mask_of_another_dtype() -> None:
    ours, theirs = pair("config_mha")
    x = torch.randn(2, 5, 24)
    for mask in (torch.eye(5, dtype=torch.float64), torch.eye(5, dtype=torch.bfloat16), torch.eye(5, dtype=torch.int8)):
        mine, other = ours(x, x, x, mask.view(1, 1, 5, 5)), theirs(x, x, x, mask.view(1, 1, 5, 5))
        torch.testing.assert_close(vars(mine), vars(other))


def test_config_mha_row_of_ones_is_not_empty() -> None:
    """The mask is added, so all keys lose the same; only float16's -1e9 is -inf, where the document gives NaN."""
    ours, theirs = pair("config_mha")
    x, mask = torch.randn(1, 4, 24), torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[:, :, 1] = True
    mine, other = ours(x, x, x, mask), theirs(x, x, x, mask)
    torch.testing.assert_close(mine.attn_scores, other.attn_scores)
    torch.testing.assert_close(mine.hidden_states, other.hidden_states)
    x, ours, theirs = x.half(), ours.half(), theirs.half()
    mine, other = ours(x, x, x, mask), theirs(x, x, x, mask)
    assert other.attn_scores[:, :, 1].isnan().all()
    assert (mine.attn_scores[:, :, 1] == 0).all()
    assert (mine.hidden_states[:, 1] == 0).all()
    torch.testing.assert_close(mine.hidden_states[:, 2:], other.hidden_states[:, 2:], rtol=2e-3, atol=2e-3)


def test_config_mha_batches_broadcast() -> None:
    ours, theirs = pair("config_mha")
    x, one = torch.randn(3, 4, 24), torch.randn(1, 6, 24)
    check_agreement(ours, theirs, {"querys": x, "keys": one, "values": one})
    check_agreement(ours, theirs, {"querys": one, "keys": torch.randn(3, 2, 24), "values": torch.randn(3, 2, 24)})
    check_agreement(ours, theirs, {"querys": one, "keys": torch.randn(1, 4, 24), "values": x})  # weights (1, ...)


def test_config_mha_asserts_as_the_document() -> None:
    for module in (config_mha, document_config_mha):
        with pytest.raises(AssertionError, match="Hidden size must be divisible by num_heads but got 10 and 3"):
            module.MultiHeadAttention({"d_model": 10, "num_heads": 3})
    ours, theirs = pair("config_mha")
    x = torch.randn(1, 4, 24)
    for module in (ours, theirs):
        with pytest.raises(IndexError):
            module(x, x, x, torch.ones(4, 4))
    assert config_mha.AttentionOutput(1, 2) == config_mha.AttentionOutput(hidden_states=1, attn_scores=2)


# ---------------------------------------------------------------------------------------------------- self_attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 4), (2, 3, 6, 4), (1, 1, 4)], ids=str)
def test_self_attention(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, theirs = pair("SelfAttention")
    check_agreement(ours, theirs, {"x": torch.randn(shape)}, dtype)


def test_self_attention_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = self_attention.SelfAttention(4, 5, 3)
    assert module.W_q.weight.is_meta
    assert module._scale == pytest.approx(5**-0.5)


def notebook_mask() -> torch.Tensor:
    b = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    return b.unsqueeze(dim=1).repeat(1, 4, 1)


V2_MASKS = {
    "notebook": notebook_mask(),
    "bool": notebook_mask().bool(),
    "float": notebook_mask().float() * 0.5,
    "causal": torch.ones(4, 4).tril(),
    "keys": torch.tensor([1, 0, 1, 1]),
    "empty rows": torch.ones(4, 4).tril(-1),
    "nothing": torch.zeros(1),
    "larger": torch.ones(2, 1, 4, 4).tril(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", V2_MASKS)
def test_self_attention_v2(mask: str, dtype: torch.dtype) -> None:
    ours, theirs = pair("SelfAttentionV2")
    x = torch.randn(3, 4, 6)
    attention_mask = V2_MASKS[mask]
    if mask == "float":  # compared with 0, so it has no gradient; the document's neither
        attention_mask = attention_mask.double()
    ours_masked, theirs_masked = Masked(ours, attention_mask), Masked(theirs, attention_mask)
    with zeros_for_empty_rows():
        check_agreement(ours_masked, theirs_masked, {"x": x}, dtype)
    if mask == "empty rows":
        output = ours(x, attention_mask)
        empty = theirs(x, attention_mask).isnan().any(-1)
        assert empty.any()
        torch.testing.assert_close(output[empty], ours.output_proj.bias.expand_as(output[empty]))


class Masked(nn.Module):
    """A module with an argument filled in, so that it is no leaf to differentiate."""

    def __init__(self, inner: nn.Module, attention_mask: torch.Tensor | None, seed: int | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.mask = [attention_mask]
        self.seed = seed

    def forward(self, **inputs: torch.Tensor):
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return self.inner(**inputs, attention_mask=self.mask[0])


def mha_masks() -> dict[str, torch.Tensor | None]:
    return {
        "none": None,
        "keys": torch.tensor([[1, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1]]),
        "heads": (torch.rand(3, 4, 4, 5) < 0.7).int(),
        "causal": torch.ones(1, 1, 4, 5).tril().bool(),
        "3-D": (torch.rand(4, 4, 5) < 0.7),
        "empty": torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).float(),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", mha_masks())
def test_multi_head_attention(mask: str, dtype: torch.dtype) -> None:
    ours, theirs = pair("MultiHeadAttention")
    query, key, value = torch.randn(3, 4, 24), torch.randn(3, 5, 24), torch.randn(3, 5, 24)
    attention_mask = mha_masks()[mask]
    inputs = {"query": query, "key": key, "value": value}
    with zeros_for_empty_rows():
        check_agreement(Masked(ours, attention_mask), Masked(theirs, attention_mask), inputs, dtype)
    if mask == "empty":
        output, weights = ours(query, key, value, attention_mask)
        assert theirs(query, key, value, attention_mask)[1][1].isnan().all()
        assert (weights[1] == 0).all()
        torch.testing.assert_close(output[1], ours.output_proj.bias.expand(4, 24))


def test_multi_head_attention_defaults() -> None:
    """Both key and value default to the query: value too where key is given."""
    ours, theirs = pair("MultiHeadAttention")
    query, key = torch.randn(2, 4, 24), torch.randn(2, 4, 24)
    check_agreement(ours, theirs, {"query": query})
    check_agreement(ours, theirs, {"query": query, "key": key})
    check_agreement(ours, theirs, {"query": query, "value": key})


def test_multi_head_attention_example_of_the_notebook() -> None:
    mask = torch.tensor([[0, 1], [0, 0], [1, 0]]).unsqueeze(1).unsqueeze(2).expand(3, 8, 2, 2)
    ours, theirs = pair("MultiHeadAttention", 128, 8)
    x = torch.rand(3, 2, 128)
    output, weights = ours(x, attention_mask=mask)
    expected, expected_weights = theirs(x, attention_mask=mask)
    assert output.shape == torch.Size([3, 2, 128])
    assert expected[1].isnan().all(), "the second sequence may attend to nothing"
    for sequence in (0, 2):
        torch.testing.assert_close(output[sequence], expected[sequence])
        torch.testing.assert_close(weights[sequence], expected_weights[sequence])
    torch.testing.assert_close(output[1], ours.output_proj.bias.expand(2, 128))
    assert (weights[1] == 0).all()
    assert ours.train()(x, attention_mask=mask)[0].isfinite().all()


def test_multi_head_attention_bad_input() -> None:
    with pytest.raises(ValueError, match="head_num must divide d_model"):
        self_attention.MultiHeadAttention(10, 3)
    ours, _ = pair("MultiHeadAttention")
    with pytest.raises(ValueError, match="query needs the shape"):
        ours(torch.randn(4, 24))
    with pytest.raises(ValueError, match="do not broadcast"):
        ours(torch.randn(2, 4, 24), attention_mask=torch.ones(2, 5))


# ----------------------------------------------------------------------------------------------------------- dropout


class FixedDropout(nn.Module):
    def __init__(self, kept: torch.Tensor, p: float) -> None:
        super().__init__()
        self.kept, self.p = kept, p

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights * self.kept / (1 - self.p)


def kept_by(seed: int, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """Which weights of this shape a call after torch.manual_seed(seed) keeps."""
    torch.manual_seed(seed)
    query, key = torch.zeros(*shape[:-1], 1), torch.zeros(*shape[:-2], shape[-1], 1)
    return attend.attention_weights(query, key, dropout_p=p) != 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["SelfAttentionV2", "MultiHeadAttention"])
def test_training_with_dropout(name: str, masked: bool) -> None:
    """The document's module with the very weights dropped that ours drops."""
    p, seed = 0.3, 11
    ours, theirs = pair(name, *MODULES[name][3], dropout_rate=p)
    width, shape = (6, (3, 8, 8)) if name == "SelfAttentionV2" else (24, (3, 4, 8, 8))
    kept = kept_by(seed, shape, p)
    assert 0.5 < kept.float().mean() < 0.9
    theirs.dropout = FixedDropout(kept, p)
    mask = torch.ones(8, 8).tril()[None, None] if masked and len(shape) == 4 else torch.ones(8, 8).tril() if masked else None
    input_name = "x" if name == "SelfAttentionV2" else "query"
    inputs = {input_name: torch.randn(3, 8, width)}
    check_agreement(Masked(ours.train(), mask, seed), Masked(theirs.train(), mask, seed), inputs)


def test_dropout_statistics_and_modes() -> None:
    ours, _ = pair("MultiHeadAttention", 24, 4, 0.25)
    x = torch.randn(4, 64, 24)
    exact = ours(x)[1]
    weights = ours.train()(x)[1]
    assert (weights == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(weights[weights != 0], exact[weights != 0] / 0.75)
    assert not torch.equal(ours(x)[1], weights), "every call draws anew"
    ours.dropout.eval()  # the dropout module decides, as it does in the document
    torch.testing.assert_close(ours(x)[1], exact)
    ours.dropout.train()
    ours.dropout.p = 1.0
    output, weights = ours(x)
    assert (weights == 0).all()
    torch.testing.assert_close(output, ours.output_proj.bias.expand_as(output))
    output.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_a_replaced_or_hooked_dropout_is_called() -> None:
    ours, theirs = pair("MultiHeadAttention", 24, 4, 0.0)
    x = torch.randn(2, 3, 24)
    ours.dropout = theirs.dropout = nn.Softmax(dim=-2)
    check_agreement(ours, theirs, {"query": x})
    ours.dropout = nn.Dropout(0.5).eval()
    seen = []
    ours.dropout.register_forward_hook(lambda module, args, result: seen.append(result))
    assert torch.equal(ours(x)[1], seen[0])


# ------------------------------------------------------------------------------------------------------- split_heads


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_head_attention(dtype: torch.dtype) -> None:
    """The document's own sizes: 3 vectors of 1000 numbers, 4 heads of 16."""
    ours = split_heads.SplitHeadAttention(1000, 64, 4)
    X = torch.randn(3, 1000)
    assert ours(X).shape == (3, 64)
    assert sorted(n for n, _ in ours.named_parameters()) == [f"W_{x}.{y}" for x in "kqv" for y in ("bias", "weight")]

    class Script(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W_q, self.W_k, self.W_v = nn.Linear(1000, 64), nn.Linear(1000, 64), nn.Linear(1000, 64)

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            return document_split_heads.attention(X, 4, self.W_q, self.W_k, self.W_v)

    theirs = Script()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    check_agreement(ours, theirs, {"X": X}, dtype)


def test_split_head_attention_batched() -> None:
    ours = split_heads.SplitHeadAttention(6, 8, 2).double()
    X = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    each = torch.stack([torch.stack([ours(x) for x in xs]) for xs in X])
    torch.testing.assert_close(ours(X), each)
    with pytest.raises(ValueError, match="num_heads must divide output_dim"):
        split_heads.SplitHeadAttention(6, 8, 3)
    with pytest.raises(ValueError, match="X needs the shape"):
        ours(torch.randn(6))


# ------------------------------------------------------------------------------------------------------------- steps


ATTENTION = {
    "scaled_dot_product_attention": {},
    "optimized_scaled_dot_product_attention": {},
    "robust_attention": {"eps": 1e-3},
}
SHAPES = {
    "2-D": ((5, 8), (7, 8), (7, 6)),
    "3-D": ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    "4-D": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "5-D": ((2, 1, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 6)),
    "key without batch": ((2, 3, 5, 8), (7, 8), (7, 6)),
    "query without batch": ((5, 8), (2, 3, 7, 8), (3, 7, 6)),
    "value with batch": ((5, 8), (7, 8), (2, 3, 7, 6)),
    "value with more heads": ((2, 1, 5, 8), (2, 1, 7, 8), (2, 3, 7, 6)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("function", ATTENTION)
def test_attention_functions(function: str, shapes: str, dtype: torch.dtype) -> None:
    Q, K, V = (torch.randn(shape) for shape in SHAPES[shapes])
    options = ATTENTION[function]
    ours = partial(positional, getattr(steps, function), options)
    theirs = partial(positional, getattr(document_steps, function), options)
    check_agreement(ours, theirs, {"Q": Q, "K": K, "V": V}, dtype)


def positional(function, options, Q, K, V, mask=None):
    return function(Q, K, V, mask[0] if mask else None, **options)


STEP_MASKS = {
    "causal": document_steps.create_causal_mask(6),
    "padding": document_steps.create_padding_mask([3, 2, 6], 6),
    "bool": torch.rand(6, 6) < 0.6,
    "int": (torch.rand(3, 6, 6) < 0.6).int(),
    "one row": torch.tensor([[1, 0, 1, 1, 0, 1]]),
    "one dimension": torch.tensor([1, 0, 1, 1, 0, 1]),
    "column": (torch.arange(6) < 4)[:, None],
    "nothing": torch.zeros((), dtype=torch.bool),
    "larger": torch.rand(2, 1, 6, 6) < 0.6,
}


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("mask", STEP_MASKS)
@pytest.mark.parametrize("function", ATTENTION)
def test_attention_functions_with_masks(function: str, mask: str, dtype: torch.dtype) -> None:
    inputs = {name: torch.randn(3, 6, 8) for name in ("Q", "K", "V")} | {"mask": [STEP_MASKS[mask]]}
    options = ATTENTION[function]
    ours = partial(positional, getattr(steps, function), options)
    theirs = partial(positional, getattr(document_steps, function), options)
    check_agreement(ours, theirs, inputs, dtype)


def test_masks_that_float16_reference_code_cannot_fill() -> None:
    Q = torch.randn(3, 6, 8)
    mask = STEP_MASKS["padding"]
    with pytest.raises(RuntimeError, match="overflow"):
        document_steps.scaled_dot_product_attention(Q.half(), Q.half(), Q.half(), mask)
    output, weights = steps.scaled_dot_product_attention(Q.half(), Q.half(), Q.half(), mask)
    expected = document_steps.scaled_dot_product_attention(Q.half().float(), Q.half().float(), Q.half().float(), mask)
    torch.testing.assert_close((output.float(), weights.float()), expected, rtol=2e-3, atol=2e-3)


def test_the_function_of_both_documents() -> None:
    """One document calls the arguments query, key, value, the other Q, K, V; both are given by position."""
    names = [name for name, _ in parameter_names(steps.scaled_dot_product_attention)]
    assert names == [name for name, _ in parameter_names(document_function.scaled_dot_product_attention)]
    Q, K, V = torch.randn(3, 2, 4, 5, 8)
    mine = steps.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril())
    for document in (document_function, document_steps):
        torch.testing.assert_close(mine, document.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril()))
    q, k, v = torch.randn(3, 1, 1, 5, 64)
    out, weights = steps.scaled_dot_product_attention(query=q, key=k, value=v)
    assert out.shape == (1, 1, 5, 64)
    assert f"Weights sum check: {weights[0][0][0].sum().item():.4f}" == "Weights sum check: 1.0000"


def test_every_function_of_the_document_has_its_signature() -> None:
    functions = inspect.getmembers(document_steps, inspect.isfunction)
    for name, function in functions:
        if name != "scaled_dot_product_attention":
            assert parameter_names(getattr(steps, name)) == parameter_names(function), name
    assert {name for name, _ in functions} | {"visualize_attention"} == set(steps.__all__)


def test_optimized_dropout() -> None:
    Q, K, V = torch.randn(3, 2, 4, 32, 8)
    exact = steps.optimized_scaled_dot_product_attention(Q, K, V)
    for nothing in (nn.Dropout(0.4).eval(), nn.Dropout(0.0), nn.Identity()):
        torch.testing.assert_close(steps.optimized_scaled_dot_product_attention(Q, K, V, dropout=nothing), exact)
    with OpCounter() as ops:
        output, weights = steps.optimized_scaled_dot_product_attention(Q, K, V, dropout=nn.Dropout(0.4))
    assert not ops.count["aten.bernoulli_"]
    assert not ops.count["aten.native_dropout"]
    assert (weights == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    torch.testing.assert_close(output, weights @ V)
    ours = partial(steps.optimized_scaled_dot_product_attention, dropout=lambda w: w.square().tril())
    theirs = partial(document_steps.optimized_scaled_dot_product_attention, dropout=lambda w: w.square().tril())
    check_agreement(ours, theirs, {"Q": Q, "K": K, "V": V})
    # A value with more batch dimensions than the scores shares their weights and their dropout.
    output, weights = steps.optimized_scaled_dot_product_attention(Q[0, 0], K[0, 0], V, dropout=nn.Dropout(0.4))
    assert weights.shape == (32, 32)
    torch.testing.assert_close(output, weights @ V)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 11, 512])
def test_memory_efficient_attention(chunk_size: int, dtype: torch.dtype) -> None:
    ours = partial(steps.memory_efficient_attention, chunk_size=chunk_size)
    theirs = partial(document_steps.memory_efficient_attention, chunk_size=chunk_size)
    check_agreement(ours, theirs, {"Q": torch.randn(2, 3, 11, 8), "K": torch.randn(2, 3, 9, 8), "V": torch.randn(2, 3, 9, 8)}, dtype)


def test_memory_efficient_attention_shapes() -> None:
    Q, K, V = torch.randn(2, 3, 11, 8), torch.randn(3, 9, 8), torch.randn(3, 9, 1)
    check_agreement(steps.memory_efficient_attention, document_steps.memory_efficient_attention, {"Q": Q, "K": K, "V": V})
    assert steps.memory_efficient_attention(Q[:, :, :0], K, V).shape == (2, 3, 0, 8)
    with pytest.raises(ValueError, match="must fit Q's shape"):
        steps.memory_efficient_attention(Q, K, torch.randn(3, 9, 4))
    with pytest.raises(ValueError, match="must fit Q's shape"):
        steps.memory_efficient_attention(Q[:1], K, torch.randn(2, 3, 9, 8))
    with pytest.raises(ValueError, match="Q needs 4 dimensions"):
        steps.memory_efficient_attention(Q[0], K, V)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        steps.memory_efficient_attention(Q, K, V, chunk_size=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "bool", "float of zeros and ones", "bias"])
def test_fused_attention(mask: str, dtype: torch.dtype) -> None:
    masks = {
        "none": None,
        "bool": torch.ones(5, 7, dtype=torch.bool).tril(),
        "float of zeros and ones": torch.ones(5, 7).tril(),
        "bias": torch.randn(2, 1, 5, 7),
    }
    inputs = {"Q": torch.randn(2, 3, 5, 8), "K": torch.randn(2, 3, 7, 8), "V": torch.randn(2, 3, 7, 8), "mask": masks[mask]}
    check_agreement(steps.fused_attention, document_steps.fused_attention, inputs, dtype)


def test_single_steps() -> None:
    Q, K, V = torch.randn(3, 2, 5, 8)
    scores = steps.compute_attention_scores(Q, K)
    scaled = steps.scale_attention_scores(scores, 8)
    masked = steps.apply_mask(scaled, torch.ones(5, 5).tril())
    weights = steps.compute_attention_weights(masked)
    output = steps.apply_attention_weights(weights, V)
    theirs = document_steps.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril())
    torch.testing.assert_close((output, weights), theirs)
    assert torch.equal(masked, document_steps.apply_mask(scaled, torch.ones(5, 5).tril()))
    assert steps.apply_mask(scaled) is scaled
    torch.testing.assert_close((output, weights), steps.scaled_dot_product_attention(Q, K, V, torch.ones(5, 5).tril()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["compute_attention_weights", "stable_softmax"])
def test_softmax(name: str, dtype: torch.dtype) -> None:
    scores = 30 * torch.randn(4, 5, 6)
    check_agreement(getattr(steps, name), getattr(document_steps, name), {"scores": scores}, dtype)
    integers = torch.arange(6).view(2, 3)
    torch.testing.assert_close(steps.stable_softmax(integers), document_steps.stable_softmax(integers))
    scores[1, 2] = -torch.inf
    scores[2, 3, :4] = -torch.inf
    scores = scores.to(dtype).requires_grad_()
    weights = getattr(steps, name)(scores)
    expected = getattr(document_steps, name)(scores.detach().float())
    assert expected[1, 2].isnan().all()
    torch.testing.assert_close(weights.float(), expected.nan_to_num(0.0), rtol=3e-2, atol=1e-2)
    assert (weights[1, 2] == 0).all()
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[1, 2] == 0).all()


def test_masks() -> None:
    assert torch.equal(steps.create_causal_mask(4), document_steps.create_causal_mask(4))
    for lengths in ([3, 2, 4], [0, 9], [], torch.tensor([1, 4])):
        mine, other = steps.create_padding_mask(lengths, 4), document_steps.create_padding_mask(lengths, 4)
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    torch.set_default_dtype(torch.float64)
    assert steps.create_padding_mask([1], 2).dtype == steps.create_causal_mask(2).dtype == torch.float64
    with pytest.raises(ValueError, match="must not be negative"):
        steps.create_padding_mask([1, -1], 4)
    with pytest.raises(TypeError):
        steps.create_padding_mask([1.5], 4)


def test_attention_over_nothing() -> None:
    """No keys: the document gives zeros as well (an empty sum)."""
    Q, K, V = torch.randn(2, 3, 4), torch.randn(2, 0, 4), torch.randn(2, 0, 4)
    torch.testing.assert_close(
        steps.scaled_dot_product_attention(Q, K, V), document_steps.scaled_dot_product_attention(Q, K, V)
    )


# What the example of 点积注意力的计算流程, section 5.1, prints (with the document's own code).
EXAMPLE_SCALED = [
    [-0.0437, 0.3952, -0.0216, 0.2167],
    [1.3495, -0.8176, 0.2393, 0.2182],
    [1.7744, 0.9521, -0.3394, 1.2076],
    [-0.8126, 0.9380, 0.2820, 0.3762],
]
EXAMPLE_WEIGHTS = [
    [0.2053, 0.3184, 0.2099, 0.2664],
    [0.5661, 0.0648, 0.1865, 0.1826],
    [0.4700, 0.2065, 0.0568, 0.2667],
    [0.0767, 0.4419, 0.2293, 0.2520],
]
EXAMPLE_OUTPUT = [
    [0.2103, -0.1219, 0.0661],
    [0.3001, -0.0210, 0.1925],
    [0.3130, -0.2134, 0.1250],
    [0.1320, -0.1065, 0.0793],
]


def test_example_with_seed_42() -> None:
    torch.manual_seed(42)
    Q, K, V = torch.randn(1, 4, 3), torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    scores = steps.compute_attention_scores(Q, K)
    scaled = steps.scale_attention_scores(scores, 3)
    output, weights = steps.scaled_dot_product_attention(Q, K, V)
    assert scores.squeeze(0).round().int().tolist() == [[0, 1, 0, 0], [2, -1, 0, 0], [3, 2, -1, 2], [-1, 2, 0, 1]]
    for found, printed in ((scaled, EXAMPLE_SCALED), (weights, EXAMPLE_WEIGHTS), (output, EXAMPLE_OUTPUT)):
        torch.testing.assert_close(found.squeeze(0), torch.tensor(printed), rtol=0, atol=6e-5)
    torch.testing.assert_close(weights.squeeze(0).sum(dim=-1), torch.ones(4))
    torch.testing.assert_close((output, weights), document_steps.scaled_dot_product_attention(Q, K, V))


@pytest.mark.parametrize("tokens", [["我", "喜欢", "深度", "学习"], None], ids=["tokens", "positions"])
def test_visualize_attention(tokens: list[str] | None) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from scaledot.fonts import families_for

    weights = F.softmax(torch.randn(1, 4, 4), dim=-1).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            families_for(["注意力权重矩阵我喜欢深度学习"])
        except UserWarning:
            pytest.skip("no font with Chinese glyphs is installed")
        assert steps.visualize_attention(weights, tokens) is None
        figure = pyplot.gcf()
        figure.canvas.draw()  # a missing glyph would warn
    axes = figure.axes[0]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("注意力权重矩阵", "Key位置", "Query位置")
    for axis in (axes.xaxis, axes.yaxis):
        assert tokens is None or [label.get_text() for label in axis.get_ticklabels()] == tokens
    assert f"{weights[0, 1, 2].item():.2f}" in [text.get_text() for text in axes.texts]
    pyplot.close(figure)
    with pytest.raises(ValueError, match="attention_weights needs the shape"):
        steps.visualize_attention(torch.rand(2, 4, 4))
