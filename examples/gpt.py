"""A small GPT learns a text by heart, one character at a time. It shows causal attention with dropout in training.

    python examples/gpt.py
    python examples/gpt.py --text README.md --steps 2000

It prints the loss, how well the trained model predicts every character of the text, and a continuation that the model
makes up. By default the text is this project's licence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledot

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
CONTEXT, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 64, 4, 2, 2


class Block(nn.Module):
    """Attention, then an MLP. Each reads a normalised copy of x and adds its result to x."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Two query heads share each key and value head. Dropout drops attention weights, in training mode only.
        self.attention = scaledot.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=KV_HEADS, dropout=dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(self.norm_1(x), is_causal=True)  # no (L, L) mask is ever built
        x = x + attended
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, dropout: float) -> None:
        super().__init__()
        self.character, self.position = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) character numbers -> (B, L, characters): logits of the character that follows each of them."""
        x = self.character(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(model: GPT, ids: Tensor, steps: int, batch: int = 16) -> list[float]:
    """The loss of every step. Each step takes `batch` random pieces of the text `ids` (characters,)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    model.train()
    for step in range(steps):
        start = torch.randint(len(ids) - CONTEXT, (batch, 1))
        pieces = ids[start + torch.arange(CONTEXT + 1)]
        logits = model(pieces[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(steps // 8, 1) == 0 or step == steps - 1:
            print(f"step {step:4}   loss {losses[-1]:.3f}")
    return losses


@torch.no_grad()
def accuracy(model: GPT, ids: Tensor) -> float:
    """The share of characters that the model predicts right, each from the CONTEXT characters before it."""
    model.eval()
    logits = model(ids[:-1].unfold(0, CONTEXT, 1))[:, -1]
    return (logits.argmax(-1) == ids[CONTEXT:]).float().mean().item()


@torch.no_grad()
def continued(model: GPT, ids: Tensor, count: int) -> Tensor:
    """`ids` (L,) and `count` more characters, each the most likely one."""
    model.eval()
    for _ in range(count):
        logits = model(ids[None, -CONTEXT:])
        ids = torch.cat([ids, logits[0, -1:].argmax(-1)])
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description="a small GPT learns a text by heart", allow_abbrev=False)
    parser.add_argument("--text", type=Path, default=LICENSE, help="what to learn (default: this project's LICENSE)")
    parser.add_argument("--steps", type=int, default=600, help="default %(default)s")
    parser.add_argument("--dropout", type=float, default=0.1, help="of attention weights; default %(default)s")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    text = arguments.text.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(character) for character in text])
    print(f"{arguments.text.name}: {len(text)} characters, {len(alphabet)} of them different")
    model = GPT(len(alphabet), arguments.dropout)
    train(model, ids, arguments.steps)

    print(f"characters predicted right: {accuracy(model, ids):.0%}")
    print("".join(alphabet[k] for k in continued(model, ids[:CONTEXT], 100)))


if __name__ == "__main__":
    main()
