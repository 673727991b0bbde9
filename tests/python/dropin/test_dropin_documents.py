"""scaledot.dropin.{config_mha, self_attention, split_heads} against the reference code in tests/documents."""

from __future__ import annotations

from operator import truediv

import pytest
import torch
from torch import nn

from agreement import DTYPES, OpCounter, check_agreement, parameter_names, zeros_for_empty_rows
from documents import config_mha as document_config_mha
from documents import self_attention as document_self_attention
from documents import split_heads as document_split_heads
from scaledot.dropin import attend, config_mha, self_attention, split_heads

MODULES = {
    "config_mha": (config_mha, document_config_mha, "MultiHeadAttention", ({"d_model": 24, "num_heads": 4},)),
    "SelfAttention": (self_attention, document_self_attention, "SelfAttention", (4, 5, 3)),
    "SelfAttentionV2": (self_attention, document_self_attention, "SelfAttentionV2", (6, 5, 7)),
    "MultiHeadAttention": (self_attention, document_self_attention, "MultiHeadAttention", (24, 4)),
}


def pair(name: str, *arguments, **options) -> tuple[nn.Module, nn.Module]:
    """(ours, the reference) with the same parameters, in eval mode. Each loads the other's state_dict."""
    our_module, their_module, class_name, defaults = MODULES[name]
    ours = getattr(our_module, class_name)(*(arguments or defaults), **options)
    theirs = getattr(their_module, class_name)(*(arguments or defaults), **options)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize("name", MODULES)
def test_interface_and_parameters_are_the_references(name: str) -> None:
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
def test_runs_in_one_kernel(name: str) -> None:
    ours, _ = pair(name)
    x = torch.randn(2, 3, ours.get_parameter("Wq.weight" if name == "config_mha" else "W_q.weight").size(1))
    with OpCounter() as ops:
        ours(x, x, x) if name == "config_mha" else ours(x)
    assert ops.count["scaledot.sdpa_recorded"] == 1
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


# 1e-9, the scale of the "soft" mask, underflows in float16.
CONFIG_CASES = [(mask, d) for mask in config_masks() for d in DTYPES if (mask, d) != ("soft", torch.float16)]


@pytest.mark.parametrize(("mask", "dtype"), CONFIG_CASES)
def test_config_mha(mask: str, dtype: torch.dtype) -> None:
    ours, theirs = pair("config_mha")
    attn_mask = config_masks()[mask]
    if dtype == torch.float16 and attn_mask is not None:
        attn_mask = attn_mask.bool()  # the gradient of a floating mask would be infinite
    inputs = {"querys": torch.randn(2, 5, 24), "keys": torch.randn(2, 7, 24), "values": torch.randn(2, 7, 24)}
    check_agreement(ours, theirs, inputs | {"attn_mask": attn_mask}, dtype)  # the mask is cut to 5 x 7


def test_config_mha_mask_of_another_dtype() -> None:
    ours, theirs = pair("config_mha")
    x = torch.randn(2, 5, 24)
    for mask in (torch.eye(5, dtype=torch.float64), torch.eye(5, dtype=torch.bfloat16), torch.eye(5, dtype=torch.int8)):
        mine, other = ours(x, x, x, mask.view(1, 1, 5, 5)), theirs(x, x, x, mask.view(1, 1, 5, 5))
        torch.testing.assert_close(vars(mine), vars(other))


def test_config_mha_row_of_ones_is_not_empty() -> None:
    """A row of ones lowers all logits equally. In float16, -1e9 is -inf, and the reference gives NaN."""
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


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_config_mha_gradients_of_a_row_of_ones(dtype: torch.dtype) -> None:
    """The logits are near -1e9, where float32 numbers are 64 apart. The gradients must still agree."""
    ours, theirs = (module.to(dtype) for module in pair("config_mha"))
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[:, :, 1] = True
    x = torch.randn(1, 4, 24, dtype=dtype)
    for module in (ours, theirs):
        module(x, x, x, mask).hidden_states.square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_config_mha_batches_broadcast() -> None:
    ours, theirs = pair("config_mha")
    x, one = torch.randn(3, 4, 24), torch.randn(1, 6, 24)
    check_agreement(ours, theirs, {"querys": x, "keys": one, "values": one})
    check_agreement(ours, theirs, {"querys": one, "keys": torch.randn(3, 2, 24), "values": torch.randn(3, 2, 24)})
    check_agreement(ours, theirs, {"querys": one, "keys": torch.randn(1, 4, 24), "values": x})  # weights (1, ...)


def test_config_mha_raises_the_same_errors() -> None:
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
    assert truediv(*module._scale) == pytest.approx(5**-0.5)


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
    if mask == "float":  # compared with 0, so neither side has a gradient
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
    """A module with a fixed mask argument, which then gets no gradient."""

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
    """Key and value default to the query, the value even if a key is given."""
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
    with pytest.raises(ValueError, match="head_num: got 3; needs a divisor of d_model, 10"):
        self_attention.MultiHeadAttention(10, 3)
    ours, _ = pair("MultiHeadAttention")
    with pytest.raises(ValueError, match=r"query: got shape \(4, 24\); needs \(B, Lq, d_model\)"):
        ours(torch.randn(4, 24))
    with pytest.raises(ValueError, match=r"scores and mask: got shapes .* and .*; needs shapes that broadcast"):
        ours(torch.randn(2, 4, 24), attention_mask=torch.ones(2, 5))


# ----------------------------------------------------------------------------------------------------------- dropout


class FixedDropout(nn.Module):
    def __init__(self, kept: torch.Tensor, p: float) -> None:
        super().__init__()
        self.kept, self.p = kept, p

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights * self.kept / (1 - self.p)


def kept_by(seed: int, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """The weights of this shape that dropout keeps in a call after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    query, key = torch.zeros(*shape[:-1], 1), torch.zeros(*shape[:-2], shape[-1], 1)
    return attend.attention_weights(query, key, dropout_p=p) != 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["SelfAttentionV2", "MultiHeadAttention"])
def test_training_with_dropout(name: str, masked: bool) -> None:
    """Agreement with the reference if it drops the same weights."""
    p, seed = 0.3, 11
    ours, theirs = pair(name, *MODULES[name][3], dropout_rate=p)
    width, shape = (6, (3, 8, 8)) if name == "SelfAttentionV2" else (24, (3, 4, 8, 8))
    kept = kept_by(seed, shape, p)
    assert 0.5 < kept.float().mean() < 0.9
    theirs.dropout = FixedDropout(kept, p)
    mask = torch.ones([1] * (len(shape) - 2) + [8, 8]).tril() if masked else None
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
    assert not torch.equal(ours(x)[1], weights), "every call draws new weights"
    ours.dropout.eval()  # the mode of the dropout module decides, as in the reference
    torch.testing.assert_close(ours(x)[1], exact)
    ours.dropout.train()
    ours.dropout.p = 1.0
    output, weights = ours(x)
    assert (weights == 0).all()
    torch.testing.assert_close(output, ours.output_proj.bias.expand_as(output))
    output.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_other_or_hooked_dropout_modules_are_called() -> None:
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
    """The sizes of the reference: 3 vectors of 1000 features, 4 heads of width 16."""
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
    with pytest.raises(ValueError, match="num_heads: got 3; needs a divisor of output_dim, 8"):
        split_heads.SplitHeadAttention(6, 8, 3)
    with pytest.raises(ValueError, match=r"X: got shape \(6,\); needs \(\.\.\., n, input_dim\)"):
        ours(torch.randn(6))
