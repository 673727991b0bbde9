"""Usual score functions, which kernels compute as options.

Each function here returns a score_mod: a function of (score, batch entry, head, row, key) on 0-d tensors.
``torch.nn.attention.flex_attention.flex_attention`` calls it. scaledot knows what it does, and passes it to a kernel as
an option, which is faster than the program that it makes of other functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._checks import described, number, require_tensors
from ._keywords import check_keywords
from ._score import ScoreMod, known, known_options

__all__ = ["alibi", "compose", "relative_bias", "softcap"]


@check_keywords
def softcap(c: float) -> ScoreMod:
    """``c * tanh(score / c)``, which limits scores to (-c, c) (Gemma 2, 2024).

    Raises:
        TypeError: `c` is not a number.
        ValueError: `c` is not finite and above 0.
    """
    c = number("c", c)
    if not (c > 0 and math.isfinite(c)):
        raise ValueError(f"c: got {c}; needs a finite number above 0")

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return c * torch.tanh(score / c)

    return known(score_mod, {"softcap": float(c)})


@check_keywords
def alibi(slopes: Tensor) -> ScoreMod:
    """``score - slopes[head] * |key - row|`` (Press et al., "Train Short, Test Long", 2022).

    Args:
        slopes: (H,) or (B, H), floating.

    Raises:
        TypeError: `slopes` is not a floating tensor.
        ValueError: it has other dimensions.
    """
    _require_floating("slopes", slopes)
    if slopes.dim() not in (1, 2):
        raise ValueError(f"slopes: got shape {tuple(slopes.shape)}; needs (H,) or (B, H)")

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        slope = slopes[head] if slopes.dim() == 1 else slopes[batch, head]
        return score - slope * (key - row).abs()

    return known(score_mod, {"alibi_slopes": slopes})


@check_keywords
def relative_bias(table: Tensor) -> ScoreMod:
    """``score + table[head, M + clamp(key - row, -M, M)]``, a number for each distance (T5: Raffel et al., 2020).

    Args:
        table: (N,), (H, N) or (B, H, N), floating; N = 2 M + 1. H and B may be 1. It gets a gradient.

    Raises:
        TypeError: `table` is not a floating tensor.
        ValueError: it has other dimensions, or an even number of entries.
    """
    _require_floating("table", table)
    if table.dim() not in (1, 2, 3) or table.size(-1) % 2 == 0:
        raise ValueError(f"table: got shape {tuple(table.shape)}; needs (N,), (H, N) or (B, H, N) with an odd N")
    reach = table.size(-1) // 2

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        places = (batch, head)[2 - (table.dim() - 1) :]
        lead = [place if size > 1 else 0 for place, size in zip(places, table.shape[:-1], strict=True)]
        entry = (*lead, (key - row).clamp(-reach, reach) + reach)
        return score + table[entry]

    return known(score_mod, {"relative_bias": table})


@check_keywords
def compose(*score_mods: ScoreMod) -> ScoreMod:
    """All of them, the first one first.

    It is an option of a kernel if each is from this module, none comes twice, and `softcap` comes before the others.
    """
    for one in score_mods:
        if not callable(one):
            raise TypeError(f"score_mods: got {described(one)}; needs functions of (score, batch, head, row, key)")

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        for one in score_mods:
            score = one(score, batch, head, row, key)
        return score

    parts = [known_options(one) for one in score_mods]
    names = [name for part in parts if part is not None for name in part]
    if None in parts or len(set(names)) < len(names) or "softcap" in names[1:]:
        return score_mod
    return known(score_mod, {name: value for part in parts if part for name, value in part.items()})


def _require_floating(name: str, tensor: Tensor) -> None:
    require_tensors(**{name: tensor})
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: got dtype {tensor.dtype}; needs a floating one")
