"""scaledot.dropin.transformers: the attention function that models call, and its registration."""

from __future__ import annotations

import math
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from scaledot.dropin.transformers import MINIMUM_VERSION, attention_forward, register

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None,
    scaling: float | None = None, sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The formula: output (B, Lq, H, Dv), weights (B, H, Lq, Lk). mask: True = may attend; sink (B, H, Lq, 1)."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scaling is None else scaling)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1) if sink is None else torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), weights


def qkv(query_length: int = 6, key_length: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, 4, query_length, 8, dtype=torch.float64)
    key = torch.randn(2, 2, key_length, 8, dtype=torch.float64)
    return query, key, torch.randn(2, 2, key_length, 5, dtype=torch.float64)


def attends(query_length: int, key_length: int, left: int | None, right: int | None, offset: int = 0) -> Tensor:
    distance = torch.arange(key_length) - (torch.arange(query_length)[:, None] + offset)
    low = -left if left is not None else -math.inf
    return (distance >= low) & (distance <= (right if right is not None else math.inf))


@pytest.mark.parametrize(
    ("lengths", "module_causal", "keywords", "expected"),
    [
        ((6, 6), True, {}, attends(6, 6, None, 0)),
        ((6, 6), False, {}, None),
        ((6, 6), True, {"is_causal": False}, None),
        ((6, 6), False, {"is_causal": True}, attends(6, 6, None, 0)),
        ((6, 9), True, {}, attends(6, 9, None, 0)),  # a static cache with room for three more keys
        ((1, 9), True, {}, None),  # decoding
        ((6, 6), True, {"sliding_window": 3}, attends(6, 6, 2, 0)),
        ((6, 6), False, {"sliding_window": 3}, attends(6, 6, 2, 2)),
        ((6, 6), True, {"sliding_window": 6}, attends(6, 6, None, 0)),
        ((1, 9), True, {"sliding_window": 3}, attends(1, 9, 2, 0, offset=8)),
        ((6, 6), None, {}, None),  # a module without is_causal attends to all keys, as with "eager"
        ((6, 6), True, {"scaling": 0.5}, attends(6, 6, None, 0)),
    ],
)
def test_without_a_mask(
    lengths: tuple[int, int], module_causal: bool | None, keywords: dict[str, Any], expected: Tensor | None
) -> None:
    module = nn.Module().eval() if module_causal is None else Attention(module_causal)
    inputs = qkv(*lengths)
    output, weights = attention_forward(module, *inputs, None, output_attentions=True, **keywords)
    exact = plain(*inputs, expected, scaling=keywords.get("scaling"))
    torch.testing.assert_close((output, weights), exact)
    assert output.is_contiguous()


def test_only_the_mask_applies_if_there_is_one() -> None:
    """is_causal and sliding_window add nothing to a mask, because transformers puts them into it."""
    inputs, mask = qkv(), torch.rand(2, 1, 6, 6) < 0.8
    mask[..., 0] = True
    output, weights = attention_forward(Attention(True), *inputs, mask, sliding_window=2)
    assert weights is None
    torch.testing.assert_close(output, plain(*inputs, mask)[0])


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_position_bias(mask: str | None) -> None:
    inputs = [t.requires_grad_() for t in qkv()]
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    allowed = (torch.rand(2, 1, 6, 6) < 0.7) | torch.eye(6, dtype=torch.bool)
    if mask is None:
        allowed = attends(6, 6, None, 0)
    masks = {None: None, "bool": allowed, "float": torch.zeros(2, 1, 6, 6).double().masked_fill(~allowed, -math.inf)}
    output, _ = attention_forward(Attention(True), *inputs, masks[mask], position_bias=bias)
    exact, _ = plain(*inputs, allowed, bias)
    torch.testing.assert_close(output, exact)
    cotangent = torch.randn_like(exact)
    found = torch.autograd.grad(output, [*inputs, bias], cotangent)
    torch.testing.assert_close(found, torch.autograd.grad(exact, [*inputs, bias], cotangent))


@pytest.mark.parametrize("by_query", [False, True])
def test_sinks(by_query: bool) -> None:
    inputs = [t.requires_grad_() for t in qkv()]
    shape = (2, 4, 6, 1) if by_query else (4,)
    sink = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    keywords = {"sinks" if by_query else "s_aux": sink}
    found = attention_forward(Attention(True), *inputs, None, output_attentions=True, **keywords)
    column = sink if by_query else sink[None, :, None, None].expand(2, 4, 6, 1)
    exact = plain(*inputs, attends(6, 6, None, 0), sink=column)
    torch.testing.assert_close(found, exact)
    cotangents = [torch.randn_like(t) for t in exact]
    gradients = torch.autograd.grad(found, [*inputs, sink], cotangents)
    torch.testing.assert_close(gradients, torch.autograd.grad(exact, [*inputs, sink], cotangents))


