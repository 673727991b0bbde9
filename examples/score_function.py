"""A score function with parameters: a bias that grows with the distance, and a gate on what the query says.

    python examples/score_function.py

A layer of attention learns to do what another one does, from its outputs alone. Both change each score to

    gate[head] * score - slope[head] * |distance|        and see 24 keys, the last at each position.

The layer to imitate computes this in plain torch, with a matrix of all scores. The one that learns has the line as a
`score_mod`. It runs inside the fused kernel, and so do the gradients of gate and slope.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledot

GATES, SLOPES = (1.5, 1.0, 0.5, 0.25), (0.05, 0.1, 0.3, 1.0)  # of each head, to be learned
BATCH, HEADS, LENGTH, HEAD_DIM, REACH = 4, 4, 64, 16, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.slope = nn.Parameter(torch.ones(HEADS)), nn.Parameter(torch.full((HEADS,), 0.5))

    def score_mod(self, score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        distance = (row - key).abs()
        score = self.gate[head] * score - self.slope[head] * distance
        return torch.where(distance < REACH, score, -math.inf)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaledot.scaled_dot_product_attention(query, key, value, is_causal=True, score_mod=self.score_mod)


def attention_to_imitate(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    gate, slope = torch.tensor(GATES)[:, None, None], torch.tensor(SLOPES)[:, None, None]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    scores = gate * (query @ key.mT) / math.sqrt(HEAD_DIM) - slope * distance.abs()
    return scores.masked_fill((distance < 0) | (distance >= REACH), -math.inf).softmax(-1) @ value


def main() -> None:
    parser = argparse.ArgumentParser(description="a score function with parameters", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300, help="default %(default)s")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: got {arguments.steps}; needs at least 1")

    generator = torch.Generator().manual_seed(0)
    attention = Attention()
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.03)
    losses = []
    for _ in range(arguments.steps):
        query, key, value = torch.randn(3, BATCH, HEADS, LENGTH, HEAD_DIM, generator=generator)
        loss = F.mse_loss(attention(query, key, value), attention_to_imitate(query, key, value))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("loss", " ".join(f"{loss:.1e}" for loss in [*losses[:: max(arguments.steps // 5, 1)], losses[-1]]))
    for name, wanted, found in (("gate", GATES, attention.gate), ("slope", SLOPES, attention.slope)):
        print(f"{name:6} to learn", *(f"{x:5.2f}" for x in wanted), "  learned", *(f"{x:5.2f}" for x in found.tolist()))


if __name__ == "__main__":
    main()
