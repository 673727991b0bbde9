"""The overhead of a call with almost nothing to compute: 1 head, 5 positions, width 64, against F.sdpa.

    python tests/bench/overhead.py [--seconds 1] [--threads 1] [--dtype float32]

Medians of the sides timed in turn. The bar is 1.5 x F.sdpa's time, forward and forward + backward. This prints; it is
no test.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import scaledot
from scaledot.compare.report import time_of
from scaledot.compare.timing import Effort, alternate

BAR = 1.5


def calls(attention: Callable[..., Any], tensors: list[Tensor], grad: Tensor) -> dict[str, Callable[[], Any]]:
    """The timed functions of one side, by name."""
    detached = [tensor.detach() for tensor in tensors]
    return {
        "forward, no gradients": lambda: attention(*detached),
        "forward, recorded": lambda: attention(*tensors),
        "forward + backward": lambda: torch.autograd.grad(attention(*tensors), tensors, grad),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of each line")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    dtype = getattr(torch, arguments.dtype)
    tensors = [torch.randn(1, 1, 5, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 1, 5, 64, dtype=dtype)
    op = torch.ops.scaledot.sdpa.default
    sides = {
        "scaledot": calls(scaledot.scaled_dot_product_attention, tensors, grad),
        "the op": calls(lambda q, k, v: op(q, k, v)[0], tensors, grad),
        "F.sdpa": calls(F.scaled_dot_product_attention, tensors, grad),
    }
    print(f"one call, (1, 1, 5, 64), {arguments.dtype}, {arguments.threads} thread(s); bar {BAR} x F.sdpa")
    print(f"{'':<22}" + "".join(f"{name:>12}" for name in sides) + f"{'scaledot / F.sdpa':>22}")
    for name in sides["F.sdpa"]:
        timings = alternate(tuple(side[name] for side in sides.values()), Effort(arguments.seconds, 21))
        medians = [timing.median for timing in timings]
        ratio = medians[0] / medians[-1]
        verdict = "within" if ratio <= BAR else "OVER"
        print(f"{name:<22}" + "".join(f"{time_of(m):>12}" for m in medians) + f"{ratio:>13.2f} {verdict}")


if __name__ == "__main__":
    main()
