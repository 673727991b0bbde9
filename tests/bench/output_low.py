"""Gain and cost of saving the low part of an output of 16 bits for the backward.

    python tests/bench/output_low.py [--dtype bfloat16] [--threads 1] [--seconds 1]

Errors of the gradient of query: the largest, relative to the largest element of float64's gradient. "mean": that of
keys and values, of which the other part has a standard deviation of 1. Times: medians with save_for_backward(True)
divided by those with save_for_backward(False), timed in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import scaledot
from scaledot.compare.features import DTYPES
from scaledot.compare.timing import Effort, alternate

SHAPES = ((8, 256, 64), (8, 512, 64), (8, 1024, 64), (8, 1024, 128), (8, 4096, 128))
MEANS = (0.0, 1.0, 4.0)


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value


def rounded(*tensors: Tensor) -> Any:
    with scaledot.save_for_backward(False):
        return scaledot.scaled_dot_product_attention(*tensors)


SIDES: dict[str, Callable[..., Any]] = {
    "saved": scaledot.scaled_dot_product_attention,
    "not saved": rounded,
    "F.sdpa": F.scaled_dot_product_attention,
    "eager": eager,
}


def inputs_of(shape: tuple[int, int, int], mean: float, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """(query, key, value) and the gradient of the output."""
    torch.manual_seed(1)
    drawn = [torch.randn(1, *shape) + mean * (k in (1, 2)) for k in range(4)]
    query, key, value, grad = (t.to(dtype) for t in drawn)
    return [query, key, value], grad


def grad_query(attention: Callable[..., Any], tensors: list[Tensor], grad: Tensor) -> Tensor:
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(attention(*leaves), leaves[0], grad)[0].double()


def errors_of(tensors: list[Tensor], grad: Tensor) -> list[float]:
    exact = grad_query(F.scaled_dot_product_attention, [t.double() for t in tensors], grad.double())
    return [float((grad_query(side, tensors, grad) - exact).abs().max() / exact.abs().max()) for side in SIDES.values()]


def cost_of(tensors: list[Tensor], grad: Tensor, seconds: float) -> tuple[float, float]:
    """Ratios of the forward's and the backward's times."""
    leaves = [t.requires_grad_() for t in tensors]
    sides = SIDES["saved"], SIDES["not saved"]
    outputs = [side(*leaves) for side in sides]
    effort = Effort(seconds, 7)
    forward = alternate([lambda side=side: side(*leaves) for side in sides], effort)
    backward = alternate(
        [lambda output=output: torch.autograd.grad(output, leaves, grad, retain_graph=True) for output in outputs],
        effort,
    )
    return forward[0].median / forward[1].median, backward[0].median / backward[1].median


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of each line")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{scaledot.cpu_capability()}, {arguments.threads} thread(s), {arguments.dtype}")
    print(f"{'':<16}{'mean':<6}" + "".join(f"{side:>10}" for side in SIDES) + f"{'forward':>10}{'backward':>10}")
    for shape in SHAPES:
        name = "1x" + "x".join(map(str, (shape[0], *shape[1:])))
        for mean in MEANS:
            tensors, grad = inputs_of(shape, mean, DTYPES[arguments.dtype])
            text = "".join(f"{error:>10.1e}" for error in errors_of(tensors, grad))
            if mean == MEANS[0]:
                text += "".join(f"{ratio:>10.2f}" for ratio in cost_of(tensors, grad, arguments.seconds))
            print(f"{name:<16}{mean:<6}{text}")


if __name__ == "__main__":
    main()
