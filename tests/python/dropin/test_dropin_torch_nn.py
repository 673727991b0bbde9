"""scaledot.dropin.torch_nn.MultiheadAttention against torch.nn.MultiheadAttention."""

from __future__ import annotations

import io
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scaledot
from agreement import DTYPES, OpCounter, check_agreement, parameter_names, zeros_for_empty_rows
from scaledot.dropin import sdpa, torch_nn
from scaledot.dropin.torch_nn import MultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Support for mismatched")

E, H, N, L, S = 12, 3, 2, 5, 6
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 7, "vdim": 10},
    "kdim, no bias": {"kdim": 7, "vdim": 10, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 7, "vdim": 10},
}
LAYOUTS = ("batch first", "length first", "unbatched")
WEIGHTS = ((False, True), (True, True), (True, False))  # need_weights, average_attn_weights


def pair(layout: str = "batch first", **options) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """(ours, torch's) with the same parameters. Each loads the other's state_dict."""
    options = {"embed_dim": E, "num_heads": H, "batch_first": layout == "batch first"} | options
    ours, theirs = MultiheadAttention(**options), nn.MultiheadAttention(**options)
    for parameter in ours.parameters():  # biases are initialised to 0
        nn.init.normal_(parameter, std=0.4)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def inputs_of(layout: str, kdim: int = E, vdim: int = E, kind: str = "different") -> dict[str, torch.Tensor]:
    def make(length: int, width: int) -> torch.Tensor:
        shape = {"batch first": (N, length, width), "length first": (length, N, width), "unbatched": (length, width)}
        return torch.randn(shape[layout])

    query = make(L, E)
    if kind == "self":
        return {"query": query, "key": query, "value": query}
    key = make(S, kdim)
    return {"query": query, "key": key, "value": key if kind == "memory" else make(S, vdim)}


def masks_of(name: str, layout: str, key_length: int = S) -> dict[str, torch.Tensor | None]:
    batch = 1 if layout == "unbatched" else N
    attn_mask = {
        "2d": torch.rand(L, key_length) < 0.3,
        "3d": torch.rand(batch * H, L, key_length) < 0.3,
        "float 2d": torch.randn(L, key_length),
        "float 3d": torch.randn(batch * H, L, key_length),
    }.get(name.split(" + ")[0])
    padding = torch.arange(key_length) >= torch.tensor([[key_length], [4]])[:batch]
    padding = padding[0] if layout == "unbatched" else padding
    key_padding_mask = {"pad": padding, "float pad": torch.randn(padding.shape)}.get(name.split(" + ")[-1])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask[..., 0] = False
    return {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}


MASKS = ("none", "2d", "3d", "float 2d", "float 3d", "pad", "float pad", "2d + pad", "3d + pad")
MIXED_MASKS = ("float 3d + pad", "2d + float pad", "float 2d + float pad")


def test_interface() -> None:
    for name in ("__init__", "forward"):
        assert parameter_names(getattr(MultiheadAttention, name)) == parameter_names(
            getattr(nn.MultiheadAttention, name)
        )
    assert issubclass(MultiheadAttention, nn.MultiheadAttention)


@pytest.mark.parametrize("option", OPTIONS)
def test_parameters(option: str) -> None:
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, 0.1, dtype=torch.float64, **OPTIONS[option])
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, 0.1, dtype=torch.float64, **OPTIONS[option])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
    for message, arguments in (("greater than 0", (0, 1)), ("must be divisible", (10, 3))):
        with pytest.raises((ValueError, AssertionError), match=message):
            MultiheadAttention(*arguments)
    assert MultiheadAttention(E, H, device="meta").in_proj_weight.is_meta


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, layout: str) -> None:
    options = OPTIONS[option]
    ours, theirs = pair(layout, **options)
    widths = {name: options[name] for name in ("kdim", "vdim") if name in options}
    kinds = ("different",) if widths else ("different", "memory", "self")
    for kind, mask, (need_weights, average) in itertools.product(kinds, ("none", "3d + pad"), WEIGHTS):
        inputs = inputs_of(layout, **widths, kind=kind)
        inputs |= masks_of(mask, layout, L if kind == "self" else S)
        check_agreement(ours, theirs, inputs | {"need_weights": need_weights, "average_attn_weights": average})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS + MIXED_MASKS)
def test_masks(mask: str, layout: str) -> None:
    ours, theirs = pair(layout)
    for need_weights, average in WEIGHTS:
        inputs = inputs_of(layout) | masks_of(mask, layout)
        check_agreement(ours, theirs, inputs | {"need_weights": need_weights, "average_attn_weights": average})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "3d", "float 2d", "pad"])
