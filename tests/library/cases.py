"""The case library: attention problems by name, and their tensors.

The fields have the names of the op's schema, of Problem (csrc/core/problem.h) and of the benchmarks. case_list.py has
the list of cases; those in tests/data/cases.txt are the C++ tests' too. Hypothesis draws more cases from these fields.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layouts import place

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class Inputs:
    """The tensor arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_seed: Tensor | None = None
    relative_bias: Tensor | None = None
    blocks: Tensor | None = None
    block_bits: Tensor | None = None
    score_program: Tensor | None = None
    score_numbers: Tensor | None = None
    score_integers: Tensor | None = None
    key_indices: Tensor | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def mapped(self, change: Any) -> Inputs:
        """The same call with `change` applied to every tensor that is not None."""
        changed: dict[str, Any] = {k: None if t is None else change(t) for k, t in self.tensors().items()}
        return Inputs(**changed)

    def requiring_grad(self) -> Inputs:
        """Leaves that share the memory of these inputs. The floating ones that can have a gradient require it."""
        copy = self.mapped(lambda t: t.detach())
        for t in (copy.query, copy.key, copy.value, copy.attn_mask, copy.relative_bias):
            if t is not None and t.is_floating_point():
                t.requires_grad_()
        return copy

    def differentiable(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors().items() if t is not None and t.requires_grad}


@dataclass
class Cotangents:
    """The incoming gradients of the three results; None for a result without one."""

    output: Tensor | None
    lse: Tensor | None
    weights: Tensor | None


