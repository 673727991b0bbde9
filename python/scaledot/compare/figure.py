"""The plot: how many times faster scaledot is, for each feature and dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .features import PASSES, SHORT_DTYPES
from .report import Key, geomean, ratio_of, ratios
from .run import Row

_COLOURS = {"float32": "#27548a", "bfloat16": "#e08e45", "float16": "#5f9e78", "float64": "#8b7ab8"}
_INK, _FAINT, _GRID, _BAD = "#22303c", "#6b7883", "#e3e7ea", "#c0392b"
_BAR = 0.26  # of the distance between two features


def draw(rows: Sequence[Row], machine: dict[str, Any], path: Path) -> None:
    """Bars: the geometric mean over a group's shapes; lines: all of them. One panel for each pass."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = ratios(rows)
    wrong = {(row.case.group, row.case.dtype_name) for row in rows if not row.verdict.passed}
    shown = wrong | {(group, dtype) for group, dtype, _ in table}
    groups = [g for g in dict.fromkeys(row.case.group for row in rows) if any(g == group for group, _ in shown)]
    dtypes = [name for name in _COLOURS if any(name == dtype for _, dtype in shown)]
    passes = [name for name in PASSES if any(which == name for _, _, which in table)]
    everything = [v for values in table.values() for v in values]
    low, high = min(0.8, min(everything) / 1.15), max(2.0, max(everything))
    limits = low, high * (high / low) ** 0.16  # with room for the last number

    height = 1.95 + len(groups) * max(0.4, 0.16 * len(dtypes) + 0.1)
    figure = Figure(figsize=(max(8.6, 3.0 + 4.3 * len(passes)), height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    inch = 1 / height
    panels = figure.subplots(1, len(passes), sharey=True, squeeze=False)[0]
    width = figure.get_figwidth()
    figure.subplots_adjust(
        left=2.35 / width, right=1 - 0.3 / width, top=1 - 1.45 * inch, bottom=0.42 * inch, wspace=0.07
    )
    for panel, which in zip(panels, passes, strict=True):
        _panel(panel, table, wrong, groups, dtypes, which, limits)
    _group_labels(panels[0], groups, rows)

    left = 0.3 / width
    figure.text(
        left, 1 - 0.34 * inch, "How many times faster than PyTorch?", size=15, weight="bold", color=_INK, va="center"
    )
    figure.text(left, 1 - 0.66 * inch, _subtitle(machine), size=8.5, color=_FAINT, va="center")
    handles = [_patch(_COLOURS[name], SHORT_DTYPES[name]) for name in dtypes]
    figure.legend(
        handles=handles,
        loc="center right",
        bbox_to_anchor=(1 - 0.25 / width, 1 - 0.34 * inch),
        ncols=len(dtypes),
        frameon=False,
        fontsize=9.5,
        labelcolor=_INK,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.2,
    )
    figure.savefig(path)


def _subtitle(machine: dict[str, Any]) -> str:
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    return (
        f"{machine['name']}, {threads}  ·  scaledot {machine['scaledot']} ({machine['capability']})  ·  "
        f"torch {machine['torch']}  ·  bars: geometric mean, lines: all shapes"
    )


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _panel(
    ax: Any,
    table: dict[Key, list[float]],
    wrong: set[tuple[str, str]],
    groups: list[str],
    dtypes: list[str],
    which: str,
    limits: tuple[float, float],
) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.set_xscale("log")
    ax.set_xlim(*limits)
    ax.xaxis.set_major_locator(FixedLocator(_ticks(*limits)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×" if x >= 1 else f"1/{1 / x:g}×"))
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color=_GRID, linewidth=0.8)
    for number in range(1, len(groups), 2):
        ax.axhspan(number - 0.5, number + 0.5, color="#f6f8f9", zorder=0)
    bar = min(_BAR, 0.8 / len(dtypes))
    for i, group in enumerate(groups):
        for j, dtype in enumerate(dtypes):
            values, y = table.get((group, dtype, which)), i + (j - (len(dtypes) - 1) / 2) * bar
            style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": 7.2}
            if (group, dtype) in wrong:
                ax.annotate(f"{SHORT_DTYPES[dtype]}: wrong results", (1, y), (4, 0), color=_BAD, **style)
                continue
            if not values:
                continue
            mean = geomean(values)
            ax.barh(
                y, mean - 1, left=1, height=bar * 0.86, color=_COLOURS[dtype], alpha=1 if mean >= 1 else 0.55, zorder=2
            )
            if len(values) > 1:
                ax.plot((min(values), max(values)), (y, y), color=_INK, alpha=0.6, linewidth=1.0, zorder=4)
            end = max(mean, 1.0, *values)
            ax.annotate(ratio_of(mean).replace("x", "×"), (end, y), (4, 0), color=_INK, **style)
    ax.axvline(1, color=_INK, linewidth=1.1, zorder=3)
    ax.set_title(PASSES[which], loc="left", size=10.5, color=_INK, pad=20, weight="bold")
    ax.tick_params(axis="x", colors=_FAINT, labelsize=8.5, length=0, pad=4, labeltop=True)
    ax.tick_params(axis="y", length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def _ticks(low: float, high: float) -> list[float]:
    """Powers of 2, or of 4 or more, so that there are at most eight."""
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = next(n for n in range(1, len(powers) + 1) if len([p for p in powers if p % n == 0]) <= 8)
    return [2.0**p for p in powers if p % step == 0]


def _group_labels(ax: Any, groups: list[str], rows: Sequence[Row]) -> None:
    """The feature, and below it in small type what torch runs for it."""
    ax.set_yticks(range(len(groups)), [])
    for i, group in enumerate(groups):
        peers = list(dict.fromkeys(row.peer for row in rows if row.case.group == group and row.passes))
        style: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "annotation_clip": False}
        ax.annotate(group, (0, i), (-8, 4.5), textcoords="offset points", va="center", size=9.5, color=_INK, **style)
        ax.annotate(
            "vs " + " / ".join(peers),
            (0, i),
            (-8, -6.5),
            textcoords="offset points",
            va="center",
            size=6.8,
            color=_FAINT,
            **style,
        )
