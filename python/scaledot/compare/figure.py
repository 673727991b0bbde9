"""The plot: how many times faster scaledot is, for each group and dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .features import PASSES, SHORT_DTYPES
from .noise import SPREAD_LIMIT, Load
from .report import Key, geomean, marked_ratios, ratio_of
from .run import Row

_COLOURS = {"float32": "#27548a", "bfloat16": "#e08e45", "float16": "#5f9e78", "float64": "#8b7ab8"}
_INK, _FAINT, _GRID, _BAD, _NOISY = "#22303c", "#6b7883", "#e3e7ea", "#c0392b", "#b4bac0"
# GitHub shows a README's image about 900 px wide, so 100 px per inch: 9 points are then 12 px. The file has twice as
# many pixels, for dense screens.
_WIDTH, _DPI = 9.0, 200  # inches
_TITLE, _TEXT, _SMALL = 15.0, 10.5, 9.0  # points
_LABELS, _MARGIN, _TOP, _BOTTOM = 1.9, 0.2, 1.6, 0.3  # inches left (at least), right, above and below the panels
_LETTER, _SMALL_LETTER = 0.083, 0.066  # inches per letter of a label, and of the small line below it
_FURTHEST = 64.0  # bars end at this ratio, or at 1 / 64; the number next to the bar is exact
_LINE, _GAP, _NUMBER = 0.155, 0.13, 0.56  # inches per bar, between two features, and for the number next to a bar

Ratios = dict[Key, list[tuple[float, bool]]]  # (ratio, whether it is noisy) of each shape


@dataclass(frozen=True)
class Chart:
    """The content of a plot. A panel's name is the third part of the table's keys."""

    title: str
    subtitle: tuple[str, str]
    panels: dict[str, str]  # name and title
    groups: dict[str, str]  # name and the small line below it
    table: Ratios
    wrong: set[tuple[str, str]]  # group and dtype
    load_too_high: bool


def draw(rows: Sequence[Row], machine: dict[str, Any], path: Path, load: Load) -> None:
    """Draws one panel per pass into the file `path`.

    A bar is the geometric mean over the shapes of a group; a dot is one shape. Timings that are too noisy to trust are
    grey: all of them if the load average was too high.
    """
    table = {
        key: [(ratio, noisy or load.too_high) for ratio, noisy in values]
        for key, values in marked_ratios(rows).items()
    }
    groups = dict.fromkeys(row.case.group for row in rows)
    chart = Chart(
        title=_title(machine),
        subtitle=_subtitle(machine),
        panels=PASSES,
        groups={group: _peers(rows, group) for group in groups},
        table=table,
        wrong={(row.case.group, row.case.dtype_name) for row in rows if not row.verdict.passed},
        load_too_high=load.too_high,
    )
    draw_chart(chart, path)


def draw_chart(chart: Chart, path: Path) -> None:
    """Draws a chart into the file `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table, wrong = chart.table, chart.wrong
    any_noisy = any(noisy for values in table.values() for _, noisy in values)
    shown = wrong | {(group, dtype) for group, dtype, _ in table}
    groups = [g for g in chart.groups if any(g == group for group, _ in shown)]
    dtypes = [name for name in _COLOURS if any(name == dtype for _, dtype in shown)]
    names = [name for name in chart.panels if any(which == name for _, _, which in table)]
    everything = [_within(ratio) for values in table.values() for ratio, _ in values]
    low, high = min(0.8, min(everything) / 1.15), max(2.0, max(everything))
    widest = max(max(_LETTER * len(g), _SMALL_LETTER * len(chart.groups[g])) for g in groups)
    labels = max(_LABELS, _MARGIN + widest)
    panel = (_WIDTH - labels - _MARGIN) / len(names) - 0.1
    limits = low, high * (high / low) ** (_NUMBER / (panel - _NUMBER))

    height = _TOP + _BOTTOM + len(groups) * _row(dtypes)
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(
        left=labels / _WIDTH, right=1 - _MARGIN / _WIDTH, top=1 - _TOP / height, bottom=_BOTTOM / height, wspace=0.07
    )
    for panel, which in zip(panels, names, strict=True):
        _panel(panel, table, wrong, groups, dtypes, which, limits)
        panel.set_title(chart.panels[which], loc="left", size=_TEXT, color=_INK, pad=21, weight="bold")
    _group_labels(panels[0], groups, chart)

    def write(inches: float, text: str, **style: Any) -> None:
        figure.text(_MARGIN / _WIDTH, 1 - inches / height, text, va="center", **style)

    write(0.3, chart.title, size=_TITLE, weight="bold", color=_INK)
    for number, line in enumerate(chart.subtitle):
        write(0.6 + 0.2 * number, line, size=_SMALL, color=_FAINT)
    def legend(inches: float, handles: list[Any]) -> None:
        figure.legend(
            handles=handles,
            loc="center right",
            bbox_to_anchor=(1 - _MARGIN / _WIDTH, 1 - inches / height),
            ncols=len(handles),
            frameon=False,
            fontsize=_SMALL,
            labelcolor=_INK,
            handlelength=1.0,
            handleheight=1.0,
            columnspacing=1.2,
            borderaxespad=0,
        )

    legend(0.3, [_patch(_COLOURS[name], SHORT_DTYPES[name]) for name in dtypes])
    if any_noisy:
        legend(0.8, [_patch(_NOISY, "load too high" if chart.load_too_high else f"noisy: IQR > {SPREAD_LIMIT:.0%}")])
    figure.savefig(path)


def _row(dtypes: Sequence[str]) -> float:
    """Inches from one feature to the next: enough for its bars and for the two lines of its label."""
    return max(_LINE * len(dtypes) + _GAP, 0.42)


def _within(ratio: float) -> float:
    return min(max(ratio, 1 / _FURTHEST), _FURTHEST)


def _device(machine: dict[str, Any]) -> str:
    return "GPU" if str(machine["device"]).startswith("cuda") else "CPU"


def _title(machine: dict[str, Any]) -> str:
    return f"{_device(machine)}: how many times faster than PyTorch?"


def _subtitle(machine: dict[str, Any]) -> tuple[str, str]:
    return (
        machine_line(machine),
        "Medians, both timed in turn. Bars and numbers: geometric mean over the shapes; dots: each shape.",
    )


def machine_line(machine: dict[str, Any]) -> str:
    """The processor, the threads and the versions."""
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    return (
        f"{machine['name']}, {threads}  ·  scaledot {machine['scaledot']} ({machine['capability']})  ·  "
        f"torch {machine['torch']} ({machine['torch_capability']})"
    )


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _panel(
    ax: Any,
    table: Ratios,
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
            style: dict[str, Any] = {"textcoords": "offset points", "va": "center_baseline", "size": _SMALL}
            if (group, dtype) in wrong:
                ax.annotate(f"{SHORT_DTYPES[dtype]}: wrong results", (1, y), (5, 0), color=_BAD, **style)
                continue
            if not values:
                continue
            points = [ratio for ratio, _ in values]
            mean, noisy = geomean(points), any(mark for _, mark in values)
            colour = _NOISY if noisy else _COLOURS[dtype]
            ax.barh(y, _within(mean) - 1, left=1, height=bar * 0.84, color=colour, alpha=1 if mean >= 1 else 0.55)
            if len(values) > 1:
                dots: dict[str, Any] = {"s": 9, "edgecolors": "white", "linewidths": 0.4, "zorder": 4}
                colours = [_FAINT if mark else _INK for _, mark in values]
                ax.scatter(list(map(_within, points)), [y] * len(points), c=colours, **dots)
            end = _within(max(mean, 1.0, *points))
            ink = _FAINT if noisy else _INK
            ax.annotate(ratio_of(mean).replace("x", "×"), (end, y), (5, 0), color=ink, **style)
    ax.axvline(1, color=_INK, linewidth=1.1, zorder=3)
    ax.tick_params(axis="x", colors=_FAINT, labelsize=_SMALL, length=0, pad=4, labeltop=True)
    ax.tick_params(axis="y", length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def _ticks(low: float, high: float) -> list[float]:
    """At most eight ticks: powers of 2, or of 4, 8, ... if the range is wide."""
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = next(n for n in range(1, len(powers) + 1) if len([p for p in powers if p % n == 0]) <= 8)
    return [2.0**p for p in powers if p % step == 0]


def _group_labels(ax: Any, groups: list[str], chart: Chart) -> None:
    """Labels each row with the group and, in small type, with the line below it."""
    ax.set_yticks(range(len(groups)), [])
    for i, group in enumerate(groups):
        for text, size, colour, up in ((group, _TEXT, _INK, 6.0), (chart.groups[group], _SMALL, _FAINT, -6.0)):
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


def _peers(rows: Sequence[Row], group: str) -> str:
    """The label of what torch runs for the group: for "F.sdpa flash" and "F.sdpa math", "vs F.sdpa flash, math"."""
    peers = list(dict.fromkeys(row.peer for row in rows if row.case.group == group and row.passes))
    known = "F.sdpa "
    shown = [peer.removeprefix(known) if i and peers[0].startswith(known) else peer for i, peer in enumerate(peers)]
    return "vs " + ", ".join(shown) if peers else ""
