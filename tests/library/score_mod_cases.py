"""Score functions and what they capture, and the formula on all scores in float64 with its autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import scaledot

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 4, "rows": 37, "keys": 53, "head_dim": 16}
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def every_score(score_mod: Callable[..., Tensor], scores: Tensor) -> Tensor:
    """score_mod of all scores, (B, H, Lq, Lk)."""
    places = [torch.arange(size) for size in scores.shape]
    f = score_mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        f = torch.vmap(f, in_dims=dims)
    return f(scores, *places)


def formula(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], attends: Tensor | None = None
) -> Tensor:
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = every_score(score_mod, query @ key.mT / math.sqrt(query.size(-1)))
    if attends is not None:
        scores = scores.masked_fill(~attends, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ value


ODD = torch.tensor([math.nan, 0.25, -math.inf])


class Captured:
    """Tensors that score functions capture, in float64 for the formula or in float32."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch, heads, rows, keys = (SHAPE[name] for name in ("batch", "heads", "rows", "keys"))

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.slopes = numbers(heads)
        self.gate = numbers()
        self.by_row, self.by_key = numbers(rows), numbers(keys)
        self.relative = numbers(heads, 2 * 8 + 1)
        self.full = numbers(batch, heads, rows, keys)
        self.document = torch.randint(0, 3, (keys,), generator=generator)
        self.wide = numbers(heads, 120)
        self.by_distance = numbers(2 * 8 + 1)
        self.steep, self.steeps = numbers(heads).detach(), numbers(batch, heads).detach()

    def floating(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if tensor.requires_grad]


def dilated(c: Captured) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: torch.where((q - k) % 3 == 0, s, -math.inf)


def relative(c: Captured) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s + c.relative[h, (k - q).clamp(-8, 8) + 8]


def document(c: Captured) -> Callable[..., Tensor]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(c.document[q] == c.document[k], s + c.slopes[h] * (k - q).abs(), -math.inf)

    return score_mod


def gated(c: Captured) -> Callable[..., Tensor]:
    return lambda s, b, h, q, k: s * torch.sigmoid(c.gate) + torch.sigmoid(c.by_row[q]) * c.by_key[k]


def mixed(c: Captured) -> Callable[..., Tensor]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        far = torch.log1p((q - k).abs().float() + c.gate.exp())
        wave = torch.sin(c.by_row[q] * 0.5) * torch.cos(c.by_key[-1 - k])
        s = s - c.slopes[h].abs() * far + wave + torch.erf(s) - torch.sqrt(s * s + 1)
        return torch.where((b == 1) & (k // 4 > q // 4), s.clamp(-1.0, 1.0), s + torch.exp(-far))

    return score_mod


def by_distance(c: Captured) -> Callable[..., Tensor]:
    """Conditions, numbers and a table that depend on the distance alone."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = s * torch.exp((q - k).abs().to(s.dtype) * -0.05) + c.by_distance[(k - q + 3).clamp(-8, 8) + 8] * c.slopes[h]
        s = torch.where(q + 2 >= k, s, s - 0.3)
        return torch.where((q == k) | ((q - k) // 3 % 2 == 0), s, s * 0.5)

    return score_mod


FUNCTIONS: dict[str, Callable[[Captured], Callable[..., Tensor]]] = {
    "identity": lambda c: lambda s, b, h, q, k: s,
    "alibi": lambda c: lambda s, b, h, q, k: s + c.slopes[h] * (k - q),
    "softcap": lambda c: lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "relative": relative,
    "document": document,
    "dilated": dilated,
    "by distance": by_distance,
    "a distance alone": lambda c: lambda s, b, h, q, k: (q - k).to(s.dtype) * 0.05,
    "gated": gated,
    "full table": lambda c: lambda s, b, h, q, k: s + c.full[b, h, q, k],
    "a table of one head, then its rows": lambda c: lambda s, b, h, q, k: s + c.full[b][h][q, k] * c.full[0, 1, q][k],
    "powers": lambda c: lambda s, b, h, q, k: s + (c.by_key[k].abs() + 0.5) ** c.slopes[h] + s**2 / (1 + s**4).sqrt(),
    "minimum": lambda c: lambda s, b, h, q, k: torch.minimum(s, c.by_row[q]) + torch.maximum(c.by_key[k], c.slopes[h]),
    "remainder": lambda c: lambda s, b, h, q, k: s + torch.remainder(c.by_key[k], 0.7) + torch.fmod(c.by_row[q], 0.3),
    "masked fill": lambda c: lambda s, b, h, q, k: s.masked_fill(k % 5 == 1, 0.5).masked_fill(k > q + 20, -math.inf),
    "nan_to_num": lambda c: lambda s, b, h, q, k: torch.nan_to_num(torch.where(k % 7 > 2, s, ODD[k % 3]), 0.1),
    "a key's own number": lambda c: lambda s, b, h, q, k: c.by_key[k],
    "computed": lambda c: lambda s, b, h, q, k: s + (c.slopes * 2).tanh()[h] * c.full.sum(0)[h, q, k],
    "mixed": mixed,
}  # fmt: skip


def inputs(dtype: torch.dtype, **sizes: int) -> list[Tensor]:
    s = {**SHAPE, **sizes}
    generator = torch.Generator().manual_seed(1)
    shapes = [(s["heads"], s["rows"]), (s["kv_heads"], s["keys"]), (s["kv_heads"], s["keys"])]
    return [
        torch.randn(s["batch"], heads, length, s["head_dim"], generator=generator).to(dtype).requires_grad_()
        for heads, length in shapes
    ]


def compared(
    name: str, dtype: torch.dtype, attends: Tensor | None = None, sizes: dict[str, int] | None = None, **options: Any
) -> None:
    tensors = inputs(dtype, **(sizes or {}))
    ours = Captured(torch.float64 if dtype == torch.float64 else torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    theirs = Captured(torch.float64)
    with torch.no_grad():
        for a, b in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            b.copy_(a)
    output = scaledot.scaled_dot_product_attention(*tensors, score_mod=FUNCTIONS[name](ours), **options)
    wanted = formula(*exact, FUNCTIONS[name](theirs), attends)
    assert output.dtype == dtype
    assert (output - wanted).abs().max() < LIMITS[dtype]
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad(output, tensors + ours.floating(), grad.to(dtype), allow_unused=True)
    right = torch.autograd.grad(wanted, exact + theirs.floating(), grad.to(dtype).double(), allow_unused=True)
    names = ["query", "key", "value", *(n for n, t in vars(ours).items() if t.requires_grad)]
    for tensor, got, want in zip(names, found, right, strict=True):
        if want is None or not want.any():
            assert got is None or got.abs().max() < LIMITS[dtype], tensor
            continue
        scale = max(1.0, float(want.abs().max()))
        assert got is not None, tensor
        assert (got - want).abs().max() < 8 * LIMITS[dtype] * scale, (tensor, float((got - want).abs().max()), scale)


def places() -> tuple[Tensor, Tensor]:
    return torch.arange(SHAPE["rows"])[:, None], torch.arange(SHAPE["keys"])
