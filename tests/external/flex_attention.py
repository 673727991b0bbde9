"""The score functions of FlexAttention's users, forward and backward, by the numerics rule.

They are written anew from their formulas: those of the attention-gym repository (attn_gym/mods, and attn_gym/masks as
score functions), and those of torch's own tests (test/inductor/test_flex_attention.py). The oracle computes all scores
in float64, and autograd its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import reference
from agreement import check_agreement
from attention_gym import LENGTH, MASKS
from external.tally import Tally
from scaledot import scaled_dot_product_attention
from score_functions import captured, with_captured

SUITE = "FlexAttention: score functions"
BATCH, HEADS, WIDTH = 2, 4, 16
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]
Makers = dict[str, Callable[[Callable[..., Tensor]], ScoreMod]]  # from a source of random numbers, by shape


def hidden_by(mask: Callable[..., Tensor], score_mod: ScoreMod) -> ScoreMod:
    return lambda s, b, h, i, j: torch.where(mask(b, h, i, j), score_mod(s, b, h, i, j), -math.inf)


# ------------------------------------------------------------------------------------------------ attention-gym
def latent(numbers: Callable[..., Tensor]) -> ScoreMod:
    """Latent attention: the rotated columns of query and key, whose product is written out."""
    rows, keys = numbers(BATCH, HEADS, LENGTH, 3), numbers(BATCH, LENGTH, 3)
    return lambda s, b, h, i, j: s + sum(rows[b, h, i, d] * keys[b, j, d] for d in range(3)) / math.sqrt(WIDTH)


def relative(numbers: Callable[..., Tensor]) -> ScoreMod:
    table = numbers(HEADS, 2 * LENGTH - 1)
    return lambda s, b, h, i, j: s + table[h, j - i + LENGTH - 1]


def relative_2d(numbers: Callable[..., Tensor]) -> ScoreMod:
    """A table of distances on a canvas of 8 x 8, as Swin has it."""
    table = numbers(HEADS, 15, 15)
    return lambda s, b, h, i, j: s + table[h, i // 8 - j // 8 + 7, i % 8 - j % 8 + 7]


def buckets(numbers: Callable[..., Tensor]) -> ScoreMod:
    """T5's buckets: exact distances, then ones that grow with their logarithm."""
    table = numbers(8, HEADS)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        far = (i - j).clamp(min=0)
        grown = 4 + (torch.log((far + 1) / 5.0) / math.log(16 / 5) * 4).to(torch.int64)
        return s + table[torch.where(far < 4, far, grown.clamp(0, 7)), h]

    return score_mod


def gated(numbers: Callable[..., Tensor]) -> ScoreMod:
    gate, forget = numbers(HEADS), numbers(BATCH, HEADS, LENGTH)
    return lambda s, b, h, i, j: s * torch.sigmoid(gate[h]) + forget[b, h, i] - forget[b, h, j]


def documents(numbers: Callable[..., Tensor]) -> ScoreMod:
    """A document mask and a bias of each document."""
    ids, bias = torch.arange(LENGTH) // 23, numbers(HEADS, 3)
    return lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s + bias[h, ids[i]] * (i - j), -math.inf)


GYM: Makers = {
    "ALiBi": lambda numbers: lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (j - i),
    "softcap": lambda numbers: lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
    "activation": lambda numbers: lambda s, b, h, i, j: torch.nn.functional.silu(s),
    "latent attention": latent,
    "relative table": relative,
    "relative table on a canvas": relative_2d,
    "buckets": buckets,
    "gates": gated,
    "document mask and bias": documents,
    **{f"mask: {name}": lambda numbers, mask=mask: hidden_by(mask, relative(numbers)) for name, mask in MASKS.items()},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ torch's tests
def of_parts(numbers: Callable[..., Tensor]) -> ScoreMod:
    """Captured tensors in a list and a dict, and views of one."""
    whole = numbers(2, HEADS, LENGTH)
    parts = {"rows": [whole[0]], "keys": whole[1]}
    return lambda s, b, h, i, j: s + parts["rows"][0][h, i] * parts["keys"][h, j]


def two_functions(numbers: Callable[..., Tensor]) -> ScoreMod:
    first, second = relative(numbers), gated(numbers)
    return lambda s, b, h, i, j: second(first(s, b, h, i, j), b, h, i, j)


def remapped(numbers: Callable[..., Tensor]) -> ScoreMod:
    """Positions in one long sequence, which is made of several."""
    begins, ids, table = torch.tensor([0, 20, 41]), (torch.arange(LENGTH) >= 20).long(), numbers(LENGTH)
    return lambda s, b, h, i, j: s + table[i - begins[ids[i]]] * torch.where(ids[j] == ids[i], 1.0, 0.0)


def with_tensor(shape: tuple[int, ...], term: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], ScoreMod]:
    def made(numbers: Callable[..., Tensor]) -> ScoreMod:
        t = numbers(*shape)
        return lambda s, b, h, i, j: term(t, s, b, h, i, j)

    return made


