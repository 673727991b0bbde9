"""Attention shapes: their notation on the command line, and the named sets.

The notation is BxHxLxD. H, L and D may be pairs: query heads:KV heads, query length:key length, query width:value
width. 1x8x1024x64 is self-attention. 1x32:8x1:4096x128 is one decoding step of grouped-query attention.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from .parser import did_you_mean

_SHAPE = re.compile(r"(\d+)x(\d+)(?::(\d+))?x(\d+)(?::(\d+))?x(\d+)(?::(\d+))?")

SHAPE_FORM = (
    "BxHxLxD, for example 1x8x1024x64, 1x32:8x1:4096x128 (query:KV heads and lengths) or 1x8x512x64:96 "
    "(query:value width)"
)


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int

    @staticmethod
    def parse(text: str) -> Shape:
        """The shape that `text` describes; ValueError if it describes none. The parser adds the option's name."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"got {text!r}; needs {SHAPE_FORM}")
        b, h, hkv, lq, lk, d, dv = match.groups()
        shape = Shape(*(int(size) for size in (b, h, hkv or h, lq, lk or lq, d, dv or d)))
        if shape.scores * shape.kv_heads * shape.head_dim * shape.value_dim == 0:
            raise ValueError(f"got {text!r}; needs every size to be at least 1")
        if shape.heads % shape.kv_heads:
            raise ValueError(f"got {text!r}; needs query heads that are a multiple of the {shape.kv_heads} KV heads")
        return shape

    def __str__(self) -> str:
        pairs = (
            (self.batch, self.batch),
            (self.heads, self.kv_heads),
            (self.query_length, self.key_length),
            (self.head_dim, self.value_dim),
        )
        return "x".join(str(a) if a == b else f"{a}:{b}" for a, b in pairs)

    def with_(self, **changes: Any) -> Shape:
        return replace(self, **changes)

    @property
    def scores(self) -> int:
        """The number of elements of (B, H, Lq, Lk)."""
        return self.batch * self.heads * self.query_length * self.key_length

    @property
    def regime(self) -> str:
        """The limit of the speed.

        "decode": reading the keys; "few rows": that and packing them; "tiny": call overhead; "": arithmetic.
        """
        if self.query_length <= 16 and self.key_length > 128:
            return "decode"
        if self.query_length <= 128 and self.key_length >= 4 * self.query_length:
            return "few rows"
        return "tiny" if max(self.query_length, self.key_length) <= 128 else ""


@dataclass(frozen=True)
class Entry:
    """Shapes, and the features to time on each. None: every feature that applies to the shape."""

    shapes: tuple[str, ...]
    features: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ShapeSet:
    about: str
    entries: tuple[Entry, ...]


def _grid(lengths: tuple[int, ...], dims: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"1x8x{length}x{dim}" for dim in dims for length in lengths)


_PLAIN = ("plain",)
_WITHOUT_MODULE = (
    *("plain", "causal", "bool_mask", "documents", "padding", "float_mask", "mask_grad", "dropout", "causal_dropout"),
    *("weights", "gqa", "value_dim", "blhd", "window", "softcap", "alibi", "relative_bias", "key_indices"),
)
_CORE = (
    Entry(
        _grid((512, 1024, 2048, 4096), (64, 128)),
        ("plain", "causal", "bool_mask", "documents", "padding", "float_mask", "mask_grad", "dropout", "weights"),
    ),
    # Never both long and wide: torch's fp16 projections, which both sides run, would take minutes.
    Entry((*_grid((512, 1024, 2048, 4096), (64,)), *_grid((512, 1024), (128,))), ("mha_weights",)),
    # Sequences of different lengths: padding a single sequence would only make it shorter.
    Entry(tuple(f"4x8x{length}x{dim}" for dim in (64, 128) for length in (512, 1024, 2048)), ("padding",)),
)
_HEADS = (
    Entry(_grid((512, 1024, 2048), (64, 128)), ("plain", "gqa", "value_dim", "blhd")),
    Entry(tuple(f"1x32:1x{length}x{dim}" for dim in (64, 128) for length in (512, 1024, 2048)), ("gqa",)),
    Entry(_grid((512, 1024, 2048), (40, 80, 96, 192, 256)), _PLAIN),
)
_DECODE = (
    Entry(tuple(f"1x32x1:{length}x128" for length in (4096, 16384, 65536)), _PLAIN),
    Entry(tuple(f"1x32:8x1:{length}x128" for length in (4096, 16384, 65536)), ("gqa",)),
)
# Speculative decoding, chunked prefill, cross-attention, multi-query attention, multi-head latent attention (MLA).
_FEW_ROWS = (
    Entry(tuple(f"1x8x{rows}:{keys}x{dim}" for dim in (64, 128) for keys in (512, 4096) for rows in (1, 4, 8)), _PLAIN),
    Entry(tuple(f"1x8x{rows}:4096x{dim}" for dim in (64, 128) for rows in (9, 16, 32, 64, 128)), _PLAIN),
    Entry(tuple(f"1x32:8x{rows}:4096x128" for rows in (1, 2, 3, 4, 8, 16, 32)), ("gqa",)),
    Entry(("8x8x32:1024x64", "2x12x77:4096x64"), ("plain", "padding")),
    Entry(("1x16:1x1:4096x256", "1x64:8x1:4096x128", "1x128:1x1:4096x576:512"), ("gqa",)),
)
_CACHES = ("cache_int8", "cache_e5m2", "cache_e4m3")
_CACHE = (
    Entry(tuple(f"1x{heads}x1:{length}x128" for heads in ("32", "32:8") for length in (4096, 16384)), _CACHES),
    Entry(("1x32:8x1024x128",), _CACHES),
)
_TINY = (
    Entry(("1x1x5x64",), ("plain", "causal", "padding", "dropout")),
    Entry(tuple(f"64x8x{length}x64" for length in (16, 32, 64, 128)), ("plain", "causal", "padding", "dropout")),
)
_LONG = (Entry(("1x4x8192x64", "1x4x16384x64"), ("plain", "causal", "window", "padding")),)
_VARIANTS = (
    Entry(
        _grid((512, 1024, 2048), (64,)),
        ("window", "softcap", "alibi", "relative_bias", "score_mod", "block_mask", "key_indices"),
    ),
)

