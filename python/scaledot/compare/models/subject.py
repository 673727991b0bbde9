"""One model on its three sides. The sides share the parameters, so that a large model is in memory once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..features import DTYPES
from .catalogue import SIDES, TRAINING, Built, Inputs, Model, Results

_SEED = 0
_RATE = 1e-6  # the learning rate: the steps cost what they always cost, and hardly change the weights

Parts = dict[str, Callable[[], Any]]


def sharing(module: nn.Module) -> nn.Module:
    """A copy of the module with the same parameters."""
    shared = {id(parameter): parameter for parameter in module.parameters()}
    return copy.deepcopy(module, shared)


class Subject:
    """A model in a dtype."""

    def __init__(self, model: Model, dtype: str, quick: bool) -> None:
        self.model, self.dtype = model, DTYPES[dtype]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            self.built: Built = model.make(quick)
        self.built.module.to(self.dtype)
        self.modules = {side: self._side(side) for side in SIDES}

    def _side(self, side: str) -> nn.Module:
        module = sharing(self.built.module)
        self.built.choose(module, side)
        return module

    def _inputs(self, batch: int, dtype: torch.dtype) -> Inputs:
        rounded = {name: _to(tensor, self.dtype) for name, tensor in self.built.inputs(batch).items()}
        return {name: _to(tensor, dtype) for name, tensor in rounded.items()}

    # ------------------------------------------------------------------------------------------------- the check
    def solved(self, side: str, sample: int = 0) -> tuple[Results, Results]:
        """(results, gradients of the parameters) of one sample, without dropout."""
        return self._solve(self.modules[side], side, self.dtype, sample)

    def oracle(self, sample: int = 0) -> tuple[Results, Results]:
        """Results and gradients by torch's sdpa in float64."""
        module = copy.deepcopy(self.built.module).double()
        self.built.choose(module, "sdpa")
        return self._solve(module, "sdpa", torch.float64, sample)

    def _solve(self, module: nn.Module, side: str, dtype: torch.dtype, sample: int) -> tuple[Results, Results]:
        module.eval()
        inputs = {name: tensor[sample:] for name, tensor in self._inputs(sample + 1, dtype).items()}
        with self.built.context(side), torch.set_grad_enabled(self.model.trains):
            results = self.built.start(module, inputs)()
            gradients = _gradients(module, results["loss"]) if self.model.trains else {}
        return {name: tensor.detach() for name, tensor in results.items()}, gradients

    # ------------------------------------------------------------------------------------------------ the timing
    def parts(self, side: str) -> Parts:
        """The passes of a side, to be called in this order."""
        module, inputs = self.modules[side], self._inputs(self.built.batch, self.dtype)
        module.train(self.model.trains)
        call = self.built.start(module, inputs)

        def forward() -> Results:
            with self.built.context(side):
                return call()

        return _training(module, forward) if self.model.trains else {self.model.work: torch.no_grad()(forward)}


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _gradients(module: nn.Module, loss: Tensor) -> Results:
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def _training(module: nn.Module, forward: Callable[[], Results]) -> Parts:
    optimizer = torch.optim.AdamW(module.parameters(), lr=_RATE)
    losses: list[Tensor] = []

    def predict() -> None:
        losses.append(forward()["loss"])

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return dict(zip(TRAINING, (predict, backward, update), strict=True))
