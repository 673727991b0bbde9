"""Block masks and score functions against plain attention and compiled flex_attention; relative_bias against plain.

    python tests/bench/flex.py [--threads 2] [--seconds 0.5] [--dtype float32] [--shape 1x8x4096x64] [--no-flex]

The sides of a line are timed in turn, and the times are their 20th percentiles. flex_attention takes the same BlockMask
of 128 x 128 blocks, and is not timed where its results differ from ours. SCALEDOT_CPU_CAPABILITY=avx2 excludes AVX-512
for ours. Of score functions the captured tensors get gradients, too, except the slopes of "ALiBi", an option.
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


def compiled_flex(
    name: str, ours: Callable[[], Tensor], loose: float, *inputs: Tensor, **options: Any
) -> list[Callable[[], Any]]:
    """The compiled flex_attention; none if its results are not `ours`."""
    torch._dynamo.reset()
    side = partial(torch.compile(flex_attention, fullgraph=True), *inputs, **options)
    if torch.allclose(ours(), side(), rtol=loose, atol=loose):
        return [side]
    print(f"{name}: flex_attention gives other results than scaledot")
    return []


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
            loose = 1e-4 if query.dtype == torch.float32 else 2e-2
            sides += compiled_flex(name, sides[1], loose, query, key, value, block_mask=theirs)
        plain, mine, *flex = map(percentile, alternate(tuple(sides), effort))
        blocks, mixed = shares(theirs, length)
        text = f"{name:<24}{blocks:>8.1%}{mixed:>9.1%}{time_of(mine):>11}{mine / plain:>9.3f}"
        print(text + (f"{time_of(flex[0]):>11}{flex[0] / mine:>8.2f}" if flex else ""), flush=True)


def score_mods(heads: int, length: int) -> dict[str, tuple[Any, list[Tensor]]]:
    """Score functions, and what they capture that has a gradient."""
    slopes, table = torch.rand(heads), torch.randn(heads, 257)
    gate, learned = torch.randn(heads), torch.rand(heads)
    ids = torch.arange(length) // (length // 4)
    bias = torch.randn(heads, 4)

    def document(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(ids[i] == ids[j], s + bias[h, ids[j]] * 0.5, -torch.inf)

    return {
        "ALiBi": (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), []),
        "ALiBi, learned": (lambda s, b, h, i, j: s - learned[h] * (i - j).abs(), [learned]),
        "softcap": (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), []),
        "softcap of a sum": (lambda s, b, h, i, j: 20 * torch.tanh((s + learned[h]) / 20), [learned]),
        "relative table": (lambda s, b, h, i, j: s + table[h, (j - i).clamp(-128, 128) + 128], [table]),
        "relative table, causal": (lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 256)], [table]),
        "document and bias": (document, [bias]),
        "dilated": (lambda s, b, h, i, j: torch.where((i - j) % 4 == 0, s, -torch.inf), []),
        "gated": (lambda s, b, h, i, j: s * torch.sigmoid(gate[h]) - learned[h] * (i - j).abs(), [gate, learned]),
    }  # fmt: skip


def score_functions(make: Callable[[], list[Tensor]], effort: Effort, with_flex: bool) -> None:
    query, key, value = make()
    loose = 1e-4 if query.dtype == torch.float32 else 3e-2
    print(f"{'score function':<24}{'forward':>11}{'/ plain':>9}{'flex':>11}{'/ ours':>8}{'backward':>11}{'/ plain':>9}")
    for name, (score_mod, captured) in score_mods(*query.shape[1:3]).items():
        sides: list[Callable[[], Any]] = [
            partial(attend, query, key, value),
            partial(attend, query, key, value, score_mod=score_mod),
        ]
        if with_flex:
            sides += compiled_flex(name, sides[1], loose, query, key, value, score_mod=score_mod)
        plain, mine, *flex = map(percentile, alternate(tuple(sides), effort))
        steps = training_step(make, []), training_step(make, captured, score_mod=score_mod)
        before, after = (percentile(parts["backward"]) for parts in alternate_parts(steps, effort))
        text = f"{name:<24}{time_of(mine):>11}{mine / plain:>9.3f}"
        text += f"{time_of(flex[0]):>11}{flex[0] / mine:>8.2f}" if flex else " " * 19
        print(f"{text}{time_of(after):>11}{after / before:>9.3f}", flush=True)
        for tensor in captured:
            tensor.requires_grad_(False)


def training_step(
    make: Callable[[], list[Tensor]], captured: list[Tensor], **options: Any
) -> dict[str, Callable[[], Any]]:
    """Forward and backward, to be called in this order. `captured`: what `options` have that gets a gradient."""
    leaves = [t.requires_grad_() for t in make()]
    inputs = leaves + [t.requires_grad_() for t in captured]
    gradient, outputs = torch.randn_like(leaves[0]), []

    def forward() -> None:
        outputs[:] = [attend(*leaves, **options)]

    return {"forward": forward, "backward": lambda: torch.autograd.grad(outputs[0], inputs, gradient)}


def relative_bias(make: Callable[[], list[Tensor]], effort: Effort) -> None:
    heads, length = make()[0].shape[1:3]
    print(f"{'relative_bias':<24}{'forward':>11}{'/ plain':>9}{'backward':>11}{'/ plain':>9}")
    for name, reach in (("distances to 128", 128), ("every distance", length - 1)):
        bias = torch.randn(heads, 2 * reach + 1)
        steps = training_step(make, []), training_step(make, [bias], relative_bias=bias)
        plain, mine = alternate_parts(steps, effort)
        text = f"{name:<24}"
        for part in ("forward", "backward"):
            time = percentile(mine[part])
            text += f"{time_of(time):>11}{time / percentile(plain[part]):>9.3f}"
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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
    score_functions(make, effort, not arguments.no_flex)
    relative_bias(make, effort)


if __name__ == "__main__":
    main()
