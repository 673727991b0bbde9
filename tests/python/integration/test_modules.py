"""scaledot.MultiHeadAttention against torch's module, and against its definition computed by the oracle."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reference
from scaledot import MultiHeadAttention, masks

BATCH, LQ, LK, EMBED, HEADS = 2, 5, 7, 24, 4
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "other_widths": {"kdim": 10, "vdim": 9, "qk_dim": 16, "v_dim": 12, "out_dim": 5},
    "gqa_other_widths": {"kdim": 10, "vdim": 9, "qk_dim": 16, "v_dim": 40, "num_kv_heads": 2},
    "no_out_proj": {"out_proj": False, "v_dim": 8},
}


def make(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[MultiHeadAttention, list[Tensor]]:
    torch.manual_seed(0)
    module = MultiHeadAttention(EMBED, HEADS, dtype=dtype, **options)
    for parameter in module.parameters():  # biases of 0 would hide a missing bias
        nn.init.uniform_(parameter, -0.5, 0.5)
    shapes = [(BATCH, LQ, EMBED), (BATCH, LK, module.kdim), (BATCH, LK, module.vdim)]
    return module, [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def expected(
    module: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """(output, weights) by the module's definition, head by head."""
    outputs, weights = [], []
    group = module.num_heads // module.num_kv_heads
    projected = module.q_proj(query), module.k_proj(key), module.v_proj(value)
    for head in range(module.num_heads):
        dims = (module.head_dim, module.head_dim, module.v_head_dim)
        places = (head, head // group, head // group)
        q, k, v = (t[..., n * d : (n + 1) * d] for t, n, d in zip(projected, places, dims, strict=True))
        masks = {name: m[..., head, :, :] if name == "attn_mask" else m for name, m in options.items()}
        out, _, weight = reference.attention(
            q.unsqueeze(-3),
            k.unsqueeze(-3),
            v.unsqueeze(-3),
            **{name: m.unsqueeze(-3) if name == "attn_mask" else m for name, m in masks.items()},
        )
        outputs.append(out.squeeze(-3))
        weights.append(weight.squeeze(-3))
    output = torch.cat(outputs, -1)
    return output if module.out_proj is None else module.out_proj(output), torch.stack(weights, -3)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(name: str) -> None:
    module, inputs = make(**CONFIGURATIONS[name])
    output, weights = module(*inputs, need_weights=True)
    width = module.v_dim if module.out_proj is None else module.out_dim
    assert output.shape == (BATCH, LQ, width)
    assert weights.shape == (BATCH, HEADS, LQ, LK)
    torch.testing.assert_close((output, weights), expected(module, *inputs))
    leaves = [*inputs, *module.parameters()]
    cotangents = torch.randn_like(output), torch.randn_like(weights)
    ours = torch.autograd.grad((output, weights), leaves, cotangents)
    theirs = torch.autograd.grad(expected(module, *inputs), leaves, cotangents)
    torch.testing.assert_close(ours, theirs)
    without, none = module(*inputs)
    assert none is None
    torch.testing.assert_close(without, output)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_unbatched(name: str) -> None:
    module, inputs = make(**CONFIGURATIONS[name])
    output, weights = module(*inputs, need_weights=True)
    one, one_weights = module(*(t[1] for t in inputs), need_weights=True)
    torch.testing.assert_close((one, one_weights), (output[1], weights[1]))


def test_key_and_value_default_to_the_query() -> None:
    module, (query, key, _) = make()
    torch.testing.assert_close(module(query)[0], module(query, query, query)[0])
    torch.testing.assert_close(module(query, key)[0], module(query, key, key)[0])


def test_agrees_with_torch() -> None:
    module, (query, key, value) = make()
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (module.q_proj, module.k_proj, module.v_proj)]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (module.q_proj, module.k_proj, module.v_proj)]))
        theirs.out_proj.load_state_dict(module.out_proj.state_dict())
    torch.testing.assert_close(
        module(query, key, value, need_weights=True), theirs(query, key, value, average_attn_weights=False)
    )


