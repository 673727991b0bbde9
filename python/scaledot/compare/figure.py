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
# At twice the width of a README's column (some 900 px) every letter stays readable, and is sharp on dense screens.
_WIDTH, _DPI = 9.0, 200  # inches
_LABELS, _MARGIN, _TOP, _BOTTOM = 1.75, 0.2, 1.5, 0.3  # inches left of (at least), right of, above and below the panels
_LETTER = 0.074  # inches of a label
_FURTHEST = 64.0  # ratios end here, or at 1 / here: a longer bar would leave the others no room, and its number says it
_LINE, _GAP, _NUMBER = 0.145, 0.13, 0.5  # inches for a bar, between two features, and for the number behind a bar


def draw(rows: Sequence[Row], machine: dict[str, Any], path: Path) -> None:
    """Bars: the geometric mean over a group's shapes; dots: each of them. One panel for each pass."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = ratios(rows)
    wrong = {(row.case.group, row.case.dtype_name) for row in rows if not row.verdict.passed}
    shown = wrong | {(group, dtype) for group, dtype, _ in table}
    groups = [g for g in dict.fromkeys(row.case.group for row in rows) if any(g == group for group, _ in shown)]
    dtypes = [name for name in _COLOURS if any(name == dtype for _, dtype in shown)]
    passes = [name for name in PASSES if any(which == name for _, _, which in table)]
    everything = [_within(v) for values in table.values() for v in values]
    low, high = min(0.8, min(everything) / 1.15), max(2.0, max(everything))
    labels = max(_LABELS, _MARGIN + _LETTER * max(map(len, groups)))
    panel = (_WIDTH - labels - _MARGIN) / len(passes) - 0.1
    limits = low, high * (high / low) ** (_NUMBER / (panel - _NUMBER))

    height = _TOP + _BOTTOM + len(groups) * _row(dtypes)
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(passes), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(
        left=labels / _WIDTH, right=1 - _MARGIN / _WIDTH, top=1 - _TOP / height, bottom=_BOTTOM / height, wspace=0.07
    )
    for panel, which in zip(panels, passes, strict=True):
        _panel(panel, table, wrong, groups, dtypes, which, limits)
    _group_labels(panels[0], groups, rows)

    def write(inches: float, text: str, **style: Any) -> None:
        figure.text(_MARGIN / _WIDTH, 1 - inches / height, text, va="center", **style)

    write(0.3, "How many times faster than PyTorch?", size=15, weight="bold", color=_INK)
    for number, line in enumerate(_subtitle(machine)):
        write(0.58 + 0.19 * number, line, size=8.5, color=_FAINT)
    figure.legend(
        handles=[_patch(_COLOURS[name], SHORT_DTYPES[name]) for name in dtypes],
        loc="center right",
        bbox_to_anchor=(1 - _MARGIN / _WIDTH, 1 - 0.3 / height),
        ncols=len(dtypes),
        frameon=False,
        fontsize=9.5,
        labelcolor=_INK,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.2,
        borderaxespad=0,
    )
    figure.savefig(path)


def _row(dtypes: Sequence[str]) -> float:
    """Inches from one feature to the next; a feature's two lines of text need some of it."""
    return max(_LINE * len(dtypes) + _GAP, 0.36)


def _within(ratio: float) -> float:
    return min(max(ratio, 1 / _FURTHEST), _FURTHEST)


def _subtitle(machine: dict[str, Any]) -> tuple[str, str]:
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    return (
        f"{machine['name']}, {threads}  ·  scaledot {machine['scaledot']} ({machine['capability']})  ·  "
        f"torch {machine['torch']} ({machine['torch_capability']})",
        "Medians, both timed in turn. Bars and numbers: geometric mean over the shapes; dots: each shape.",
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
    bar = _LINE / _row(dtypes)
    for i, group in enumerate(groups):
        for j, dtype in enumerate(dtypes):
            values, y = table.get((group, dtype, which)), i + (j - (len(dtypes) - 1) / 2) * bar
            style: dict[str, Any] = {"textcoords": "offset points", "va": "center_baseline", "size": 7.8}
            if (group, dtype) in wrong:
                ax.annotate(f"{SHORT_DTYPES[dtype]}: wrong results", (1, y), (5, 0), color=_BAD, **style)
                continue
            if not values:
                continue
            mean = geomean(values)
            ax.barh(
                y, _within(mean) - 1, left=1, height=bar * 0.84, color=_COLOURS[dtype], alpha=1 if mean >= 1 else 0.55
            )
            if len(values) > 1:
                dots: dict[str, Any] = {"s": 7, "color": _INK, "edgecolors": "white", "linewidths": 0.4, "zorder": 4}
                ax.scatter(list(map(_within, values)), [y] * len(values), **dots)
            end = _within(max(mean, 1.0, *values))
            ax.annotate(ratio_of(mean).replace("x", "×"), (end, y), (5, 0), color=_INK, **style)
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
        peers = dict.fromkeys(row.peer for row in rows if row.case.group == group and row.passes)
        for text, size, colour, up in ((group, 9.5, _INK, 5.0), (_vs(list(peers)), 7.6, _FAINT, -6.0)):
            ax.annotate(
                text,
                (0, i),
                (-7, up),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center",
                size=size,
                color=colour,
                annotation_clip=False,
            )


def _vs(peers: list[str]) -> str:
    """["F.sdpa flash", "F.sdpa math"]: "vs F.sdpa flash, math"."""
    known = "F.sdpa "
    shown = [peer.removeprefix(known) if i and peers[0].startswith(known) else peer for i, peer in enumerate(peers)]
    return "vs " + ", ".join(shown) if peers else ""
