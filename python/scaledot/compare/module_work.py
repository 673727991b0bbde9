"""A case that runs the whole of nn.MultiheadAttention in training, with averaged weights: torch's and the drop-in."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledot
from scaledot.dropin.torch_nn import MultiheadAttention

from .eager import eager_attention
from .features import Case
from .sample import Sample
from .work import Call, Tensors, generator_of, leaves_of

_WEIGHTS = ("in_proj_weight", "out_proj.weight")


class ModuleWork:
    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self._random = generator_of(case)
        shape = case.shape
        width = shape.heads * shape.head_dim
        self.inputs: Tensors = {
            "input": self._normal(shape.batch, shape.query_length, width),
            "in_proj_weight": self._normal(3 * width, width) / math.sqrt(width),
            "out_proj.weight": self._normal(width, width) / math.sqrt(width),
        }
        # The output mixes the heads, so the sample is of sequences and rows only.
        one_head = shape.with_(heads=1, kv_heads=1, head_dim=width, value_dim=width)
        self.sample = Sample.of(one_head, budget=(1 << 22) // shape.heads)
        self.peer_label = "nn.MultiheadAttention"
        self.trains = True

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._random).to(self.device, self.case.dtype)

    def _call(self, kind: type[nn.MultiheadAttention], leaves: Tensors) -> Call:
        shape = self.case.shape
        width = shape.heads * shape.head_dim
        module = kind(width, shape.heads, bias=False, batch_first=True, device=self.device, dtype=self.case.dtype)
        for name in _WEIGHTS:  # plain tensors replace the parameters, so that gradients reach the leaves
            owner = module.out_proj if name.startswith("out_proj") else module
            attribute = name.rpartition(".")[2]
            delattr(owner, attribute)
            setattr(owner, attribute, leaves[name])
        x = leaves["input"]
        return lambda: module(x, x, x)

    def ours(self, leaves: Tensors) -> Call:
        return self._call(MultiheadAttention, leaves)

    def peer(self, leaves: Tensors) -> Call:
        return self._call(nn.MultiheadAttention, leaves)

    def checked_calls(self, leaves: Tensors) -> tuple[Call, Call]:
        return self.ours(leaves), self.peer(leaves)

    def peer_bytes(self) -> int:
        return 6 * 4 * self.case.shape.scores

    def kernels(self) -> dict[str, str]:
        heads = self._split(leaves_of(self.inputs, True)["input"])
        plan = scaledot.explain(heads, heads, heads, return_weights=True)
        return {"forward": plan.forward.kernel, "backward": plan.backward.kernel}

    def cotangent(self) -> Tensor:
        values = torch.randn(self.inputs["input"].shape, generator=generator_of(self.case))
        return self.sample.inside(values.to(self.device, self.case.dtype).unsqueeze(1)).squeeze(1)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        if name in _WEIGHTS:
            return tensor
        # Each row of the input is also a key, so its gradient is complete whichever query rows are sampled.
        return tensor[self.sample.batch] if name == "input" else self.sample.queries(tensor.unsqueeze(1))

    def _split(self, x: Tensor) -> Tensor:
        """(B, L, E) -> (B, H, L, D)."""
        return x.unflatten(-1, (self.case.shape.heads, -1)).transpose(1, 2)

    def solve(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        leaves = leaves_of({n: self.take(n, t).to(dtype) for n, t in self.inputs.items()}, True)
        projected = F.linear(leaves["input"], leaves["in_proj_weight"]).chunk(3, -1)
        query, key, value = (self._split(x) for x in projected)
        query = self.sample.pick_rows(query)
        output, weights = eager_attention(query, key, value, return_weights=True)
        output = F.linear(output.transpose(1, 2).flatten(-2), leaves["out_proj.weight"]).unsqueeze(1)
        cotangent = self.take("output", self.cotangent()).to(dtype)
        grads = torch.autograd.grad(output, list(leaves.values()), cotangent)
        weights = weights.mean(1, keepdim=True)
        return {"output": output.detach(), "weights": weights.detach()}, dict(zip(leaves, grads, strict=True))
