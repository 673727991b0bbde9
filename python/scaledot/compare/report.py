"""The table and the summary, and what the JSON file has of a case."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from .check import Finding
from .columns import Column, Columns, wrapped
from .features import PASSES, SHORT_DTYPES, SHORT_PASSES, Case
from .noise import SPREAD_LIMIT, is_noisy, spread
from .run import Pair, Row

_COLOUR = re.compile("\033\\[[0-9;]*m")
RED, _GREEN, _YELLOW, BOLD, _PLAIN = "\033[31;1m", "\033[32m", "\033[33m", "\033[1m", "\033[0m"

_CELL = 18  # the width of a column of the summary

Key = tuple[str, str, str]  # group, dtype, pass


class Paint:
    """Colours text on a terminal and leaves it plain in a file."""

    def __init__(self, coloured: bool) -> None:
        self.coloured = coloured

    def __call__(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self.coloured else text

    def ratio(self, text: str, ratio: float | None) -> str:
        return text if ratio is None else self(text, _GREEN if ratio >= 1 else _YELLOW)


def time_of(seconds: float) -> str:
    """Three digits and a unit, such as 12.3 us."""
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1.0, "s")):
        amount = seconds * factor
        if amount < 999.5 or unit == "s":
            digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
            return f"{amount:.{digits}f} {unit}"
    raise AssertionError("unreachable: seconds take any amount")


def ratio_of(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    digits = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:.{digits}f}x"


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """The versions and the machine."""
    plural = "" if machine["threads"] == 1 else "s"
    return [
        f"scaledot {machine['scaledot']} against torch {machine['torch']}",
        f"{machine['name']}, {machine['device']}, {machine['threads']} thread{plural} of {machine['cores']} cores; "
        f"instructions: scaledot {machine['capability']}, torch {machine['torch_capability']}",
    ]


def head_lines(machine: dict[str, Any], passes: Iterable[str]) -> list[str]:
    """The lines above the table: the versions, the machine, and what the columns mean."""
    return [
        *machine_lines(machine),
        f"{', '.join(PASSES[p] for p in passes)}: medians, both sides timed in turn; ratio = torch's time / scaledot's",
        f"!: too noisy to trust, because an IQR is above {SPREAD_LIMIT:.0%} of its median",
        "error: largest error against float64 / largest element; limit: 2 x eager torch's (gradients 3 x) + 2 ulp",
    ]


class Table:
    """Lines with fixed columns, so that each line can be printed as soon as it is measured."""

    def __init__(self, cases: Sequence[Case], paint: Paint, width: int | None = None) -> None:
        """`width`: of the terminal; columns that do not fit are left out. None: all columns."""
        self.paint = paint
        self.feature = max([len("feature"), *(len(c.group) for c in cases)])
        self.shape = max([len("shape"), *(len(str(c.shape)) for c in cases)])
        self.columns = Columns(
            [
                Column("feature", self.feature, left=True),
                Column("shape", self.shape, left=True),
                Column("type", 4, left=True),
                Column("pass", 8, left=True),
                Column("scaledot", 8),
                Column("IQR", 4, drop=3),
                Column("torch", 8),
                Column("IQR", 4, drop=3),
                Column("ratio", 8),
                Column("error", 7, drop=2),
                Column("torch's", 7, drop=2),
                Column("limit", 7, drop=2),
                Column("kernel", 16, left=True, drop=1),
                Column("torch runs", 21, left=True, drop=1),
            ],
            width,
            first=4,
        )

    def heading(self) -> str:
        names, rule = self.columns.heading()
        return self.paint(names, BOLD) + "\n" + rule

    def lines(self, row: Row) -> list[str]:
        case = row.case
        first = (case.group, str(case.shape), SHORT_DTYPES[case.dtype_name])
        if not row.verdict.passed:
            line = f"{first[0]:<{self.feature}}  {first[1]:<{self.shape}}  {first[2]:<4}  FAIL  "
            return [self.paint(line + problem, RED) for problem in row.verdict.problems()]
        lines = []
        for which, pair in row.passes.items():
            worst = row.verdict.worst(gradient=which != "forward")
            errors = ["-"] * 3
            if worst is not None:
                sizes = (worst.ours, worst.peer, worst.allowed)
                errors = ["-" if math.isnan(e) else f"{e / (worst.scale or 1.0):.1e}" for e in sizes]
            times = [time_of(pair.ours.median), percent(pair.ours.iqr, pair.ours.median), "-", "-"]
            if pair.peer is not None:
                times[2:] = [time_of(pair.peer.median), percent(pair.peer.iqr, pair.peer.median)]
            kernel = row.kernels["forward" if which == "forward" else "backward"]
            peer = f"not run: {row.peer_skipped}" if row.peer_skipped else row.peer
            ratio = marked(ratio_of(pair.ratio), is_noisy(pair))
            cells = [*first, SHORT_PASSES[which], *times, ratio, *errors, kernel, peer]
            lines.append(self.columns.line(cells, {8: self._paint_ratio(ratio, pair)}))
        return lines

    def _paint_ratio(self, text: str, pair: Pair) -> str:
        return self.paint(text, RED) if is_noisy(pair) else self.paint.ratio(text, pair.ratio)


def marked(ratio: str, noisy: bool) -> str:
    """The ratio, with "!" if it is noisy and a blank otherwise."""
    return ratio + ("!" if noisy else " ")


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%"


# ------------------------------------------------------------------------------------------------------ summary
def ratios(rows: Iterable[Row]) -> dict[Key, list[float]]:
    """The peer's time / our time of every shape, by group, dtype and pass."""
    return {key: [ratio for ratio, _ in values] for key, values in marked_ratios(rows).items()}