MASKS: dict[str, Tensor] = {
    "QK": torch.rand(LQ, LK) < 0.6,
    "HQK": torch.rand(HEADS, LQ, LK) < 0.6,
    "B1QK": torch.rand(BATCH, 1, LQ, LK) < 0.6,
    "BHQK": torch.rand(BATCH, HEADS, LQ, LK) < 0.6,
    "K": torch.rand(LK) < 0.6,
    "Q1": torch.rand(LQ, 1) < 0.6,
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [None, *MASKS])
def test_key_mask_combines_with_attn_mask(shape: str | None, kind: str) -> None:
    module, inputs = make(num_kv_heads=2)
    key_mask = masks.padding_mask([LK - 2, 3], LK)[:, 0, 0]
    attn_mask = None if shape is None else MASKS[shape]
    both = key_mask[:, None, None, :] & (torch.tensor(True) if attn_mask is None else attn_mask)
    full = both.expand(BATCH, HEADS, LQ, LK)
    if kind == "float" and attn_mask is not None:
        bias = torch.randn(attn_mask.shape, dtype=torch.float64)
        attn_mask = torch.where(attn_mask, bias, -torch.inf).requires_grad_()
        full = torch.where(key_mask[:, None, None, :], attn_mask, -torch.inf).expand(BATCH, HEADS, LQ, LK)
    output, weights = module(*inputs, attn_mask, key_mask=key_mask, need_weights=True)
    assert torch.isfinite(output).all()
    torch.testing.assert_close((output, weights), expected(module, *inputs, attn_mask=full))
    if kind == "float" and attn_mask is not None:
        (gradient,) = torch.autograd.grad(output.square().sum(), attn_mask)
        (theirs,) = torch.autograd.grad(expected(module, *inputs, attn_mask=full)[0].square().sum(), attn_mask)
        torch.testing.assert_close(gradient, theirs)
    one = module(*(t[1] for t in inputs), key_mask=key_mask[1])[0]
    torch.testing.assert_close(one, module(*inputs, key_mask=key_mask[1])[0][1])


def test_padding_is_ignored() -> None:
    module, (query, key, value) = make()
    lengths = [4, LK]
    padded = [t.detach().clone() for t in (key, value)]
    for t in padded:
        t[0, 4:] = torch.nan
    mask = masks.padding_mask(lengths)[:, 0, 0]
    output, _ = module(query, *padded, key_mask=mask)
    torch.testing.assert_close(output[0], module(query[0], key[0, :4], value[0, :4])[0])
    assert torch.isfinite(output).all()
    none, weights = module(query, key, value, key_mask=torch.zeros(LK, dtype=torch.bool), need_weights=True)
    torch.testing.assert_close(none, module.out_proj.bias.expand_as(none))
    assert weights.eq(0).all()


@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (2, 1)}, {"is_causal": True, "window": (1, None)}])
def test_causal_and_window(options: dict[str, Any]) -> None:
    module, (query, _, _) = make()
    torch.testing.assert_close(
        module(query, **options, need_weights=True), expected(module, query, query, query, **options)
    )


def test_merged_masks_are_not_expanded() -> None:
    from scaledot.modules import _with_key_mask

    key_mask = torch.ones(BATCH, LK, dtype=torch.bool)
    key = torch.zeros(BATCH, LK, EMBED)
    assert _with_key_mask(None, key_mask, key, True).shape == (BATCH, 1, 1, LK)
    assert _with_key_mask(None, key_mask, key, True).data_ptr() == key_mask.data_ptr()
    assert _with_key_mask(MASKS["QK"], key_mask, key, True).shape == (BATCH, 1, LQ, LK)
    assert _with_key_mask(torch.zeros(LK), key_mask, key, True).shape == (BATCH, 1, 1, LK)
    assert _with_key_mask(MASKS["QK"], key_mask[0], key, True).shape == (1, LQ, LK)


def test_dropout_in_training_only() -> None:
    module, inputs = make(dropout=0.5)
    exact, exact_weights = expected(module, *inputs)
    torch.manual_seed(3)
    dropped, weights = module(*inputs, need_weights=True)
    kept = weights != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(weights, kept * exact_weights * 2)
    torch.manual_seed(3)
    torch.testing.assert_close(module(*inputs)[0], dropped)
    assert not torch.allclose(module(*inputs)[0], dropped)
    torch.testing.assert_close(module.eval()(*inputs)[0], exact)


def test_output_is_a_view() -> None:
    """Merging the heads copies nothing: out_proj reads the op's output."""
    module, inputs = make(torch.float32, out_proj=False)
    output, _ = module(*inputs)
    assert output.is_contiguous()
    assert output._base is not None


