"""A learned relative position bias: a floating attn_mask with a gradient, as T5 has it.

    python examples/learned_bias.py

Each of four heads has to copy the token at a fixed distance. Queries and keys are random, so only the bias can tell
where that token is. The bias is a table (heads, distances); the mask (heads, L, L) is looked up in it. The op adds the
mask to the scores of every sequence, and its gradient is summed over the batch inside the kernel.

The training is done twice, with scaledot and with F.scaled_dot_product_attention, and gives the same table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import scaledot

DISTANCES = (-3, -1, 0, 2)  # what each head has to learn: from position i, copy position i + distance
REACH = 8  # the table has an entry for every distance from -REACH to REACH
BATCH, LENGTH, HEAD_DIM = 8, 48, 16
Attention = Callable[..., Tensor]


def bias_of(table: Tensor) -> Tensor:
    """The mask (heads, L, L) of a table (heads, 2 * REACH + 1); farther keys share the entry of the last distance."""
    position = torch.arange(LENGTH)
    distance = (position[None, :] - position[:, None]).clamp(-REACH, REACH)
    return table[:, distance + REACH]


def targets_of(value: Tensor) -> Tensor:
    """(B, heads, L, D): value, shifted by each head's distance."""
    return torch.stack([value[:, h].roll(-distance, dims=1) for h, distance in enumerate(DISTANCES)], 1)


def train(attention: Attention, steps: int) -> tuple[list[float], Tensor]:
    """The loss of every step, and the trained table."""
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(len(DISTANCES), 2 * REACH + 1, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    inside = slice(REACH, LENGTH - REACH)  # rows whose target is in the sequence
    losses = []
    for _ in range(steps):
        query, key, value = torch.randn(3, BATCH, len(DISTANCES), LENGTH, HEAD_DIM, generator=generator)
        output = attention(query, key, value, attn_mask=bias_of(table))
        loss = F.mse_loss(output[:, :, inside], targets_of(value)[:, :, inside])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, table.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description="a learned relative position bias", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: got {arguments.steps}; needs at least 1")

    tables = []
    every = max(arguments.steps // 5, 1)
    for name, attention in (
        ("scaledot", scaledot.scaled_dot_product_attention),
        ("torch", F.scaled_dot_product_attention),
    ):
        losses, table = train(attention, arguments.steps)
        tables.append(table)
        print(f"{name:9} loss", " ".join(f"{loss:.4f}" for loss in [*losses[::every], losses[-1]]))
    learned = (tables[0].argmax(-1) - REACH).tolist()
    print(f"distances to learn {list(DISTANCES)}, learned {learned}")
    print(f"largest difference between the tables: {(tables[0] - tables[1]).abs().max():.1e}")


if __name__ == "__main__":
    main()