def test_dtypes(mask: str, dtype: torch.dtype) -> None:
    ours, theirs = pair()
    for need_weights in (False, True):
        inputs = inputs_of("batch first") | masks_of(mask, "batch first") | {"need_weights": need_weights}
        check_agreement(ours, theirs, inputs, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_have_the_shapes_of_torch(layout: str) -> None:
    ours, theirs = pair(layout)
    for need_weights, average in WEIGHTS:
        options = {"need_weights": need_weights, "average_attn_weights": average}
        mine, other = ours(**inputs_of(layout), **options), theirs(**inputs_of(layout), **options)
        assert isinstance(mine, tuple)
        assert mine[0].shape == other[0].shape
        assert mine[0].stride() == other[0].stride()
        assert (mine[1] is None) == (other[1] is None)
        assert mine[1] is None or mine[1].shape == other[1].shape


@pytest.mark.parametrize("option", ["plain", "all"])
def test_is_causal(option: str) -> None:
    """A hint, which torch follows if nothing else needs the mask."""
    options = OPTIONS[option]
    widths = {name: options[name] for name in ("kdim", "vdim") if name in options}
    ours, theirs = pair(**options)
    causal = torch.ones(L, S, dtype=torch.bool).triu(1)
    for need_weights in (False, True):
        for padding in (None, masks_of("pad", "batch first")["key_padding_mask"]):
            inputs = inputs_of("batch first", **widths) | {"attn_mask": causal, "is_causal": True}
            check_agreement(ours, theirs, inputs | {"key_padding_mask": padding, "need_weights": need_weights})
    for module, message in ((ours, "attn_mask: got None; needs the causal mask"), (theirs, "Need attn_mask")):
        with pytest.raises(RuntimeError, match=message):
            module(**inputs_of("batch first", **widths), is_causal=True)


@pytest.mark.parametrize("need_weights", [False, True])
def test_rows_with_nothing_to_attend_to(need_weights: bool) -> None:
    ours, theirs = pair()
    inputs = inputs_of("batch first") | masks_of("3d + pad", "batch first") | {"need_weights": need_weights}
    inputs["attn_mask"][:H, 2] = True
    inputs["key_padding_mask"][1] = True
    with zeros_for_empty_rows():
        check_agreement(ours, theirs, inputs)
    output, weights = ours(**inputs)
    torch.testing.assert_close(output[1], ours.out_proj.bias.expand(L, E))
    torch.testing.assert_close(output[0, 2], ours.out_proj.bias)
    if need_weights:
        assert theirs(**inputs)[1][1].isnan().all()
        assert (weights[1] == 0).all()
    output.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


class Seeded(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        torch.manual_seed(5)
        return self.inner(**inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("average", [False, True])
def test_dropout(average: bool, layout: str) -> None:
    """Agreement with torch's module if it drops the same weights."""
    p = 0.4
    ours, theirs = pair(layout, dropout=p)
    inputs = inputs_of(layout) | {"average_attn_weights": average}
    torch.manual_seed(5)
    weights = ours(**inputs | {"average_attn_weights": False})[1]
    kept = (weights != 0).view(-1, L, S)
    assert 0.3 < kept.float().mean() < 0.9

    def fixed(weights: torch.Tensor, p: float) -> torch.Tensor:
        return weights * kept / (1 - p)

    with mock.patch.object(F, "dropout", fixed):
        check_agreement(Seeded(ours), Seeded(theirs), inputs)
    with OpCounter() as ops:
        ours(**inputs)
    assert not ops.count["aten.bernoulli_"]
    check_agreement(ours.eval(), theirs.eval(), inputs)


def test_dropout_of_everything_and_bad_dropout() -> None:
    ours, theirs = pair(dropout=1.0)
    inputs = inputs_of("batch first")
    for need_weights in (False, True):
        torch.testing.assert_close(
            ours(**inputs, need_weights=need_weights), theirs(**inputs, need_weights=need_weights)
        )
    ours.dropout = 1.5
    with pytest.raises(ValueError, match=r"dropout_p: got 1\.5"):
        ours(**inputs)


def test_dropout_statistics() -> None:
    ours, _ = pair(dropout=0.25)
    x = torch.randn(8, 64, E)
    exact = ours.eval()(x, x, x, average_attn_weights=False)[1]
    weights = ours.train()(x, x, x, average_attn_weights=False)[1]
    assert (weights == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(weights[weights != 0], exact[weights != 0] / 0.75)


def test_autocast() -> None:
    ours, theirs = pair()
    x = torch.randn(N, L, E)
    with torch.autocast("cpu", torch.bfloat16):
        mine, other = ours(x, x, x)[0], theirs(x, x, x)[0]
    assert mine.dtype == other.dtype == torch.bfloat16
    torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


BAD = {
    r"query: got shape \(1, 2, 5, 12\); needs 3 dimensions, or 2 without a batch": {"query": torch.zeros(1, N, L, E)},
    r"query: got shape \(2, 5, 13\); needs 3 dimensions, as query has, the last of size 12": {
        "query": torch.zeros(N, L, E + 1)
    },
    r"key: got shape \(6, 12\); needs 3 dimensions": {"key": torch.zeros(S, E)},
    r"value: got shape \(2, 6, 11\); needs 3 dimensions, .* the last of size 12": {"value": torch.zeros(N, S, E - 1)},
    r"value: got shape \(2, 7, 12\); needs the batch size and length of key \(2, 6, 12\)": {
        "value": torch.zeros(N, S + 1, E)
    },
    r"key: got shape \(1, 6, 12\); needs the batch size of query, 2, in dimension 0": {
        "key": torch.zeros(1, S, E),
        "value": torch.zeros(1, S, E),
    },
    r"attn_mask: got shape \(6, 5\); needs \(5, 6\) or \(6, 5, 6\)": {"attn_mask": torch.zeros(S, L)},
    r"attn_mask: got shape \(2, 5, 6\); needs \(5, 6\) or": {"attn_mask": torch.zeros(N, L, S)},
    r"key_padding_mask: got shape \(6,\); needs \(2, 6\)": {"key_padding_mask": torch.zeros(S)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_shapes(message: str) -> None:
    ours, theirs = pair()
    with pytest.raises(ValueError, match=message):
        ours(**inputs_of("batch first") | BAD[message])
    with pytest.raises((RuntimeError, AssertionError)):
        theirs(**inputs_of("batch first") | BAD[message])


def test_integer_masks() -> None:
    ours, _ = pair()
    for name, shape in (("attn_mask", (L, S)), ("key_padding_mask", (N, S))):
        with pytest.raises(TypeError, match=f"{name}: got dtype torch.int64; needs torch.bool .* or a floating dtype"):
            ours(**inputs_of("batch first"), **{name: torch.zeros(shape, dtype=torch.int64)})


# ----------------------------------------------------------------------------------------------------- nested inputs


def nested(*lengths: int, layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(n, E) for n in lengths], layout=layout)


def test_nested_inputs_agree_with_torchs_fast_path() -> None:
    ours, theirs = pair(num_heads=4)
    x = nested(3, 5, 1)
    with torch.no_grad():
        for average in (True, False):
            output, weights = ours.eval()(x, x, x, average_attn_weights=average)
            expected, expected_weights = theirs.eval()(x, x, x, average_attn_weights=average)
            for mine, other in zip(output.unbind(), expected.unbind(), strict=True):
                torch.testing.assert_close(mine, other)
            torch.testing.assert_close(weights, expected_weights)
        assert ours(x, x, x, need_weights=False)[1] is None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs_that_torch_refuses(layout: torch.layout) -> None:
    """Cross-attention, gradients and the jagged layout, which torch's module lacks."""
    ours, theirs = pair()
    query, memory = nested(3, 5, layout=layout), nested(4, 2, layout=layout)
    output, weights = ours(query, memory, memory)
    assert output.layout == layout
    for k, (q, m) in enumerate(zip(query.unbind(), memory.unbind(), strict=True)):
        expected, expected_weights = theirs(q, m, m)
        torch.testing.assert_close(output.unbind()[k], expected)
        torch.testing.assert_close(weights[k, : len(q), : len(m)], expected_weights)
    torch.nested.to_padded_tensor(output, 0.0).sum().backward()
    assert ours.in_proj_weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="attn_mask: got a mask with nested inputs; needs None"):
        ours(query, memory, memory, attn_mask=torch.zeros(5, 4))
    with pytest.raises(ValueError, match="key: got a tensor that is not nested; needs query, key and value to be"):
        ours(query, torch.randn(2, 4, E), torch.randn(2, 4, E))
    with pytest.raises(ValueError, match=r"value: got lengths \[2, 4\]; needs those of key, \[4, 2\]"):
        ours(query, memory, nested(2, 4, layout=layout))


def test_public_names() -> None:
    assert torch_nn.__all__ == ["MultiheadAttention", "convert"]


# ------------------------------------------------------------------------------------------------ TorchScript


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("form", ["module", "converted encoder", "scaledot.MultiHeadAttention"])
def test_torch_jit_script_is_one_error(form: str) -> None:
    """It names the module and what to do, and leaves the model as it was."""
    model = {
        "module": lambda: pair()[0],
        "converted encoder": lambda: torch_nn.convert(nn.TransformerEncoderLayer(E, H, 8, batch_first=True)),
        "scaledot.MultiHeadAttention": lambda: scaledot.MultiHeadAttention(E, H),
    }[form]()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(NotImplementedError, match=r"torch.jit.script: got a scaledot\.\S*Attention; needs") as raised:
        torch.jit.script(model)
    assert len(str(raised.value)) < 500
    assert "torch.jit.trace" in str(raised.value)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("need_weights", [False, True])
def test_torch_jit_trace(need_weights: bool) -> None:
    """What the error of torch.jit.script points to: traced, saved and loaded, for another length too."""
    ours, _ = pair()
    ours.eval()

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = ours

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = self.attention(x, x, x, need_weights=need_weights)
            return tuple(result for result in found if result is not None)

    traced = torch.jit.trace(Attention(), torch.randn(N, L, E))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    x = torch.randn(N + 1, S, E)
    for found, expected in zip(loaded(x), ours(x, x, x, need_weights=need_weights), strict=False):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchs_module_scripted_reaches_scaledot() -> None:
    """The other way that the error names."""
    _, theirs = pair()
    scripted = torch.jit.script(theirs.train())
    x = torch.randn(N, L, E)
    expected, _ = theirs(x, x, x, need_weights=False)
    with sdpa.activate() as activation:
        found, _ = scripted(x, x, x, need_weights=False)
    assert activation.calls == 1
    torch.testing.assert_close(found, expected)