OWN: Makers = {
    "identity": lambda numbers: lambda s, b, h, i, j: s,
    "causal": lambda numbers: lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf),
    "inverse causal": lambda numbers: lambda s, b, h, i, j: torch.where(i <= j, s, -math.inf),
    "relative": lambda numbers: lambda s, b, h, i, j: s + (i - j),
    "relative, causal": lambda numbers: lambda s, b, h, i, j: torch.where(i >= j, s + (i - j), -math.inf),
    "ALiBi, causal": lambda numbers: lambda s, b, h, i, j: torch.where(i >= j, s + (j - i) * (h + 1) / 8, -math.inf),
    "times two": lambda numbers: lambda s, b, h, i, j: s * 2,
    "square": lambda numbers: lambda s, b, h, i, j: s * s,
    "trigonometry": lambda numbers: lambda s, b, h, i, j: torch.sin(torch.cos(s)) + torch.tan(h / 9),
    "trigonometry of several terms": lambda numbers: lambda s, b, h, i, j: torch.sin(s * 8) * torch.cos(s) + j / 64,
    "clamp": lambda numbers: lambda s, b, h, i, j: s.clamp(-0.5, 0.75),
    "an offset of heads": with_tensor((HEADS,), lambda t, s, b, h, i, j: s * t[h]),
    "of the batch entry": with_tensor((BATCH,), lambda t, s, b, h, i, j: s + t[b] * j),
    "a bias of rows": with_tensor((LENGTH,), lambda t, s, b, h, i, j: s + t[i] * (j % 5)),
    "a bias of keys": with_tensor((LENGTH,), lambda t, s, b, h, i, j: s + t[j]),
    "a bias of all": with_tensor((LENGTH, LENGTH), lambda t, s, b, h, i, j: s + t[i, j]),
    "a bias of all, of each head": with_tensor((HEADS, LENGTH, LENGTH), lambda t, s, b, h, i, j: s + t[h, i, j]),
    "a transposed bias": with_tensor((LENGTH, LENGTH), lambda t, s, b, h, i, j: s + t.mT[i, j]),
    "an index that repeats": with_tensor((LENGTH,), lambda t, s, b, h, i, j: s + t[j // 7] * t[i % 3]),
    "a sum": with_tensor((HEADS, 5), lambda t, s, b, h, i, j: s + t.sum(1)[h] * j / 8),
    "a number": with_tensor((), lambda t, s, b, h, i, j: s * t),
    "softplus": with_tensor((HEADS,), lambda t, s, b, h, i, j: torch.nn.functional.softplus(s * t[h])),
    "a power": with_tensor((HEADS,), lambda t, s, b, h, i, j: s + (1 + (i - j).abs()) ** -t[h].abs()),
    "rows and keys": with_tensor((LENGTH,), lambda t, s, b, h, i, j: s + torch.maximum(t[i], t[j])),
    "a list and a dict": of_parts,
    "two functions": two_functions,
    "remapped positions": remapped,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ checks
def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return reference.attention(query, key, value, dtype=query.dtype, pairwise=False, **options)[0]


def compare(make: Callable[[Callable[..., Tensor]], ScoreMod], dtype: torch.dtype, **options: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    heads = (HEADS, 2, 2) if options.get("enable_gqa") else (HEADS,) * 3
    names = ("query", "key", "value")
    leaves = {name: numbers(BATCH, h, LENGTH, WIDTH) for name, h in zip(names, heads, strict=True)}
    given = {"score_mod": make(numbers), **options}
    leaves |= captured(given["score_mod"], dtype)

    def ours(**x: Tensor) -> Tensor:
        return scaled_dot_product_attention(**with_captured(given, x))

    def theirs(**x: Tensor) -> Tensor:
        return attention(**with_captured(given, x))

    check_agreement(ours, theirs, leaves, dtype)


def checked(makers: Makers, options: list[dict[str, Any]]) -> Callable[[Tally], None]:
    def check(tally: Tally) -> None:
        for name, make in makers.items():
            for dtype in DTYPES:
                for more in options:
                    with tally.case(f"{name} {dtype} {' '.join(more)}"):
                        compare(make, dtype, **more)

    return check


OPTIONS: list[dict[str, Any]] = [{}, {"is_causal": True, "enable_gqa": True}]
CHECKS = {"of attention-gym": checked(GYM, OPTIONS), "of torch's tests": checked(OWN, OPTIONS)}
