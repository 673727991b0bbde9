"""The part of a large case that is checked. The float64 oracle holds every matrix in memory, so it needs a small case.

A sample is a few (batch, KV head) pairs, with all query heads of each KV head, and some rows of the query. For the
gradients, the gradient of the output is 0 outside the sample, so nothing outside the sample contributes.

Shapes below: P sampled pairs, G query heads per KV head, R sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Shape

_BUDGET = 1 << 22  # elements of the sample's scores, and of its keys: 32 MiB in float64


@dataclass(frozen=True)
class Sample:
    shape: Shape
    batch: Tensor  # (P,)
    kv_head: Tensor  # (P,)
    rows: Tensor  # (R,)

    @staticmethod
    def of(shape: Shape, budget: int = _BUDGET) -> Sample:
        pairs = shape.batch * shape.kv_heads
        pair_scores = shape.scores // pairs
        pair_keys = shape.key_length * max(shape.head_dim, shape.value_dim)
        chosen = min(max(budget // max(pair_scores, pair_keys), min(2, pairs)), pairs)
        row_scores = chosen * pair_scores // shape.query_length
        count = min(max(budget // row_scores, 1), shape.query_length)
        pair = _spread(pairs, chosen)
        rows = _spread(shape.query_length, count)
        return Sample(shape, pair // shape.kv_heads, pair % shape.kv_heads, rows)

    @property
    def share(self) -> float:
        """The fraction of the output's rows that is sampled."""
        chosen = len(self.batch) / (self.shape.batch * self.shape.kv_heads)
        return chosen * len(self.rows) / self.shape.query_length

    def queries(self, tensor: Tensor) -> Tensor:
        """(B, H, Lq, X) -> (P, G, R, X)."""
        return self.pick_rows(self.pick_heads(tensor))

    def pick_heads(self, tensor: Tensor) -> Tensor:
        """(B or 1, H or 1, L, X) -> (P, G, L, X)."""
        s = self.shape
        full = tensor.expand(s.batch, s.heads, *tensor.shape[-2:])
        return full.unflatten(1, (s.kv_heads, -1))[self.batch, self.kv_head]

    def pick_rows(self, tensor: Tensor) -> Tensor:
        """(..., Lq, X) -> (..., R, X). A mask for all rows, (..., 1, X), is returned unchanged."""
        if len(self.rows) == self.shape.query_length or tensor.size(-2) == 1:
            return tensor
        return tensor[..., self.rows, :]

    def keys(self, tensor: Tensor) -> Tensor:
        """(B, Hkv, Lk, X) -> (P, 1, Lk, X)."""
        return tensor[self.batch, self.kv_head].unsqueeze(1)

    def inside(self, output: Tensor) -> Tensor:
        """`output` (B, H, Lq, Dv) with zeros outside the sample."""
        s = self.shape
        wanted = torch.zeros(s.batch, s.kv_heads, 1, s.query_length, 1, dtype=torch.bool)
        wanted[self.batch[:, None], self.kv_head[:, None], 0, self.rows] = True
        group = s.heads // s.kv_heads
        spread = wanted.expand(-1, -1, group, -1, -1).flatten(1, 2)
        return torch.where(spread.to(output.device), output, 0.0)


def _spread(size: int, count: int) -> Tensor:
    """`count` evenly spaced integers in [0, size), including the first and the last if count is at least 2."""
    if count == 1:
        return torch.tensor([size - 1])
    return torch.linspace(0, size - 1, count, dtype=torch.float64).round().long()
