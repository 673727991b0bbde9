"""A small GPT whose sequence is sharded over processes. Its losses are those of one process.

    torchrun --nproc-per-node 2 examples/sharded_gpt.py
    python examples/sharded_gpt.py                        (one process)

The model learns to repeat: every sequence is the same random tokens twice. The loss covers the second half only. Its
tokens are known only by attention to the first half, and some of that is on another rank. A training loop has three
things to do for a sharded sequence: `shard` the tokens, take `positions` for the position embedding, and sum losses and
gradients over the ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import scaledot
from scaledot.distributed import context_parallel_attention, positions, shard

TOKENS, HALF, BATCH = 16, 33, 16
WIDTH, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
LENGTH = 2 * HALF - 1  # the last token is only a target; the length is odd, so that 2 or 4 ranks get unequal shares
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head_dim)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, places: Tensor, attend: Attention) -> Tensor:
        """(B, l, TOKENS): logits of the token after each of `tokens` (B, l), whose positions are `places` (l,)."""
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def summed_over_ranks(loss: Tensor, model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' losses. Every gradient of the model becomes the sum of the ranks' gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([loss.view(1), *(gradient.view(-1) for gradient in gradients)])
    for k in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(k))
    total, *summed = flat.split([1, *(gradient.numel() for gradient in gradients)])
    for gradient, new in zip(gradients, summed, strict=True):
        gradient.copy_(new.view_as(gradient))
    return total


def train(
    steps: int, mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32, dropout: float = 0.0, **options: Any
) -> list[float]:
    """The loss of every step. With a mesh the sequence is sharded over its ranks, and all ranks return the same losses.

    `options` are those of context_parallel_attention: method, placement.
    """
    torch.manual_seed(0)
    model = GPT().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaledot.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=True
        )

    def together(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert mesh is not None
        result: Tensor = context_parallel_attention(
            query, key, value, mesh, dropout_p=dropout, is_causal=True, enable_gqa=True, **options
        )
        return result

    placement = options.get("placement", "zigzag")
    losses = []
    for _ in range(steps):
        half = torch.randint(TOKENS, (BATCH, HALF), generator=generator)
        whole = torch.cat([half, half], 1)
        inputs, targets, places = whole[:, :-1], whole[:, 1:], torch.arange(LENGTH)
        if mesh is not None:
            inputs, targets = (shard(t, mesh, 1, placement) for t in (inputs, targets))
            places = positions(LENGTH, mesh, placement)
        known = places >= HALF - 1  # positions whose target is in the second half
        logits = model(inputs, places, alone if mesh is None else together)
        # Every rank divides by the same number: the ranks' losses and gradients then add up to those of one process.
        loss = F.cross_entropy(logits[:, known].flatten(0, 1), targets[:, known].flatten(), reduction="sum")
        loss = loss / (BATCH * HALF)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach() if mesh is None else summed_over_ranks(loss.detach(), model, mesh)
        optimizer.step()
        losses.append(float(total))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="a small GPT whose sequence is sharded", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300, help="default %(default)s")
    parser.add_argument("--method", choices=["ring", "all_to_all"], default="ring", help="default %(default)s")
    parser.add_argument("--placement", choices=["zigzag", "contiguous"], default="zigzag", help="default %(default)s")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention weights; default %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so that the order of sums does not depend on what torchrun sets

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = train(
            arguments.steps, mesh, dropout=arguments.dropout, method=arguments.method, placement=arguments.placement
        )
        first, ranks = dist.get_rank() == 0, dist.get_world_size()
        dist.destroy_process_group()
        if not first:
            return
    else:
        sharded, ranks = [], 0
    alone = train(arguments.steps, dropout=arguments.dropout)
    every = max(arguments.steps // 10, 1)
    print(f"loss of the second half, every {every} steps:")
    print("  one process ", " ".join(f"{x:.3f}" for x in alone[::every]))
    if sharded:
        print(f"  {ranks} processes ", " ".join(f"{x:.3f}" for x in sharded[::every]))
        print(f"largest difference: {max(abs(a - b) for a, b in zip(alone, sharded, strict=True)):.1e}")


if __name__ == "__main__":
    main()
