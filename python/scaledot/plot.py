"""Heat maps of attention weights. They need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import described
from ._keywords import check_keywords
from .fonts import families_for

__all__ = ["attention_heatmap"]

_COLOURS = "Blues"
_ANNOTATED_CELL = 0.36  # inches: the smallest cell that has room for a number
_LABELLED = 64  # the largest number of tokens that all get a label


@check_keywords
def attention_heatmap(
    weights: Any,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    """Draws attention weights as a heat map: one row per query, one column per key, darker for more weight.

    Rows, columns and heads are numbered from 0, as they are indexed in `weights`.

    Args:
        weights: a tensor of real numbers, or anything that ``torch.as_tensor`` accepts. Shape (Lq, Lk) gives one map.
            Shape (H, Lq, Lk) gives a grid with one map per head, titled "head 0" to "head H-1", all on one colour
            scale. Further leading dimensions of size 1 are dropped: (1, H, Lq, Lk) is drawn as (H, Lq, Lk).
        query_tokens: Lq labels for the rows; default the row numbers. Labels may be in any script: the installed fonts
            are searched for the glyphs, and a warning says what to install if no font has them.
        key_tokens: Lk labels for the columns; default `query_tokens` if Lq == Lk, otherwise the column numbers.
        ax: the matplotlib Axes to draw one map into; default a new figure.

    Returns:
        The matplotlib Axes, or a numpy array of H Axes for a grid. The figure is ``ax.figure``.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: the weights are complex or no numbers, or tokens are not a sequence.
        ValueError: the shape of `weights` or the number of tokens does not fit, or `ax` is given for a grid.

    Example:
        >>> attention = scaledot.MultiHeadAttention(16, 4)
        >>> output, weights = attention(torch.randn(1, 4, 16), need_weights=True)
        >>> ax = scaledot.plot.attention_heatmap(weights[0, 3], ["我", "喜欢", "深度", "学习"])
        >>> ax.figure.savefig("head_3.png")
    """
    maps = _maps(weights)
    rows, columns = maps.shape[-2:]
    if key_tokens is None and rows == columns:
        key_tokens = query_tokens
    query_labels = _labels("query_tokens", query_tokens, rows)
    key_labels = _labels("key_tokens", key_tokens, columns)
    if ax is not None and maps.dim() == 3:
        raise ValueError(f"ax: got one Axes for {len(maps)} heads; needs None, or the weights of one head")
    if ax is not None and not hasattr(ax, "imshow"):
        raise TypeError(f"ax: got {described(ax)}; needs a matplotlib Axes, or None")
    pyplot = _pyplot()
    families = families_for([*(query_labels or ()), *(key_labels or ())])

    if maps.dim() == 3:
        return _grid(pyplot, maps, query_labels, key_labels, families)
    if ax is None:
        cell = _cell(rows, columns)
        size = (max(columns * cell, 2.6) + 2.0, max(rows * cell, 2.2) + 1.2)  # inches, with room for labels
        _, ax = pyplot.subplots(figsize=size, layout="compressed")
    image = _draw(ax, maps, query_labels, key_labels, families, _largest(maps))
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    width, height = (points / ax.figure.dpi for points in ax.get_window_extent().size)  # inches
    if min(width / columns, height / rows) >= _ANNOTATED_CELL:
        _annotate(ax, maps, image)
    bar = ax.inset_axes([1 + 0.12 / width, 0, 0.18 / width, 1])  # the height of the map
    ax.figure.colorbar(image, cax=bar, label="attention weight")
    return ax


def _grid(
    pyplot: Any,
    maps: Tensor,
    query_labels: list[str] | None,
    key_labels: list[str] | None,
    families: list[str],
) -> Any:
    heads, rows, columns = maps.shape
    across = 3 if heads in (3, 5, 6, 9) else min(heads, 4)
    down = math.ceil(heads / across)
    cell = 0.5 * _cell(rows, columns)
    size = (max(columns * cell, 1.5) * across + 1.8, max(rows * cell + 0.3, 1.5) * down + 0.8)
    figure, grid = pyplot.subplots(down, across, figsize=size, layout="compressed", squeeze=False)
    axes = grid.ravel()
    for head in range(heads):
        image = _draw(axes[head], maps[head], query_labels, key_labels, families, _largest(maps), 0.75)
        axes[head].set_title(f"head {head}", fontsize="medium")
        if head % across:
            axes[head].tick_params(labelleft=False)
        if head + across < heads:
            axes[head].tick_params(labelbottom=False)
    for unused in axes[heads:]:
        unused.remove()
    figure.supxlabel("key", fontsize="medium")
    figure.supylabel("query", fontsize="medium")
    figure.colorbar(image, ax=list(axes[:heads]), label="attention weight", aspect=30, pad=0.02)
    return axes[:heads]


def _cell(rows: int, columns: int) -> float:
    """The side of a cell in inches; the whole map is at most 9 inches long."""
    return min(0.62, 9.0 / max(rows, columns))


def _maps(weights: Any) -> Tensor:
    """(Lq, Lk) or (H, Lq, Lk), float64, on the CPU."""
    try:
        tensor = weights.detach() if isinstance(weights, Tensor) else torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"weights: got {described(weights)}; needs a tensor, or what makes one") from None
    if tensor.is_complex():
        raise TypeError(f"weights: got dtype {tensor.dtype}; needs real numbers")
    shape = tuple(tensor.shape)
    while tensor.dim() > 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() not in (2, 3):
        raise ValueError(f"weights: got shape {shape}; needs (Lq, Lk) or (H, Lq, Lk), such as weights[0] of a batch")
    if not tensor.numel():
        raise ValueError(f"weights: got shape {shape}; needs at least one query, one key and one head")
    return tensor.to("cpu", torch.float64)


def _labels(name: str, tokens: Sequence[str] | None, length: int) -> list[str] | None:
    if tokens is None:
        return None
    if not isinstance(tokens, Iterable):
        raise TypeError(f"{name}: got {described(tokens)}; needs a sequence of {length} tokens, or None")
    labels = [str(token).replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r") for token in tokens]
    if len(labels) != length:
        raise ValueError(f"{name}: got {len(labels)} tokens; needs {length}, from the shape of weights")
    return labels


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("attention_heatmap needs matplotlib: run `pip install matplotlib`") from error
    return pyplot


def _largest(maps: Tensor) -> float:
    finite = maps[torch.isfinite(maps)]
    return float(finite.max()) if finite.numel() and float(finite.max()) > 0 else 1.0


def _draw(
    ax: Any,
    weights: Tensor,
    query_labels: list[str] | None,
    key_labels: list[str] | None,
    families: list[str],
    largest: float,
    text_scale: float = 1.0,
) -> Any:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    colours = colormaps[_COLOURS].with_extremes(bad="0.8")  # NaN is grey, which is not on the colour scale
    image = ax.imshow(weights.tolist(), cmap=colours, vmin=0.0, vmax=largest, interpolation="nearest")
    rows, columns = weights.shape
    for axis, labels, length in ((ax.yaxis, query_labels, rows), (ax.xaxis, key_labels, columns)):
        if labels is None:
            axis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
            continue
        step = math.ceil(length / _LABELLED)
        size = text_scale * (10.0 if length <= 24 else max(5.0, 240.0 / length))
        axis.set_ticks(range(0, length, step))
        # Without parse_math=False, a "$" in a token would start a formula.
        axis.set_ticklabels(labels[::step], fontfamily=families, fontsize=size, parse_math=False)
    if key_labels is not None and max(map(len, key_labels)) > 2:
        for label in ax.get_xticklabels():
            label.set(rotation=45, ha="right", rotation_mode="anchor")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if max(rows, columns) <= _LABELLED:  # white lines between the cells
        ax.set_xticks([k - 0.5 for k in range(columns + 1)], minor=True)
        ax.set_yticks([k - 0.5 for k in range(rows + 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=1.0)
        ax.tick_params(which="minor", length=0)
    return image


def _annotate(ax: Any, weights: Tensor, image: Any) -> None:
    """Writes each cell's number in black or white, whichever has more contrast."""
    for i, row in enumerate(weights.tolist()):
        for j, weight in enumerate(row):
            colour = _readable_on(image.cmap(image.norm(weight)))
            ax.text(j, i, f"{weight:.2f}", ha="center", va="center", fontsize=8, color=colour)


def _readable_on(background: Sequence[float]) -> str:
    """ "black" or "white", whichever has the higher contrast ratio on an sRGB colour.

    WCAG 2.2: contrast = (lighter luminance + 0.05) / (darker luminance + 0.05).
    """
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in background[:3])
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"