def test_state_dict_copy_and_pickle() -> None:
    module, inputs = make(num_kv_heads=2, qk_dim=16, out_dim=10)
    output = module(*inputs)[0]
    assert sorted(module.state_dict()) == sorted(
        f"{n}_proj.{p}" for n in ("q", "k", "v", "out") for p in ("weight", "bias")
    )
    other = MultiHeadAttention(EMBED, HEADS, num_kv_heads=2, qk_dim=16, out_dim=10, dtype=torch.float64)
    assert not torch.equal(other(*inputs)[0], output)
    other.load_state_dict(module.state_dict())
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = [
        other,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    ]
    for twin in copies:
        assert torch.equal(twin(*inputs)[0], output)
    assert [name for name, _ in MultiHeadAttention(8, 2, out_proj=False, bias=False).named_parameters()] == [
        "q_proj.weight", "k_proj.weight", "v_proj.weight",
    ]  # fmt: skip


def test_initialisation() -> None:
    module = MultiHeadAttention(64, 4, num_kv_heads=1)
    for projection in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        bound = (6 / sum(projection.weight.shape)) ** 0.5
        assert 0.8 * bound < projection.weight.abs().max() <= bound
        assert projection.bias.eq(0).all()


def test_repr_shows_arguments_that_are_not_default() -> None:
    assert MultiHeadAttention(8, 2).extra_repr() == "embed_dim=8, num_heads=2"
    module = MultiHeadAttention(8, 2, kdim=3, num_kv_heads=1, v_dim=4, dropout=0.1, out_proj=False)
    assert (
        module.extra_repr() == "embed_dim=8, num_heads=2, kdim=3, v_dim=4, num_kv_heads=1, dropout=0.1, out_proj=False"
    )


def test_devices_and_dtypes() -> None:
    module = MultiHeadAttention(8, 2, device="meta", dtype=torch.bfloat16)
    output, weights = module(torch.empty(3, 5, 8, device="meta", dtype=torch.bfloat16), need_weights=True)
    assert (output.shape, output.dtype, weights.shape) == ((3, 5, 8), torch.bfloat16, (3, 2, 5, 5))
    for dtype in (torch.float16, torch.bfloat16):
        module, inputs = make(dtype)
        wide = module(*inputs)[0].float(), copy.deepcopy(module).float()(*(t.float() for t in inputs))[0]
        torch.testing.assert_close(*wide, atol=0.1, rtol=0.1)


def test_autocast() -> None:
    module, inputs = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = module(*inputs)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), module(*inputs)[0], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty(sizes: tuple[int, int, int]) -> None:
    module, _ = make(torch.float32)
    batch, rows, keys = sizes
    query, key = torch.randn(batch, rows, EMBED), torch.randn(batch, keys, EMBED)
    output, weights = module(query, key, need_weights=True)
    assert output.shape == (batch, rows, EMBED)
    assert weights.shape == (batch, HEADS, rows, keys)
    output.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_without_graph_breaks() -> None:
    module, inputs = make(torch.float32, num_kv_heads=2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    key_mask = masks.padding_mask([LK, 3], LK)[:, 0, 0]
    for options in (
        {},
        {"key_mask": key_mask, "need_weights": True},
        {"window": (1, 1), "attn_mask": MASKS["QK"]},
    ):
        torch.testing.assert_close(compiled(*inputs, **options), module(*inputs, **options))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"num_heads": 5},
            ValueError,
            r"qk_dim: got 24 \(the default, embed_dim\); needs a multiple of num_heads, 5",
        ),
        ({"qk_dim": 10}, ValueError, "qk_dim: got 10; needs a multiple of num_heads, 4"),
        ({"v_dim": 10}, ValueError, "v_dim: got 10; needs a multiple"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads: got 3; needs a divisor of num_heads, 4"),
        ({"num_heads": 0}, ValueError, "num_heads: got 0; needs at least 1"),
        ({"kdim": -1}, ValueError, "kdim: got -1"),
        ({"embed_dim": 24.0}, TypeError, "embed_dim: got 24.0"),
        ({"num_heads": True}, TypeError, "num_heads: got True"),
        ({"dropout": 1.1}, ValueError, r"dropout: got 1\.1; needs a probability in \[0, 1\]"),
        ({"dropout": "a"}, TypeError, "dropout: got 'a', a str; needs a number"),
        ({"dropout": None}, TypeError, "dropout: got None; needs a number"),
        ({"dropout": -0.1}, ValueError, "dropout: got -0.1"),
        ({"out_proj": False, "out_dim": 3}, ValueError, "out_dim: got 3 with out_proj=False"),
    ],
)
def test_constructor_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention(**{"embed_dim": EMBED, "num_heads": HEADS, **options})