SETS: dict[str, ShapeSet] = {
    "quick": ShapeSet(
        "every feature at one small size, a decoding step and a 5 x 64 call",
        (
            Entry(("1x8x256x64",), _WITHOUT_MODULE),
            Entry(("1x4x256x32",), ("mha_weights",)),  # torch's fp16 projections take seconds at width 512
            Entry(("1x8x512x64",), ("plain", "causal")),
            Entry(("1x32x1:4096x128",), _PLAIN),
            Entry(("1x32:8x1:4096x128",), ("gqa", "cache_int8")),
            Entry(("1x8x32:1024x64",), _PLAIN),
            Entry(("1x1x5x64",), _PLAIN),
        ),
    ),
    "default": ShapeSet(
        "every feature at 512 and 1024 positions, D = 64, and decoding and tiny calls",
        (
            Entry(_grid((512, 1024), (64,))),
            Entry(_grid((512, 1024, 2048), (64, 128)), ("plain", "causal")),
            Entry(("1x32x1:4096x128",), _PLAIN),
            Entry(("1x32:8x1:4096x128",), ("gqa", *_CACHES)),
            Entry(("1x1x5x64", "64x8x64x64"), _PLAIN),
        ),
    ),
    "tiny": ShapeSet("5 positions, and batches of 64 with up to 128", _TINY),
    "decode": ShapeSet("1 query, 4096 to 65536 keys, 32:32 and 32:8 heads", _DECODE),
    "few_rows": ShapeSet("1 to 128 rows over 512 and 4096 keys, with and without shared KV heads", _FEW_ROWS),
    "cache": ShapeSet("quantised caches: 1 query over 4096 and 16384 keys, and 1024 positions", _CACHE),
    "long": ShapeSet("8192 and 16384 positions", _LONG),
    "core": ShapeSet("512 to 4096 positions, D = 64 and 128: masks, dropout, weights", _CORE),
    "heads": ShapeSet("head widths from 40 to 256, grouped heads, other strides", _HEADS),
    "bars": ShapeSet("core, heads, decode and tiny", _CORE + _HEADS + _DECODE + _TINY),
    "full": ShapeSet(
        "bars, long, and the rarer options", _CORE + _HEADS + _DECODE + _TINY + _LONG + _VARIANTS + _CACHE
    ),
}


def entries_of(text: str) -> tuple[Entry, ...]:
    """The entries of a comma-separated list of set names and shapes; ValueError for anything else."""
    entries: list[Entry] = []
    for name in text.split(","):
        name = name.strip()
        if name in SETS:
            entries += SETS[name].entries
        elif name[:1].isdigit():
            Shape.parse(name)
            entries.append(Entry((name,)))
        else:
            needs = f"needs a set ({', '.join(SETS)}) or a shape {SHAPE_FORM}"
            raise ValueError(f"got {name!r}; {needs}{did_you_mean(name, SETS)}")
    return tuple(entries)