@dataclass(frozen=True)
class Case:
    name: str
    # Sizes. heads=None means no head dimension (2-D tensors). Broadcast cases set the sizes of single tensors.
    batch: tuple[int, ...] = (2,)
    heads: int | None = 2
    query_length: int = 37
    key_length: int = 53
    head_dim: int = 20
    value_dim: int | None = None
    kv_heads: int | None = None
    value_heads: int | None = None
    query_heads: int | None = None
    query_batch: tuple[int, ...] | None = None
    key_batch: tuple[int, ...] | None = None
    value_batch: tuple[int, ...] | None = None
    dtype: str = "float32"
    # Masks. The letters of mask_shape are dimensions: B all batch sizes, H heads, Q and K the lengths, 1 a size of 1.
    mask: str = "none"  # none | bool | float | inf (a float mask with some elements -inf)
    mask_shape: str = "BHQK"
    mask_dtype: str | None = None
    mask_layout: str = "misaligned"
    mask_offset: float = 0.0
    mask_columns: int | None = None  # only the last ones affect a score: the mask of a packed sequence
    empty_rows: bool = False  # every third row has no key to attend to
    masked_score: float = -math.inf
    causal: bool = False
    causal_alignment: str = "upper_left"
    window: tuple[int | None, int | None] | None = None
    alibi: str = "none"  # none | H | BH
    relative: str = "none"  # none, or the leading dimensions of relative_bias: 1 | H | B1 | BH
    relative_reach: int = 12  # distances from -reach to reach have an entry
    blocks: str = "none"  # of a block mask, the dimensions in front: BH, B1, 1H, 11 or H
    block_size: tuple[int, int] = (8, 10)
    # Scores, dropout, results.
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    enable_gqa: bool = False
    return_weights: bool = False
    grads: tuple[str, ...] = ("output", "lse", "weights")  # the results that have a cotangent, if they are returned
    # Values and memory.
    spread: float = 1.0  # of the queries; 6 saturates the softmax
    negative: bool = False  # lse is far below -88 in every row
    layout: str = "misaligned"
    key_layout: str | None = None
    value_layout: str | None = None
    grad_layout: str | None = None

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def _shape(self, batch: tuple[int, ...] | None, heads: int | None, length: int, dim: int) -> tuple[int, ...]:
        head = () if self.heads is None else (self.heads if heads is None else heads,)
        return (*(self.batch if batch is None else batch), *head, length, dim)

    @property
    def query_shape(self) -> tuple[int, ...]:
        return self._shape(self.query_batch, self.query_heads, self.query_length, self.head_dim)

    @property
    def key_shape(self) -> tuple[int, ...]:
        return self._shape(self.key_batch, self.kv_heads, self.key_length, self.head_dim)

    @property
    def value_shape(self) -> tuple[int, ...]:
        heads = self.kv_heads if self.value_heads is None else self.value_heads
        dim = self.head_dim if self.value_dim is None else self.value_dim
        return self._shape(self.value_batch, heads, self.key_length, dim)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self._shape(None, None, self.query_length, self.value_shape[-1])

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return self._shape(None, None, self.query_length, self.key_length)

    @property
    def attn_mask_shape(self) -> tuple[int, ...]:
        heads = () if self.heads is None else (self.heads,)
        sizes = {"B": self.batch, "H": heads, "Q": (self.query_length,), "K": (self.key_length,), "1": (1,)}
        return tuple(size for letter in self.mask_shape for size in sizes[letter])

    def _generator(self, seed: int, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.name}/{purpose}".encode()) + seed)

    def make(self, seed: int = 0) -> Inputs:
        """The inputs in poisoned buffers, with the layouts of the case. The name and the seed determine the values."""
        g = self._generator(seed, "inputs")

        def normal(shape: tuple[int, ...], layout: str | None, spread: float = 1.0, centre: float = 0.0) -> Tensor:
            values = torch.randn(shape, generator=g, dtype=torch.float64) * spread + centre
            return place(values.to(self.torch_dtype), layout or self.layout)

        # If negative, dot(query, key) * scale is about -200 for any head_dim.
        centre = math.sqrt(200 / math.sqrt(max(self.head_dim, 1))) if self.negative else 0.0
        query = normal(self.query_shape, self.layout, self.spread, centre)
        key = normal(self.key_shape, self.key_layout, centre=-centre)
        value = normal(self.value_shape, self.value_layout)
        return Inputs(
            query, key, value, self._mask(g), self._alibi(g), self.seed_tensor(seed), self._relative(g),
            *self._blocks(seed),
        )  # fmt: skip

    def _mask(self, g: torch.Generator) -> Tensor | None:
        if self.mask == "none":
            return None
        shape = self.attn_mask_shape
        attends = torch.rand(shape, generator=g) < 0.7
        before = 0 if self.mask_columns is None else max(self.key_length - self.mask_columns, 0)
        if self.empty_rows:
            attends.select(-2, 0).fill_(False) if shape[-2] == 1 else attends[..., ::3, :].fill_(False)
        attends[..., :before] = True
        if self.mask == "bool":
            return place(attends, self.mask_layout)
        values = torch.randn(shape, generator=g, dtype=torch.float64) + self.mask_offset
        if self.mask == "inf":
            values = torch.where(attends, values, -math.inf)
        values[..., :before] = 0
        return place(values.to(DTYPES[self.mask_dtype or self.dtype]), self.mask_layout)

    def _alibi(self, g: torch.Generator) -> Tensor | None:
        if self.alibi == "none":
            return None
        heads = 1 if self.heads is None else self.heads
        shape = (heads,) if self.alibi == "H" else (*self.batch, heads)
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        slopes = torch.rand(shape, generator=g, dtype=torch.float64) * 0.2 + 0.01
        return place(slopes.to(dtype), "padded")

    @property
    def relative_shape(self) -> tuple[int, ...]:
        heads = 1 if self.heads is None else self.heads
        sizes = {"B": self.batch, "H": (heads,), "1": (1,)}
        return (*(size for letter in self.relative for size in sizes[letter]), 2 * self.relative_reach + 1)

    def _relative(self, g: torch.Generator) -> Tensor | None:
        if self.relative == "none":
            return None
        values = torch.randn(self.relative_shape, generator=g, dtype=torch.float64)
        return place(values.to(self.torch_dtype), "misaligned")

    @property
    def block_shape(self) -> list[int] | None:
        """The ops' argument of this name."""
        return None if self.blocks == "none" else [*self.block_size, self.query_length, self.key_length]

    def _blocks(self, seed: int) -> tuple[Tensor | None, Tensor | None]:
        """A third of the blocks is empty, a third full, a third partial. Bits past the last row or key are random."""
        if self.blocks == "none":
            return None, None
        g = self._generator(seed, "blocks")
        sizes = {"B": self.batch, "H": () if self.heads is None else (self.heads,), "1": (1,)}
        lead = [size for letter in self.blocks for size in sizes[letter]]
        rows, keys = self.block_size
        shape = (*lead, -(-self.query_length // rows), -(-self.key_length // keys))
        kinds = torch.randint(-2, 1, shape, generator=g)
        partial = kinds == 0
        numbers = partial.flatten().cumsum(0).view(shape) - 1
        words = (int(partial.sum()), rows, -(-keys // 64))
        bits = [torch.randint(-(2**63), 2**63 - 1, words, generator=g) for _ in range(2)]
        return torch.where(partial, numbers, kinds).int(), bits[0] | bits[1]

    def shown_by_blocks(self, inputs: Inputs) -> Tensor | None:
        """(..., Lq, Lk) bool, True = may attend: the block mask, looked up element by element."""
        if inputs.blocks is None or inputs.block_bits is None:
            return None
        row, key = torch.arange(self.query_length)[:, None], torch.arange(self.key_length)[None, :]
        rows, keys = self.block_size
        number = inputs.blocks.long()[..., row // rows, key // keys]
        within = key % keys
        bits = torch.cat([inputs.block_bits, torch.zeros(1, rows, -(-keys // 64), dtype=torch.int64)])
        bit = bits[number.clamp(min=0), row % rows, within // 64] >> within % 64 & 1
        shown = torch.where(number < 0, number == -1, bit == 1)
        return shown.reshape(shown.shape[max(shown.dim() - len(self.weights_shape), 0) :])

    def seed_tensor(self, seed: int) -> Tensor | None:
        if self.dropout_p == 0.0:
            return None
        spread = zlib.crc32(self.name.encode()) * 0x9E3779B97F4A7C15 % 2**64 - 2**63  # all 64 bits, sign included
        return torch.tensor([spread ^ seed, 11 + seed], dtype=torch.int64)

    def cotangents(self, seed: int = 0) -> Cotangents:
        g = self._generator(seed, "cotangents")

        def normal(shape: tuple[int, ...], dtype: torch.dtype, wanted: bool) -> Tensor | None:
            if not wanted:
                return None
            return place(
                torch.randn(shape, generator=g, dtype=torch.float64).to(dtype), self.grad_layout or self.layout
            )

        lse_dtype = torch.float64 if self.dtype == "float64" else torch.float32
        return Cotangents(
            normal(self.output_shape, self.torch_dtype, "output" in self.grads),
            normal(self.output_shape[:-1], lse_dtype, "lse" in self.grads),
            normal(self.weights_shape, self.torch_dtype, "weights" in self.grads and self.return_weights),
        )

    def position_options(self) -> dict[str, Any]:
        """The options that sdpa_mask shares."""
        left, right = self.window or (None, None)
        return {
            "is_causal": self.causal,
            "causal_alignment": self.causal_alignment,
            "window_left": left,
            "window_right": right,
        }

    def options(self) -> dict[str, Any]:
        """The non-tensor arguments that torch.ops.scaledot.sdpa and sdpa_backward share, except `part`."""
        return {
            "dropout_p": self.dropout_p,
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
            "softcap": self.softcap,
            "masked_score": None if self.masked_score == -math.inf else self.masked_score,
            "block_shape": self.block_shape,
            **self.position_options(),
        }

    def functional_arguments(self) -> dict[str, Any]:
        """The arguments of scaledot.scaled_dot_product_attention without tensors."""
        return {
            "dropout_p": self.dropout_p,
            "is_causal": self.causal,
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
            "causal_alignment": self.causal_alignment,
            "window": self.window,
            "softcap": self.softcap,
            "masked_score": self.masked_score,
            "return_weights": self.return_weights,
        }
