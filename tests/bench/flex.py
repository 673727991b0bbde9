"""Block masks against plain attention and against compiled flex_attention; relative_bias against plain attention.

    python tests/bench/flex.py [--threads 2] [--seconds 0.5] [--dtype float32] [--shape 1x8x4096x64] [--no-flex]

The sides of a line are timed in turn, and the times are their 20th percentiles. flex_attention takes the same BlockMask
of 128 x 128 blocks, and is not timed where its results differ from ours. SCALEDOT_CPU_CAPABILITY=avx2 excludes AVX-512
for ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import scaledot
from scaledot.compare.report import time_of
from scaledot.compare.timing import Effort, Timing, alternate, alternate_parts

BLOCK = 128
LEAST = 7  # readings
attend: Any = scaledot.scaled_dot_product_attention


def all_keys(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j >= 0


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window_with_global_tokens(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i - j).abs() <= 2 * BLOCK) | (i < 64) | (j < 64)


def documents(length: int) -> Any:
    """16 documents of random lengths."""
    ends = torch.randperm(length - 1)[:15].sort().values + 1
    return scaledot.masks.document_mask(torch.bucketize(torch.arange(length), ends, right=True))


def random_blocks(length: int) -> Any:
    """A quarter of the blocks. Every row has some."""
    blocks = -(-length // BLOCK)
    shown = torch.rand(blocks, blocks) < 0.25
    shown.fill_diagonal_(True)
    return lambda b, h, i, j: shown[i // BLOCK, j // BLOCK]


def percentile(timing: Timing) -> float:
    """The 20th."""
    return sorted(timing.readings)[len(timing.readings) // 5]


def shares(mask: TorchBlockMask, length: int) -> tuple[float, float]:
    """Of all blocks, those that are not empty, and those that are partial."""
    assert mask.full_kv_num_blocks is not None
    mixed, full = (float(n.sum()) / (-(-length // BLOCK)) ** 2 for n in (mask.kv_num_blocks, mask.full_kv_num_blocks))
    return mixed + full, mixed


def block_masks(make: Callable[[], list[Tensor]], effort: Effort, with_flex: bool) -> None:
    query, key, value = make()
    length = query.size(2)
    masks = {
        "all keys": all_keys, "causal": causal, "16 documents": documents(length),
        "window, global tokens": window_with_global_tokens, "random quarter": random_blocks(length),
    }  # fmt: skip
    print(f"{'block mask, forward':<24}{'blocks':>8}{'partial':>9}{'ours':>11}{'/ plain':>9}{'flex':>11}{'/ ours':>8}")
    for name, mask_mod in masks.items():
        theirs = create_block_mask(mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
        ours = scaledot.BlockMask.from_torch(theirs)
        sides: list[Callable[[], Any]] = [
            partial(attend, query, key, value),
            partial(attend, query, key, value, block_mask=ours),
        ]
        if with_flex:
            torch._dynamo.reset()
            compiled = torch.compile(flex_attention, fullgraph=True)
            sides.append(partial(compiled, query, key, value, block_mask=theirs))
            loose = 1e-4 if query.dtype == torch.float32 else 2e-2
            if not torch.allclose(sides[1](), sides[2](), rtol=loose, atol=loose):
                print(f"{name}: flex_attention gives other results than scaledot")
                sides.pop()
        plain, mine, *flex = map(percentile, alternate(tuple(sides), effort))
        blocks, mixed = shares(theirs, length)
        text = f"{name:<24}{blocks:>8.1%}{mixed:>9.1%}{time_of(mine):>11}{mine / plain:>9.3f}"
        print(text + (f"{time_of(flex[0]):>11}{flex[0] / mine:>8.2f}" if flex else ""), flush=True)


def training_step(make: Callable[[], list[Tensor]], bias: Tensor | None) -> dict[str, Callable[[], Any]]:
    """Forward and backward, to be called in this order."""
    leaves = [t.requires_grad_() for t in make()]
    inputs = leaves if bias is None else [*leaves, bias.requires_grad_()]
    gradient, outputs = torch.randn_like(leaves[0]), []

    def forward() -> None:
        outputs[:] = [attend(*leaves, relative_bias=bias)]

    return {"forward": forward, "backward": lambda: torch.autograd.grad(outputs[0], inputs, gradient)}


def relative_bias(make: Callable[[], list[Tensor]], effort: Effort) -> None:
    heads, length = make()[0].shape[1:3]
    print(f"{'relative_bias':<24}{'forward':>11}{'/ plain':>9}{'backward':>11}{'/ plain':>9}")
    for name, reach in (("distances to 128", 128), ("every distance", length - 1)):
        bias = torch.randn(heads, 2 * reach + 1)
        plain, mine = alternate_parts((training_step(make, None), training_step(make, bias)), effort)
        text = f"{name:<24}"
        for part in ("forward", "backward"):
            time = percentile(mine[part])
            text += f"{time_of(time):>11}{time / percentile(plain[part]):>9.3f}"
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each side of each line")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--shape", default="1x8x4096x64", help="BxHxLxD")
    parser.add_argument("--no-flex", action="store_true", help="leave flex_attention out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape, dtype = tuple(map(int, arguments.shape.split("x"))), getattr(torch, arguments.dtype)

    def make() -> list[Tensor]:
        return [torch.randn(shape, dtype=dtype) for _ in range(3)]

    effort = Effort(arguments.seconds, LEAST)
    print(f"{scaledot.cpu_capability()}, {arguments.threads} thread(s), {arguments.shape}, {arguments.dtype}")
    block_masks(make, effort, not arguments.no_flex)
    relative_bias(make, effort)


if __name__ == "__main__":
    main()
