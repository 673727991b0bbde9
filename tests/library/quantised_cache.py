"""Calls of varlen_attention with keys and values of 8 bits."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import reference
import scaledot
from tolerances import check, error
from varlen_cases import cumulative, dense_mask

CACHES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTHS = {"decode": ((1, 2, 1, 0), (300, 16, 1057, 9)), "prefill": ((40, 9, 70, 0), (300, 16, 70, 20))}
SCALES = ("none", "one", "heads", "sequences")
attend: Any = scaledot.varlen_attention


@dataclass
class Cache:
    """A call: its tensors, and what the sequences are."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    query: Tensor
    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        device = self.query.device
        arguments = dict(
            query=self.query, key=self.key, value=self.value, cu_seq_q=cumulative(self.rows).to(device),
            cu_seq_k=cumulative(self.keys).to(device), max_q=max(self.rows), max_k=max(self.keys), k_scale=self.k_scale,
            v_scale=self.v_scale, enable_gqa=True, return_lse=True,
        )  # fmt: skip
        result: tuple[Tensor, Tensor] = attend(**arguments | changes)
        return result

    def cuda(self) -> Cache:
        """The same on a GPU, with the same strides."""
        moved = {n: None if t is None else t.cuda() for n, t in vars(self).items() if n not in ("rows", "keys")}
        return Cache(self.rows, self.keys, **moved)  # type: ignore[arg-type]

    def scale_of(self, name: str, b: int) -> Tensor | None:
        scale: Tensor | None = getattr(self, name)
        return scale if scale is None or scale.dim() < 2 else scale[b]

    def oracle(self, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, Tensor]:
        """Attention over the dequantised cache, in this dtype, one sequence after the other."""
        outputs, lses = [], []
        options = {"causal_alignment": "lower_right"} | options
        each = zip(
            *(
                t.split(n)
                for t, n in zip((self.query, self.key, self.value), (self.rows, self.keys, self.keys), strict=True)
            ),
            strict=True,
        )
        for b, tensors in enumerate(each):
            query, key, value = (t.transpose(0, 1) for t in tensors)
            key = reference.dequantised(key, self.scale_of("k_scale", b)).to(dtype)
            value = reference.dequantised(value, self.scale_of("v_scale", b)).to(dtype)
            own = {n: o[b] if n == "alibi_slopes" and o.dim() == 2 else o for n, o in options.items()}
            if "attn_mask" in own:
                first = sum(self.rows[:b])
                own["attn_mask"] = dense_mask(own["attn_mask"], slice(first, first + self.rows[b]), self.keys[b])
            output, lse, _ = reference.attention(query.to(dtype), key, value, enable_gqa=True, dtype=dtype, **own)
            outputs.append(output.transpose(0, 1))
            lses.append(lse)
        return torch.cat(outputs), torch.cat(lses, 1)


def stored(shape: tuple[int, ...], cache: torch.dtype, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(shape, generator=generator) * (40 if cache == torch.int8 else 3)
    if cache == torch.int8:
        numbers = numbers.round().clamp(-128, 127)
    return numbers.to(cache)


def make(
    name: str,
    cache: str,
    dtype: str = "float32",
    scales: str = "sequences",
    heads: int = 4,
    dims: tuple[int, int] = (40, 24),
) -> Cache:
    generator = torch.Generator().manual_seed(len(name) + len(cache) + len(dtype))
    rows, keys = LENGTHS[name]
    query = torch.randn(sum(rows), heads, dims[0], generator=generator).to(DTYPES[dtype])
    key, value = (stored((sum(keys), 2, dim), CACHES[cache], generator) for dim in dims)
    shapes: dict[str, tuple[int, ...]] = {"one": (), "heads": (2,), "sequences": (len(keys), 2)}
    drawn = [None, None]
    if scales != "none":
        drawn = [torch.rand(shapes[scales], generator=generator) * s for s in (0.05, -0.4)]
    return Cache(rows, keys, query, key, value, *drawn)


def check_rule(made: Cache, found: tuple[Tensor, Tensor] | None = None, **options: Any) -> None:
    """The numerics rule, with the dequantised cache as the eager call's keys and values. `found`: other results than
    those of this call.
    """
    found, wanted = found or made.run(**options), made.oracle(**options)
    names = {
        "is_causal", "window", "softcap", "alibi_slopes", "relative_bias", "scale", "causal_alignment", "attn_mask",
    }  # fmt: skip
    eager = made.oracle(made.query.dtype, **{n: o for n, o in options.items() if n in names})
    for name, ours, oracle, simple in zip(("output", "lse"), found, wanted, eager, strict=True):
        allowed = error(simple, oracle)
        if ours.dtype == torch.float32:  # and what one rounding of a score may do
            allowed += torch.finfo(torch.float32).eps * float(oracle[oracle.isfinite()].abs().max())
        check(name, ours, oracle, allowed)


def paged(made: Cache, size: int, table_of: torch.dtype = torch.int32) -> dict[str, Any]:
    """The keys and values in a pool of shuffled pages. Unused rows have all bits set."""
    counts = [-(-n // size) for n in made.keys]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(size))
    table = torch.zeros(len(counts), max(counts), dtype=table_of)
    pools = {}
    for name in ("key", "value"):
        tensor: Tensor = getattr(made, name)
        pool = torch.full((len(order), size, *tensor.shape[1:]), 255, dtype=torch.uint8).view(tensor.dtype)
        first = 0
        for b, rows in enumerate(tensor.split(made.keys)):
            for k, page in enumerate(rows.split(size)):
                pool[order[first + k], : len(page)] = page
                table[b, k] = order[first + k]
            first += counts[b]
        pools[name] = pool
    return dict(**pools, cu_seq_k=None, seqused_k=torch.tensor(made.keys), block_table=table)
