"""score_mod: functions that options compute run as these options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import scaledot
from scaledot._score import score_arguments
from score_mod_cases import FUNCTIONS, LIMITS, SHAPE, Captured, compared, formula, inputs, places, relative


def _all_options(c: Captured) -> Callable[..., Tensor]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        far = (k - q).abs() * c.steep[h]
        return torch.tanh(s / 3) * 3 + c.relative[h, (k - q).clamp(-8, 8) + 8] - far

    return score_mod


# The options that a function becomes; None: a program.
BECOMES: dict[str, tuple[Callable[[Captured], Callable[..., Tensor]], set[str] | None]] = {
    "nothing": (lambda c: lambda s, b, h, q, k: s * 1 + 0, set()),
    "a cap": (lambda c: lambda s, b, h, q, k: 2.5 * (s / 2.5).tanh(), {"softcap"}),
    "slopes": (lambda c: lambda s, b, h, q, k: s - c.steep[h] * (q - k).abs(), {"alibi_slopes"}),
    "slopes times minus one": (lambda c: lambda s, b, h, q, k: s + -(q - k).abs() * c.steep[h], {"alibi_slopes"}),
    "slopes of batch entries": (
        lambda c: lambda s, b, h, q, k: s - c.steeps[b, h] * torch.abs(k - q),
        {"alibi_slopes"},
    ),
    "a table": (relative, {"relative_bias"}),
    "a table with a shift before the ends": (
        lambda c: lambda s, b, h, q, k: c.relative[h, torch.clamp(8 + k - q, 0, 16)] + s,
        {"relative_bias"},
    ),
    "a table of one head": (
        lambda c: lambda s, b, h, q, k: s + c.relative[2, (k - q).clamp(max=8).clamp(min=-8) + 8],
        {"relative_bias"},
    ),
    "all three": (_all_options, {"softcap", "alibi_slopes", "relative_bias"}),
    "two caps": (lambda c: lambda s, b, h, q, k: 2 * torch.tanh(s / 3), None),
    "a cap last": (lambda c: lambda s, b, h, q, k: 2 * torch.tanh((s - c.steep[h] * (q - k).abs()) / 2), None),
    "a cap below zero": (lambda c: lambda s, b, h, q, k: -2 * torch.tanh(s / -2), None),
    "slopes with a sign": (lambda c: lambda s, b, h, q, k: s - c.steep[h] * (q - k), None),
    "slopes upwards": (lambda c: lambda s, b, h, q, k: s + c.steep[h] * (q - k).abs(), None),
    "slopes twice": (lambda c: lambda s, b, h, q, k: s - c.steep[h] * (q - k).abs() * 2, None),
    "slopes for more heads": (lambda c: lambda s, b, h, q, k: s - c.by_key.detach()[h] * (q - k).abs(), None),
    "slopes with a gradient": (lambda c: lambda s, b, h, q, k: s - c.slopes[h] * (q - k).abs(), None),
    "a table backwards": (lambda c: lambda s, b, h, q, k: s + c.relative[h, (q - k).clamp(-8, 8) + 8], None),
    "a narrower table": (lambda c: lambda s, b, h, q, k: s + c.relative[h, (k - q).clamp(-7, 8) + 8], None),
    "a table from the head on": (
        lambda c: lambda s, b, h, q, k: s + c.wide[0, (k - q + 20).clamp(0, 40) + h],
        None,
    ),
    "a table without ends": (lambda c: lambda s, b, h, q, k: s + c.wide[h, k - q + 60], None),
    "a table of rows": (lambda c: lambda s, b, h, q, k: s + c.relative[h, (k - h).clamp(-8, 8) + 8], None),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", BECOMES)
def test_what_options_do_runs_as_options(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    function, options = BECOMES[name]
    captured = Captured(dtype)
    arguments = score_arguments(function(captured), *inputs(dtype), {})
    assert arguments.keys() == options if options is not None else "score_program" in arguments
    monkeypatch.setitem(FUNCTIONS, name, function)
    compared(name, dtype)


@pytest.mark.parametrize("name", ["a cap", "slopes", "a table", "slopes with a gradient"])
def test_options_are_explained(name: str) -> None:
    function, options = BECOMES[name]
    explanation = scaledot.explain(*inputs(torch.float32), score_mod=function(Captured(torch.float32)))
    assert f"it has no {''.join(options or {'score_mod'})}" in str(explanation)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["alibi", "relative_bias"])
def test_functions_count_distances_from_the_same_positions(name: str, known: bool) -> None:
    """Whatever the alignment of causal masks is."""
    tensors, captured = [tensor.detach() for tensor in inputs(torch.float32)], Captured(torch.float32)
    table = captured.steep if name == "alibi" else captured.relative.detach()
    score_mod = getattr(scaledot.score_mods, name)(table)
    found = scaledot.scaled_dot_product_attention(
        *tensors,
        score_mod=score_mod if known else lambda *places: score_mod(*places),
        is_causal=True,
        causal_alignment="lower_right",
    )
    i, j = places()
    exact = [tensor.double() for tensor in tensors]
    wanted = formula(*exact, score_mod, j <= i + SHAPE["keys"] - SHAPE["rows"])
    assert (found - wanted).abs().max() < LIMITS[torch.float32]


def test_slopes_of_a_known_function_get_a_gradient() -> None:
    tensors = inputs(torch.float64)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    score_mod = scaledot.score_mods.alibi(slopes)
    found = scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod)
    (right,) = torch.autograd.grad(formula(*tensors, score_mod).sin().sum(), slopes)
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), slopes)[0], right)
    with torch.no_grad():  # as an option
        assert "alibi_slopes" in score_arguments(score_mod, *tensors, {})
        torch.testing.assert_close(scaledot.scaled_dot_product_attention(*tensors, score_mod=score_mod), found)
