"""A trained model on real sentences: all-MiniLM-L6-v2 through Hugging Face transformers (tests/models/minilm.py)."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models import minilm


@functools.cache
def encoder(implementation: str) -> minilm.Encoder:
    return minilm.Encoder(implementation)


@torch.no_grad()
def test_embeddings_are_those_of_eager_attention() -> None:
    expected, found = encoder("eager")(minilm.SENTENCES), encoder("scaledot")(minilm.SENTENCES)
    assert found.shape == (len(minilm.SENTENCES), 384)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    together = encoder("scaledot")(minilm.SENTENCES)
    alone = torch.cat([encoder("scaledot")([sentence]) for sentence in minilm.SENTENCES])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@torch.no_grad()
def test_similar_sentences_are_similar() -> None:
    music, audience, market, shares, cat = encoder("scaledot")(minilm.SENTENCES)
    assert min(music @ audience, market @ shares) > 0.5
    assert max(music @ market, music @ shares, audience @ market, cat @ music, cat @ market) < 0.1


def test_weights_are_those_of_eager_attention() -> None:
    tokens, expected = encoder("eager").attention(minilm.TO_PLOT)
    tokens_again, found = encoder("scaledot").attention(minilm.TO_PLOT)
    assert tokens == tokens_again == ["[CLS]", *minilm.TO_PLOT[:-1].lower().split(), ".", "[SEP]"]
    assert found.shape == (6, 12, len(tokens), len(tokens))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
    # The head that is drawn by default resolves the pronoun.
    assert tokens[found[3, 1, tokens.index("it")].argmax()] == "animal"


def test_heat_map(tmp_path: Path) -> None:
    file = tmp_path / "heatmap.png"
    minilm.plot(encoder("scaledot"), minilm.TO_PLOT, str(file), layer=3, head=1)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_fine_tuning_without_dropout_is_eagers() -> None:
    eager, ours = (minilm.fine_tune(name, steps=8, dropout=0.0) for name in ("eager", "scaledot"))
    assert ours == pytest.approx(eager, rel=1e-3)


def test_fine_tuning_with_dropout() -> None:
    eager, ours = (minilm.fine_tune(name, steps=24, dropout=0.1) for name in ("eager", "scaledot"))
    print("eager   ", " ".join(f"{loss:.3f}" for loss in eager))
    print("scaledot", " ".join(f"{loss:.3f}" for loss in ours))
    for losses in (eager, ours):
        assert sum(losses[-6:]) < 0.5 * sum(losses[:6])
    # Other weights are dropped, so the two go down together and not by the same numbers.
    assert sum(ours[-6:]) < 1.5 * sum(eager[-6:])
    assert sum(ours) == pytest.approx(sum(eager), rel=0.2)


def test_command() -> None:
    command = [sys.executable, str(minilm.__file__), "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "Largest difference from eager's embeddings:" in done.stdout
