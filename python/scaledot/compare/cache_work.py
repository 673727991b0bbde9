"""A case that reads a quantised cache: varlen_attention in place, against dequantising the cache for F.sdpa."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import scaledot

from .eager import eager_attention
from .features import Case
from .sample import Sample
from .work import Call, Tensors, generator_of

_LARGEST = {torch.int8: 127.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fn: 448.0}


class CacheWork:
    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self._random = generator_of(case)
        shape, cache = case.shape, case.feature.cache
        assert cache is not None
        self.inputs: Tensors = {}  # a quantised cache has no gradient
        self.query = self._normal(shape.query_length, shape.heads, shape.head_dim).to(case.dtype)
        self.stored: Tensors = {}  # (B, Lk, Hkv, D)
        self.scales: Tensors = {}  # (Hkv,)
        for name, width in (("key", shape.head_dim), ("value", shape.value_dim)):
            numbers = self._normal(shape.key_length, shape.kv_heads, width)
            self.scales[name] = numbers.abs().amax((0, 1, 3)) / _LARGEST[cache]
            numbers = numbers / self.scales[name][:, None]
            self.stored[name] = (numbers.round() if cache == torch.int8 else numbers).to(cache)
        self.sample = Sample.of(shape)
        self.peer_label = "dequantising + F.sdpa"
        self.trains = False

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(self.case.shape.batch, *sizes, generator=self._random).to(self.device)

    def _arguments(self) -> dict[str, Any]:
        """Arguments of varlen_attention and explain_varlen. The sequences follow each other without padding."""
        shape = self.case.shape
        sequences = torch.arange(shape.batch + 1, dtype=torch.int32, device=self.device)
        return {
            "query": self.query.flatten(0, 1),
            "key": self.stored["key"].flatten(0, 1),
            "value": self.stored["value"].flatten(0, 1),
            "cu_seq_q": sequences * shape.query_length,
            "cu_seq_k": sequences * shape.key_length,
            "max_q": shape.query_length,
            "max_k": shape.key_length,
            "enable_gqa": True,
            "k_scale": self.scales["key"],
            "v_scale": self.scales["value"],
        }

    def ours(self, leaves: Tensors) -> Call:
        shape, arguments = self.case.shape, self._arguments()

        def call() -> Tensor:
            output: Tensor = scaledot.varlen_attention(**arguments)
            return output.unflatten(0, (shape.batch, shape.query_length)).transpose(1, 2)

        return call

    def peer(self, leaves: Tensors) -> Call:
        query, grouped = self.query.transpose(1, 2), self.case.shape.kv_heads != self.case.shape.heads

        def call() -> Tensor:
            key, value = (
                (self.stored[n].to(query.dtype) * self.scales[n].to(query.dtype)[:, None]).transpose(1, 2)
                for n in ("key", "value")
            )
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)

        return call

    def checked_calls(self, leaves: Tensors) -> tuple[Call, Call]:
        return self.ours(leaves), self.peer(leaves)

    def peer_bytes(self) -> int:
        shape = self.case.shape  # keys and values in the query's dtype, before and after the scale
        numbers = shape.batch * shape.kv_heads * shape.key_length * (shape.head_dim + shape.value_dim)
        return 2 * numbers * self.query.element_size()

    def kernels(self) -> dict[str, str]:
        plan = scaledot.explain_varlen(**self._arguments())
        return {"forward": plan.forward.kernels[0].kernel}

    def cotangent(self) -> Tensor:
        raise AssertionError("a quantised cache has no gradient")

    def take(self, name: str, tensor: Tensor) -> Tensor:
        return self.sample.queries(tensor)

    def solve(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        query = self.sample.queries(self.query.transpose(1, 2)).to(dtype)
        key, value = (
            self.sample.keys((self.stored[n].double() * self.scales[n].double()[:, None]).transpose(1, 2)).to(dtype)
            for n in ("key", "value")
        )
        return {"output": eager_attention(query, key, value, return_weights=True)[0]}, {}
