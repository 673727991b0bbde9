"""docs/tour.md: the functions that it names exist, and its numbers are those of the call."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import scaledot
from snippets import ROOT

PAGE = (ROOT / "docs" / "tour.md").read_text()
NAMED = sorted({(file, name) for file, name in re.findall(r"([\w/]+\.(?:h|cpp|py)):\s+(\w+)", PAGE)})


@pytest.mark.parametrize(("file", "function"), NAMED)
def test_named_function_exists(file: str, function: str) -> None:
    folder = "" if file.endswith(".py") else "csrc" if "/" in file else "csrc/cpu/simd/attention"
    path = ROOT / folder / file
    assert re.search(rf"\b{function}\(", path.read_text())


def test_functions_are_found() -> None:
    assert len(NAMED) > 20


def test_plan(tmp_path: Path) -> None:
    program = tmp_path / "tour"
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc")]
    subprocess.run([compiler, *flags, str(ROOT / "tests/tour/plan.cpp"), "-o", str(program)], check=True, timeout=300)
    forward, backward = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("backward:")
    assert f"\n```text\n{forward}```" in PAGE
    assert f"\n```text\nbackward:{backward}```" in PAGE


def test_numbers() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 130, 64, requires_grad=True) for _ in range(3))
    output, lse = scaledot.scaled_dot_product_attention(query, key, value, is_causal=True, return_lse=True)
    output.sum().backward()
    assert value.grad is not None
    q, k, v, out, log_sum = query[0, 0], key[0, 0], value[0, 0], output[0, 0, 129], lse[0, 0, 129]
    dots = q[129] @ k.T
    weights = torch.exp((dots - dots[52]) / 8)
    partial_output = weights @ v
    p, dp, delta = torch.exp(dots[0] / 8 - log_sum), v[0].sum(), out.sum()
    row_84 = q[84] @ k[83:85].T
    numbers = [*row_84, dots[52], dots[52] + 64 * math.log(2), *weights[[0, 1, 2, 3, 128, 129]], weights[:128].sum()]
    numbers += [weights.sum(), *partial_output[:4], *out[:4], dots[52] / 8, weights.sum().log(), log_sum]
    numbers += [delta, dots[0] / 8, dp, p, p * (dp - delta), value.grad[0, 0, 129, 0]]
    missing = [f"{number:.4f}" for number in torch.stack(numbers).tolist() if f"{number:.4f}" not in PAGE]
    assert dots.argmax() == 52
    assert not missing
