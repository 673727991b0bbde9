"""Models compiled and packaged by AOTInductor, then loaded by Python and by C++."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from cpp_build import run
from exported import Layer, inputs, packaged
from varlen_cases import cumulative


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Layer, Path, Any]:
    """A model, the file with it compiled, and what that file loads as."""
    torch.manual_seed(0)
    model = Layer().eval()
    path = tmp_path_factory.mktemp("aoti") / "layer.pt2"
    return model, path, packaged(model, str(path))


def test_aotinductor_package_loaded_by_python(package: tuple[Layer, Path, Any]) -> None:
    model, _, loaded = package
    for batch, length in ((2, 5), (4, 30)):
        arguments = inputs(batch, length)
        for found, wanted in zip(loaded(*arguments), model(*arguments), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_aotinductor_package_loaded_by_cpp(package: tuple[Layer, Path, Any], cpp_build: Path, tmp_path: Path) -> None:
    """The program is tests/cpp_package/packaged.cpp. Its process has no Python."""
    model, path, _ = package
    x, key_mask = inputs(4, 30)
    output, weights, lse = model(x, key_mask)
    results = {"output": output, "weights": weights, "lse": lse}
    tensors = {"x": x, "key_mask": key_mask, **{name: t.detach().contiguous() for name, t in results.items()}}
    torch.save(tensors, tmp_path / "io.pt")
    assert "all is well" in run([str(cpp_build / "packaged"), str(path), str(tmp_path / "io.pt")], 120)


class PackedAttention(torch.nn.Module):
    def forward(self, query: Tensor, cu_seq: Tensor) -> Tensor:
        result: Tensor = scaledot.varlen_attention(query, query, query, cu_seq, cu_seq, 64, 64, True, softcap=3.0)
        return result


def test_aotinductor_package_of_packed_sequences(tmp_path: Path) -> None:
    """One compilation serves any lengths and numbers of sequences."""
    total, ends = (torch.export.Dim(name, min=2, max=4096) for name in ("total", "ends"))
    arguments = torch.randn(9, 2, 8), cumulative((4, 5))
    program = torch.export.export(PackedAttention(), arguments, dynamic_shapes=({0: total}, {0: ends}))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "packed.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for lengths in ((4, 5), (1, 20, 0, 3)):
        arguments = torch.randn(sum(lengths), 2, 8), cumulative(lengths)
        assert torch.equal(loaded(*arguments), PackedAttention()(*arguments))