QUERY, KEY = torch.zeros(BATCH, LQ, EMBED), torch.zeros(BATCH, LK, EMBED)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": torch.zeros(EMBED)}, ValueError, r"query: got shape \(24,\)"),
        ({"query": QUERY[None]}, ValueError, "query: got shape"),
        ({"query": [1.0]}, TypeError, "query: got a list"),
        ({"query": QUERY.double()}, TypeError, "query: got dtype torch.float64; needs torch.float32"),
        ({"key": KEY.to("meta")}, ValueError, "key: got a tensor on meta; needs cpu"),
        ({"value": KEY.to_sparse()}, TypeError, "value: got a tensor of layout torch.sparse_coo; needs a dense one"),
        ({"query": torch.nested.nested_tensor([QUERY[0]])}, TypeError, "query: got a nested tensor of layout"),
        ({"value": KEY.numpy()}, TypeError, r"value: got a numpy.ndarray of shape \(2, 7, 24\); needs a torch.Tensor"),
        ({"attn_mask": "causal"}, TypeError, "attn_mask: got 'causal', a str; needs a torch.Tensor"),
        (
            {"attn_mask": [True], "key_mask": torch.ones(LK) > 0},
            TypeError,
            "attn_mask: got a list; needs a torch.Tensor",
        ),
        ({"is_causal": 1}, TypeError, "is_causal: got 1, an int; needs True or False"),
        ({"need_weights": "yes"}, TypeError, "need_weights: got 'yes', a str; needs True or False"),
        ({"query": QUERY[..., 1:]}, ValueError, "query: got shape .* embed_dim, 24"),
        ({"key": KEY[0]}, ValueError, "key: got shape .* needs 3 dimensions"),
        ({"key": KEY[..., 1:]}, ValueError, "key: got shape .* kdim, 24"),
        ({"value": KEY[..., 1:]}, ValueError, "value: got shape .* vdim, 24"),
        ({"value": KEY[:, 1:]}, ValueError, "value"),
        ({"key": KEY[:1].expand(3, -1, -1)}, ValueError, "key"),
        ({"key_mask": torch.ones(BATCH, LK)}, TypeError, "key_mask: got dtype torch.float32"),
        (
            {"key_mask": torch.ones(LQ, LK).bool()},
            ValueError,
            r"key_mask: got shape \(5, 7\); needs \(2, 7\) or \(7,\)",
        ),
        ({"key_mask": [True]}, TypeError, "key_mask: got a list"),
        (
            {"query": QUERY[0], "key": KEY[0], "key_mask": torch.ones(1, LK).bool()},
            ValueError,
            r"key_mask: .* needs \(7,\)",
        ),
        ({"attn_mask": torch.ones(3, LK).bool()}, ValueError, "attn_mask"),
        (
            {"attn_mask": torch.ones(3, LK + 1), "key_mask": torch.ones(LK).bool()},
            ValueError,
            "attn_mask: got shape",
        ),
        (
            {"attn_mask": torch.ones(LQ, LK).int(), "key_mask": torch.ones(LK).bool()},
            TypeError,
            "attn_mask: got dtype",
        ),
        ({"key_mask": torch.ones(LK, device="meta").bool()}, ValueError, "key_mask: got a tensor on meta; needs cpu"),
        (
            {"key_mask": torch.ones(BATCH, LK).bool().to_sparse()},
            TypeError,
            "key_mask: got a tensor of layout torch.sparse_coo; needs a dense one",
        ),
        (
            {"attn_mask": torch.ones(LQ, LK, device="meta"), "key_mask": torch.ones(LK).bool()},
            ValueError,
            "attn_mask: got a tensor on meta",
        ),
        (
            {"attn_mask": torch.ones(LQ, LK).to_sparse(), "key_mask": torch.ones(LK).bool()},
            TypeError,
            "attn_mask: got a tensor of layout Sparse",
        ),
        ({"window": 3}, TypeError, "window: got 3"),
        ({"window": (-1, 0)}, ValueError, "window"),
    ],
)
def test_forward_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    module = MultiHeadAttention(EMBED, HEADS)
    with pytest.raises(error, match=message):
        module(**{"query": QUERY, "key": KEY, **arguments})
