"""`import flash_attn` after install(), with a model that does so, and bert_padding."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scaledot.dropin import flash_attn
from scaledot.dropin.flash_attn import bert_padding, flash_attn_func


# ---------------------------------------------------------------------------------------------------- install
@pytest.fixture
def installed() -> Iterator[None]:
    flash_attn.install()
    yield
    flash_attn.uninstall()


class UnpaddedEncoder(nn.Module):
    """A block as unpadding models have it: tokens without padding, local attention, and the batch again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        from flash_attn import flash_attn_varlen_qkvpacked_func as attend
        from flash_attn.bert_padding import pad_input, unpad_input

        x, indices, ends, longest, _ = unpad_input(self.embed(ids), mask)
        out = attend(self.qkv(x).view(-1, 3, 4, 8), ends, longest, window_size=(3, 3))
        return pad_input(x + self.out(out.flatten(1)), indices, *ids.shape)

    def eager(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        distance = torch.arange(ids.size(1)) - torch.arange(ids.size(1))[:, None]
        attends = (distance.abs() <= 3) & mask.bool()[:, None, None, :]
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(~attends, torch.finfo(torch.float32).min)
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return (x + self.out(out)) * mask[..., None]


@pytest.mark.usefixtures("installed")
def test_unmodified_model_on_a_padded_batch() -> None:
    torch.manual_seed(0)
    model = UnpaddedEncoder()
    ids, mask = torch.randint(50, (3, 12)), (torch.arange(12) < torch.tensor([12, 5, 9])[:, None]).long()
    found, wanted = model(ids, mask), model.eager(ids, mask)
    torch.testing.assert_close(found, wanted)
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(wanted.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("installed")
def test_install_is_what_libraries_look_for() -> None:
    flash_attn.install()  # again
    assert importlib.util.find_spec("flash_attn") is not None
    assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    module = importlib.import_module("flash_attn")
    assert module.__version__ == "2.8.3"
    assert module.flash_attn_func is flash_attn_func
    assert importlib.import_module("flash_attn.bert_padding").pad_input is bert_padding.pad_input
    assert importlib.import_module("flash_attn.flash_attn_interface").flash_attn_func is flash_attn_func
    assert not hasattr(module, "install")
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.cute"):
        importlib.import_module("flash_attn.cute")


def test_uninstall() -> None:
    flash_attn.install()
    importlib.import_module("flash_attn.bert_padding")
    flash_attn.uninstall()
    flash_attn.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_install_refuses_where_flash_attn_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="flash_attn: got an installed flash-attn; needs an environment without it"):
        flash_attn.install()


# ----------------------------------------------------------------------------------------------- bert_padding
def test_padding_and_back() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    tokens, indices, ends, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert (indices.tolist(), ends.tolist(), longest, used.tolist()) == ([1, 2, 3, 4, 5], [0, 3, 5], 3, [3, 2])
    assert ends.dtype == used.dtype == torch.int32
    assert torch.equal(bert_padding.pad_input(tokens, indices, 2, 4), x * mask[..., None])
    assert torch.autograd.gradcheck(
        lambda x: bert_padding.pad_input(bert_padding.unpad_input(x, mask)[0], indices, 2, 4), x
    )
    *_, ends, longest, used = bert_padding.unpad_input(x, mask, torch.tensor([[1, 0, 0, 0], [0, 0, 0, 1]]))
    assert (ends.tolist(), longest, used.tolist()) == ([0, 4, 7], 4, [3, 2])


def test_unpad_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0]])
    x = torch.randn(2, 4, 3)
    tokens, indices, ends, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(tokens, torch.cat([x[0, :3], x[1]]))
    assert (indices.tolist(), ends.tolist(), longest) == ([0, 1, 2, 4, 5, 6, 7], [0, 2, 3, 7], 4)
