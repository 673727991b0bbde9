"""scaledot.dropin.torch_nn.convert: torch's transformer layers with scaledot's attention."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agreement import OpCounter, check_agreement
from scaledot.dropin.torch_nn import MultiheadAttention, convert

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Support for mismatched", "ignore:enable_nested_tensor is True"
)


def encoder(**options) -> nn.TransformerEncoder:
    options = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True} | options
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), num_layers=2)


PADDING = torch.arange(7) >= torch.tensor([[7], [4], [1]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)
ENCODER_CALLS = {
    "nothing": {},
    "padding": {"src_key_padding_mask": PADDING},
    "padding in the middle": {"src_key_padding_mask": PADDING.flip(1)},
    "causal": {"mask": CAUSAL},
    "causal hint": {"mask": CAUSAL, "is_causal": True},
    "bool mask": {"mask": CAUSAL != 0},
    "both": {"mask": CAUSAL != 0, "src_key_padding_mask": PADDING},
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("call", ENCODER_CALLS)
def test_encoder_runs_in_the_kernels(call: str, training: bool) -> None:
    """In eval mode without gradients, torch's encoder has its own fused path, also with nested tensors."""
    theirs = encoder(norm_first=False).train(training)
    ours = convert(copy.deepcopy(theirs))
    x = torch.randn(3, 7, 16)
    with torch.set_grad_enabled(training):
        with OpCounter() as ops:
            output = ours(x, **ENCODER_CALLS[call])
        torch.testing.assert_close(output, theirs(x, **ENCODER_CALLS[call]), rtol=1e-5, atol=1e-5)
    assert ops.count["scaledot.sdpa_recorded" if training else "scaledot.sdpa"] == 2, "one per layer"
    assert not ops.count["aten._transformer_encoder_layer_fwd"]


def test_torchs_encoder_has_a_fast_path() -> None:
    """If this fails, torch has changed and the test above no longer tests the fast path."""
    with torch.no_grad(), OpCounter() as ops:
        encoder().eval()(torch.randn(3, 7, 16))
    assert ops.count["aten._transformer_encoder_layer_fwd"] == 2


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_whole_transformer(batch_first: bool, norm_first: bool) -> None:
    options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = nn.Transformer(16, 4, 2, 2, 24, **options)
    ours = convert(copy.deepcopy(theirs))
    assert sum(type(m) is MultiheadAttention for m in ours.modules()) == 6
    assert not any(type(m) is nn.MultiheadAttention for m in ours.modules())
    source, target = torch.randn(3, 7, 16), torch.randn(3, 5, 16)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    inputs = {
        "src": source,
        "tgt": target,
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5).isinf(),
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
        "tgt_is_causal": True,
    }
    check_agreement(ours, theirs, inputs)
    ours.eval(), theirs.eval()
    with torch.no_grad(), OpCounter() as ops:
        torch.testing.assert_close(ours(**inputs), theirs(**inputs), rtol=1e-5, atol=1e-5)
    assert ops.count["scaledot.sdpa"] == 6


def test_convert_keeps_the_module_objects() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, dropout=0.1, kdim=4), "b": encoder()}).double()
    model["c"] = model["a"]
    model["b"].eval()
    seen = []
    model["a"].register_forward_hook(lambda module, args, output: seen.append(module))
    before = {name: id(p) for name, p in model.named_parameters()}
    modules = list(model.modules())
    state = model.state_dict()
    assert convert(model) is model
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert all(mine is other for mine, other in zip(model.modules(), modules, strict=True))
    assert model["c"] is model["a"]
    assert (model["a"].training, model["b"].layers[0].self_attn.training) == (True, False)
    assert sum(isinstance(m, MultiheadAttention) for m in model.modules()) == 3
    assert list(model.state_dict()) == list(state)
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    model["a"](x, torch.randn(3, 2, 4, dtype=torch.float64), x)
    assert seen == [model["a"]]
    hooks = len(model["a"]._forward_pre_hooks)
    convert(model)
    assert len(model["a"]._forward_pre_hooks) == hooks, "converting twice changes nothing"


def test_convert_a_single_module_a_subclass_and_a_dict() -> None:
    module = nn.MultiheadAttention(8, 2)
    assert convert(module) is module
    assert type(module) is MultiheadAttention

    class Own(nn.MultiheadAttention):
        pass

    with pytest.warns(UserWarning, match=r"found no torch\.nn\.MultiheadAttention in Own"):
        assert type(convert(Own(8, 2))) is Own
    with pytest.raises(TypeError, match=r"model: got a dict; needs a torch\.nn\.Module"):
        convert({})
    with pytest.raises(TypeError, match=r"^model: got 3, an int; needs a torch\.nn\.Module$"):
        convert(3)


@pytest.mark.parametrize("converted", [False, True])
def test_deepcopy_and_save(converted: bool) -> None:
    original = convert(nn.MultiheadAttention(8, 2)) if converted else MultiheadAttention(8, 2)
    buffer = io.BytesIO()
    torch.save(original, buffer)
    buffer.seek(0)
    x = torch.randn(3, 1, 8)
    for module in (copy.deepcopy(original), torch.load(buffer, weights_only=False)):
        assert type(module) is MultiheadAttention
        assert len(module._forward_pre_hooks) == 1, "torch's encoder layer keeps calling it"
        torch.testing.assert_close(module(x, x, x), original(x, x, x))


def test_training_step_after_convert() -> None:
    """An optimizer created before `convert` keeps its parameters, and both models learn the same."""
    theirs = encoder(d_model=8, nhead=2)
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    convert(ours)
    x, goal = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
    losses = []
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), goal)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-5)
    assert losses[-2] < losses[0]


def test_compiles_without_graph_breaks() -> None:
    ours = convert(encoder(d_model=8, nhead=2).eval())
    x = torch.randn(2, 5, 8)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), ours(x))
