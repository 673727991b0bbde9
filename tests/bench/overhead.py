"""The overhead of a call with almost nothing to compute: 1 head, 5 positions, width 64, against F.sdpa.

The column "drop-in" is F.sdpa under scaledot.dropin.sdpa.activate().

    python tests/bench/overhead.py [--seconds 1] [--threads 1] [--dtype float32]

Medians of the sides timed in turn. The bar is 1.5 x F.sdpa's time, forward and forward + backward. A call of the
drop-in has 1.3 x scaledot's own time and F.sdpa's + 1 us. This prints; it is no test.
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
from scaledot.dropin import sdpa

BAR = 1.5
DROPIN_BAR, DROPIN_SECONDS = 1.3, 1e-6


def calls(attention: Callable[..., Any], tensors: list[Tensor], grad: Tensor) -> dict[str, Callable[[], Any]]:
    """The timed functions of one side, by name."""
    detached = [tensor.detach() for tensor in tensors]
    return {
        "forward, no gradients": lambda: attention(*detached),
        "forward, recorded": lambda: attention(*tensors),
        "forward + backward": lambda: torch.autograd.grad(attention(*tensors), tensors, grad),
    }


def under_dropin(call: Callable[[], Any], effort: Effort) -> float:
    """The median time of a call of F.sdpa that scaledot runs."""
    with sdpa.activate():
        (timing,) = alternate((call,), effort)
    return timing.median


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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
    columns = (*sides, "drop-in")
    print(f"{'':<22}" + "".join(f"{name:>12}" for name in columns) + f"{'scaledot / F.sdpa':>22}{'drop-in':>18}")
    for name in sides["F.sdpa"]:
        effort = Effort(arguments.seconds, 21)
        medians = [timing.median for timing in alternate(tuple(side[name] for side in sides.values()), effort)]
        ours, torchs, dropin = medians[0], medians[-1], under_dropin(sides["F.sdpa"][name], effort)
        verdict = "within" if ours <= BAR * torchs else "OVER"
        own = "within" if dropin <= DROPIN_BAR * ours and dropin <= torchs + DROPIN_SECONDS else "OVER"
        times = "".join(f"{time_of(m):>12}" for m in (*medians, dropin))
        print(f"{name:<22}{times}{ours / torchs:>15.2f} {verdict}{dropin / ours:>15.2f} {own}")


if __name__ == "__main__":
    main()