def test_sinks_with_fully_masked_rows() -> None:
    inputs = [t.requires_grad_() for t in qkv()]
    sink = torch.tensor([-math.inf, 0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, 2] = False
    output, _ = attention_forward(Attention(True), *inputs, mask, s_aux=sink)
    assert not output[0, 2].any()
    torch.testing.assert_close(output[1, :, 0], plain(*inputs, mask)[0][1, :, 0])  # a sink of -inf has no effect
    for gradient in torch.autograd.grad(output.sum(), [*inputs, sink]):
        assert gradient.isfinite().all()


def test_sinks_with_dropout() -> None:
    """Dropout does not drop the sink: the mean of the output is the output without dropout."""
    module, inputs, sink = Attention(True).train(), qkv(), torch.randn(4, dtype=torch.float64)
    outputs = [attention_forward(module, *inputs, None, dropout=0.3, s_aux=sink)[0] for _ in range(2000)]
    exact, _ = plain(*inputs, attends(6, 6, None, 0), sink=sink[None, :, None, None].expand(2, 4, 6, 1))
    mean, deviation = torch.stack(outputs).mean(0), torch.stack(outputs).std(0) / math.sqrt(2000)
    assert ((mean - exact).abs() <= 6 * deviation + 1e-12).all()


def test_errors() -> None:
    unknown = r"chunk: got a value from Attention; .*register\(ignore=\['chunk'\]\)"
    with pytest.raises(TypeError, match=unknown):
        attention_forward(Attention(True), *qkv(), None, chunk=3)
    with pytest.raises(TypeError, match=r"block_indices: got a value from Attention; .*keyword\. Use another"):
        attention_forward(Attention(True), *qkv(), None, block_indices=torch.zeros(1))
    attention_forward(Attention(True), *qkv(), None, block_indices=None, position_ids=torch.zeros(1), use_cache=True)
    packed = "cu_seq_lens_q: got 2 packed sequences without an attention_mask; needs a mask"
    with pytest.raises(ValueError, match=packed):
        attention_forward(Attention(True), *qkv(), None, cu_seq_lens_q=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match=r"s_aux: got shape \(3,\); needs \(4,\)"):
        attention_forward(Attention(True), *qkv(), None, s_aux=torch.zeros(3))
    with pytest.raises(ValueError, match=r"sinks: got shape \(4,\); needs \(B, H, Lq, 1\)"):
        attention_forward(Attention(True), *qkv(), None, sinks=torch.zeros(4))


def test_ignore() -> None:
    register("scaledot_ignoring", ignore=["chunk", "indices", "block_indices"])
    function = transformers.AttentionInterface()["scaledot_ignoring"]
    inputs = qkv()
    output, _ = function(Attention(True), *inputs, None, chunk=torch.zeros(1))
    assert output.shape == (2, 6, 4, 5)
    with pytest.raises(TypeError, match="other: got a value from Attention"):
        function(Attention(True), *inputs, None, chunk=torch.zeros(1), other=1)
    # What selects keys is never ignored.
    first = torch.zeros(2, 6, 1, dtype=torch.long)
    wanted = attention_forward(Attention(True), *inputs, None, indices=first)[0]
    assert torch.equal(function(Attention(True), *inputs, None, indices=first)[0], wanted)
    assert not torch.equal(output, wanted)
    with pytest.raises(TypeError, match="block_indices: got a value from Attention"):
        function(Attention(True), *inputs, None, block_indices=torch.zeros(1))


# ---------------------------------------------------------------------------------------------------------- register
def test_register_again_and_by_other_names() -> None:
    register()
    register("ours")
    for name in ("scaledot", "ours"):
        assert name in transformers.AttentionInterface()
        assert name in transformers.masking_utils.AttentionMaskInterface()


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
def test_register_refuses_names_of_transformers(name: str) -> None:
    with pytest.raises(ValueError, match=f"name: got '{name}', an attention implementation of transformers"):
        register(name)


@pytest.mark.parametrize("found", [None, "4.40.0"])
def test_register_without_a_new_enough_transformers(found: str | None) -> None:
    older = None
    if found is not None:
        older = types.ModuleType("transformers")
        older.__version__ = found  # type: ignore[attr-defined]
    message = (
        f"transformers: got {found or 'none'}; needs at least {MINIMUM_VERSION} for scaledot.dropin.transformers: "
        f"run `pip install 'transformers>={MINIMUM_VERSION}'`"
    )
    with mock.patch.dict(sys.modules, {"transformers": older}), pytest.raises(ImportError, match=re.escape(message)):
        register()


@pytest.mark.parametrize(("version", "accepted"), [("5.3.9", False), ("5.4.0.dev0", True), ("5.10", True), ("6", True)])
def test_register_compares_versions(version: str, accepted: bool) -> None:
    # The module that register() imports: other tests may have made Python import transformers a second time.
    with mock.patch.object(sys.modules["transformers"], "__version__", version):
        if accepted:
            register()
        else:
            with pytest.raises(ImportError, match=f"transformers: got {version}; needs at least {MINIMUM_VERSION}"):
                register()


def test_minimum_version_is_that_of_pyproject() -> None:
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert f'transformers = ["transformers>={MINIMUM_VERSION}"]' in text
