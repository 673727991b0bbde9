"""A case with a score function: against flex_attention, and for gradients, which it lacks on a CPU, the formula."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .eager import eager_attention
from .features import Case
from .sample import Sample
from .work import AttentionWork, Call, Tensors, leaves_of


def _score_mod(leaves: Tensors) -> Callable[..., Tensor]:
    """A gate and a slope of the distance, both learned, one a head."""
    gate, slope = leaves["gate"], leaves["slope"]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * torch.sigmoid(gate[h]) - slope[h] * (q_idx - kv_idx).abs()

    return score_mod


class ScoreWork(AttentionWork):
    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device, "eager")
        for name in ("gate", "slope"):
            self.inputs[name] = torch.rand(case.shape.heads, generator=self._random).to(device, case.dtype)
        # Torch compiles with this compiler, and its compiled kernel has no float64.
        compiled = case.dtype != torch.float64 and shutil.which(os.environ.get("CXX", "g++"))
        self._how = "compiled" if compiled else "eager"
        self.peer_label = f"flex {self._how}, formula"

    def _our_options(self, leaves: Tensors) -> dict[str, Any]:
        return {**super()._our_options(leaves), "score_mod": _score_mod(leaves)}

    def peer(self, leaves: Tensors) -> Call:
        if leaves["query"].requires_grad:
            return self._formula(leaves)
        from torch.nn.attention.flex_attention import flex_attention  # takes long to import

        torch._dynamo.reset()
        flex = torch.compile(flex_attention, fullgraph=True) if self._how == "compiled" else flex_attention
        tensors = leaves["query"], leaves["key"], leaves["value"]
        grouped = self.case.shape.kv_heads != self.case.shape.heads
        return functools.partial(flex, *tensors, score_mod=_score_mod(leaves), enable_gqa=grouped)

    def _formula(self, leaves: Tensors, sample: Sample | None = None) -> Callable[..., Any]:
        """All scores, or those of a sample, as one matrix."""
        shape = self.case.shape
        heads = torch.arange(shape.heads, device=self.device)[:, None, None]
        rows = torch.arange(shape.query_length, device=self.device)
        if sample is not None:
            heads, rows = sample.pick_heads(heads[None]), sample.rows.to(self.device)
        places = torch.zeros((), device=self.device), heads, rows[:, None], torch.arange(shape.key_length).to(rows)

        def change(scores: Tensor) -> Tensor:
            return _score_mod(leaves)(scores, *places)

        tensors = leaves["query"], leaves["key"], leaves["value"]
        return functools.partial(eager_attention, *tensors, score_mod=change)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if name in ("gate", "slope") else super().take(name, tensor)

    def solve(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        leaves = leaves_of({n: self.take(n, t).to(dtype) for n, t in self.inputs.items()}, True)
        output = self._formula(leaves, self.sample)()
        cotangent = self.sample.queries(self.cotangent()).to(dtype)
        grads = torch.autograd.grad(output, list(leaves.values()), cotangent)
        return {"output": output.detach()}, dict(zip(leaves, grads, strict=True))
