"""scaledot.plot: the heat maps and their fonts."""

from __future__ import annotations

import io
import re
import sys
import warnings

import matplotlib
import pytest
import torch
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.ft2font import FT2Font

from scaledot import fonts
from scaledot.plot import attention_heatmap

matplotlib.use("Agg")
CHINESE = ["我", "喜欢", "深度", "学习"]


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def weights(*shape: int) -> torch.Tensor:
    return torch.softmax(torch.randn(shape), -1)


def labels(axis_labels) -> list[str]:
    return [label.get_text() for label in axis_labels]


def test_one_map() -> None:
    data = weights(3, 5).bfloat16().requires_grad_()
    ax = attention_heatmap(data, ["a", "b", "c"], ["one", "two", "three", "four", "five"])
    assert isinstance(ax, plt.Axes)
    assert labels(ax.get_yticklabels()) == ["a", "b", "c"]
    assert labels(ax.get_xticklabels()) == ["one", "two", "three", "four", "five"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    drawn = torch.tensor(ax.images[0].get_array().tolist())
    torch.testing.assert_close(drawn, data.detach().float())
    assert [text.get_text() for text in ax.texts] == [f"{x:.2f}" for x in data.detach().float().flatten().tolist()]
    assert ax.images[0].norm.vmin == 0.0


def test_numbers_have_contrast_with_their_cells() -> None:
    """A contrast ratio of at least 4.5, as WCAG requires of small text, on every colour of the scale and on NaN's."""
    ax = attention_heatmap(torch.cat([torch.linspace(0, 1, 99), torch.tensor([torch.nan])]).reshape(10, 10))
    image = ax.images[0]

    def luminance(colour) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return sum(part * c for part, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    used = set()
    for text, weight in zip(ax.texts, image.get_array().filled(torch.nan).flatten(), strict=True):
        pair = luminance(text.get_color()), luminance(image.cmap(image.norm(weight))[:3])
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5
        used.add(text.get_color())
    assert used == {"black", "white"}


def test_key_tokens_default_to_query_tokens_of_the_same_length() -> None:
    ax = attention_heatmap(weights(3, 3), ["a", "b", "c"])
    assert labels(ax.get_xticklabels()) == ["a", "b", "c"]
    ax = attention_heatmap(weights(3, 4), ["a", "b", "c"])
    assert labels(ax.get_xticklabels()) != ["a", "b", "c"]


def test_draws_into_given_axes() -> None:
    figure, axes = plt.subplots(1, 2)
    assert attention_heatmap(weights(3, 3), ax=axes[1]) is axes[1]
    assert not axes[0].images
    assert plt.get_fignums() == [figure.number]


def test_heads_make_a_grid() -> None:
    data = weights(1, 6, 4, 4)
    axes = attention_heatmap(data, CHINESE)
    assert axes.shape == (6,)
    assert [ax.get_title() for ax in axes] == [f"head {k}" for k in range(6)]
    for head, ax in enumerate(axes):
        torch.testing.assert_close(torch.tensor(ax.images[0].get_array().tolist()), data[0, head])
    assert len({ax.images[0].norm.vmax for ax in axes}) == 1
    assert isinstance(attention_heatmap(weights(1, 1, 4, 4)), plt.Axes)
    assert isinstance(attention_heatmap([[0.5, 0.5], [1.0, 0.0]]), plt.Axes)


@pytest.mark.parametrize("shape", [(1, 1), (2, 40), (130, 130), (7, 9, 9)])
def test_draws(shape: tuple[int, ...]) -> None:
    axes = attention_heatmap(weights(*shape), [f"token {k}\n$x$" for k in range(shape[-2])])
    ax = axes if isinstance(axes, plt.Axes) else axes[0]
    with io.BytesIO() as file:
        ax.figure.savefig(file, format="png")
        assert file.getvalue().startswith(b"\x89PNG")
    label = ax.get_yticklabels()[0]
    assert label.get_text() == "token 0\\n$x$"
    assert not label.get_parse_math()


def test_non_finite_weights_are_drawn() -> None:
    data = weights(3, 3)
    data[1] = torch.nan
    ax = attention_heatmap(data)
    ax.figure.canvas.draw()
    assert "nan" in [text.get_text() for text in ax.texts]
    attention_heatmap(torch.full((2, 2), torch.nan)).figure.canvas.draw()


def test_chinese_tokens() -> None:
    """Drawn in a font that has the glyphs; without such a font, one warning says what to install."""
    has_font = not fonts._choose(frozenset("".join(CHINESE)))[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ax = attention_heatmap(weights(4, 4), CHINESE)
        ax.figure.canvas.draw()
    messages = [str(warning.message) for warning in caught]
    if not has_font:
        assert len(messages) == 1, messages
        assert "fonts-noto-cjk" in messages[0]
        return
    assert messages == []
    for label in [*ax.get_xticklabels(), *ax.get_yticklabels()]:
        files = [font_manager.findfont(family) for family in label.get_fontfamily()]
        for character in label.get_text():
            assert any(FT2Font(file).get_char_index(ord(character)) for file in files)


def test_one_warning_if_no_font_has_the_glyphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_fallbacks", list)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ax = attention_heatmap(weights(4, 4), CHINESE)
        ax.figure.canvas.draw()  # where matplotlib would warn of each glyph
    (message,) = [str(warning.message) for warning in caught]
    assert re.search("no installed font has 7 of the characters .*fonts-noto-cjk", message)
    assert labels(ax.get_xticklabels()) == CHINESE


def test_other_missing_glyphs_still_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matplotlib's warnings of the characters in our own warning are silenced."""
    monkeypatch.setattr(fonts, "_fallbacks", list)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ax = attention_heatmap(weights(4, 4), CHINESE)
        ax.set_title("猫")
        ax.figure.canvas.draw()
    messages = [str(warning.message) for warning in caught]
    assert any(f"Glyph {ord('猫')} " in message for message in messages[1:])
    assert not any(f"Glyph {ord('我')} " in message for message in messages)


def test_default_font_is_enough_for_latin_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("searched all fonts")

    monkeypatch.setattr(fonts, "_fallbacks", fail)
    assert len(fonts.families_for(["The", "cat\t\n", "", "é"])) == 1


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: run `pip install matplotlib`"):
        attention_heatmap(weights(2, 2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(3),), ValueError, r"weights: got shape \(3,\)"),
        ((torch.ones(2, 2, 3, 3),), ValueError, r"weights: got shape \(2, 2, 3, 3\)"),
        ((torch.ones(0, 3),), ValueError, r"weights: got shape \(0, 3\)"),
        ((torch.ones(2, 2, dtype=torch.complex64),), TypeError, "weights: got dtype torch.complex64"),
        ((torch.ones(2, 3), ["a"]), ValueError, "query_tokens: got 1 tokens; needs 2"),
        ((torch.ones(2, 3), None, ["a"]), ValueError, "key_tokens: got 1 tokens; needs 3"),
        (
            (torch.ones(2, 3, 3), None, None, "an Axes"),
            ValueError,
            "ax: got one Axes for 2 heads; needs None",
        ),
    ],
)
def test_errors(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention_heatmap(*arguments)