def marked_ratios(rows: Iterable[Row]) -> dict[Key, list[tuple[float, bool]]]:
    """The numbers of `ratios`, each with whether its timings are noisy."""
    found: dict[Key, list[tuple[float, bool]]] = {}
    for row in rows:
        for which, pair in row.passes.items():
            if pair.ratio is not None:
                key = (row.case.group, row.case.dtype_name, which)
                found.setdefault(key, []).append((pair.ratio, is_noisy(pair)))
    return found


def costs(rows: Sequence[Row]) -> dict[Key, list[float]]:
    """Our time / our own time of the plain case at the same shape."""
    plain = {
        (row.case.base, row.case.dtype_name, which): pair.ours.median
        for row in rows
        if row.case.feature_name == "plain"
        for which, pair in row.passes.items()
    }
    found: dict[Key, list[float]] = {}
    for row in rows:
        for which, pair in row.passes.items():
            base = plain.get((row.case.base, row.case.dtype_name, which))
            if base is not None and row.case.feature_name != "plain" and not row.case.feature.module:
                key = (row.case.group, row.case.dtype_name, which)
                found.setdefault(key, []).append(pair.ours.median / base)
    return found


def summary_lines(rows: Sequence[Row], paint: Paint, width: int | None = None) -> list[str]:
    """The geometric means of the ratios, and of the costs relative to the plain case. `width`: of the terminal."""

    def faster(values: list[float]) -> str:
        return paint.ratio(_mean_and_extreme(values, min), geomean(values))

    noisy = {key for key, values in marked_ratios(rows).items() if any(mark for _, mark in values)}
    title = "Speed: torch's time / scaledot's, geometric mean (smallest)"
    lines = _block(title, ratios(rows), faster, paint, width, noisy)
    own = costs(rows)
    if own:
        title = "Cost: time / scaledot's own plain time at the same shape, geometric mean (largest)"
        lines += ["", *_block(title, own, lambda values: _mean_and_extreme(values, max), paint, width)]
    return lines


def _right(text: str, width: int) -> str:
    """rjust that ignores the colour codes."""
    return " " * (width - len(_COLOUR.sub("", text))) + text


def _mean_and_extreme(values: list[float], extreme: Callable[[list[float]], float]) -> str:
    mean = ratio_of(geomean(values))
    return mean if len(values) == 1 else f"{mean} ({ratio_of(extreme(values))})"


def _block(
    title: str,
    table: dict[Key, list[float]],
    show: Callable[[list[float]], str],
    paint: Paint,
    width: int | None,
    noisy: Collection[Key] = (),
) -> list[str]:
    """A line for each group and a column for each dtype and pass. Cells of the keys in `noisy` are marked.

    Columns that do not fit the width follow below, with the groups again.
    """
    columns = list(dict.fromkeys((dtype, which) for _, dtype, which in table))
    groups = list(dict.fromkeys(group for group, _, _ in table))
    first = max([len(group) for group in groups], default=0)
    everything = {column: [v for (_, *c), vs in table.items() if tuple(c) == column for v in vs] for column in columns}
    wanted = [(group, {column: table.get((group, *column), []) for column in columns}) for group in groups]
    if len(groups) > 1:
        wanted.append(("all", everything))
    lines, fitting = [paint(wrapped(title, width), BOLD)], len(columns) or 1
    if width is not None:
        fitting = min(max((width - first) // _CELL, 1), fitting)
    for start in range(0, len(columns), fitting):
        part = columns[start : start + fitting]
        heads = [f"{SHORT_DTYPES[dtype]} {SHORT_PASSES[which]}" for dtype, which in part]
        lines.append(" " * first + "".join(f"  {head:>15} " for head in heads).rstrip())
        for group, cells in wanted:
            texts = [show(values) if (values := cells[column]) else "-" for column in part]
            marks = ["!" if (group, *column) in noisy else " " for column in part]
            cells_text = (f"  {_right(text, 15)}{mark}" for text, mark in zip(texts, marks, strict=True))
            lines.append((f"{group:<{first}}" + "".join(cells_text)).rstrip())
    return lines


# ------------------------------------------------------------------------------------------------------ JSON
def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The measurements. NaN and infinity become None, because JSON lacks them."""
    summary = [
        {"group": group, "dtype": dtype, "pass": which, "geomean": geomean(values), "smallest": min(values)}
        for (group, dtype, which), values in ratios(rows).items()
    ]
    return {"cases": [_row_json(row) for row in rows], "summary": summary}


def finding_json(finding: Finding) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in asdict(finding).items()}


def _row_json(row: Row) -> dict[str, Any]:
    case = row.case
    passes = {}
    for which, pair in row.passes.items():
        passes[which] = {
            "kernel": row.kernels["forward" if which == "forward" else "backward"],
            "scaledot": pair.ours.as_json(),
            "torch": None if pair.peer is None else pair.peer.as_json(),
            "ratio": pair.ratio,
            "spread": {
                "scaledot": spread(pair.ours),
                "torch": None if pair.peer is None else spread(pair.peer),
            },
            "noisy": is_noisy(pair),
            "flops": case.flops(which),
        }
    findings = {name: finding_json(finding) for name, finding in row.verdict.findings.items()}
    return {
        "feature": case.feature_name,
        "group": case.group,
        "shape": {"text": str(case.shape), **asdict(case.shape)},
        "dtype": case.dtype_name,
        "peer": row.peer,
        "peer_skipped": row.peer_skipped,
        "correctness": {
            "passed": row.verdict.passed,
            "problems": row.verdict.problems(),
            "share_checked": row.verdict.share,
            "errors": findings,
        },
        "passes": passes,
    }
