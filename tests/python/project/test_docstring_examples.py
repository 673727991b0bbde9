"""The examples in the docstrings of the package run and print what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import scaledot

MODULES = {
    # module: further names that its examples use
    "masks": (),
    "modules": (),
    "plot": ("matplotlib",),
    "dropin.config_mha": (),
    "dropin.flash_attn._dense": (),
    "dropin.flash_attn._kvcache": (),
    "dropin.flash_attn._varlen": (),
    "dropin.sdpa": (),
    "dropin.self_attention": (),
    "dropin.split_heads": (),
    "dropin.steps": (),
    "dropin.torch_nn": (),
    "dropin.transformers": ("transformers",),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:no installed font has", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write a file
    names = {"scaledot": scaledot, "torch": torch}
    for further in MODULES[name]:
        names[further] = pytest.importorskip(further)
    if name == "plot":
        names["matplotlib"].use("Agg")
    results = doctest.testmod(importlib.import_module(f"scaledot.{name}"), extraglobs=names)
    assert results.attempted > 0
    assert results.failed == 0
