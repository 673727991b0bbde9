"""The table and the plot of ``compare --models``, and what the JSON file has of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..columns import Column, Columns
from ..features import SHORT_DTYPES
from ..figure import Chart, draw_chart, machine_line
from ..noise import SPREAD_LIMIT, Load, is_noisy, spread
from ..report import BOLD, RED, Paint, finding_json, machine_lines, marked, percent, ratio_of, time_of
from .catalogue import MODELS, PEERS, SIDES
from .run import ModelRow

_PEERS = {"sdpa": "vs sdpa", "eager": "vs eager"}


def rate_of(rate: float) -> str:
    """Three digits: 0.123, 1.23, 12.3, 1230."""
    if rate <= 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(rate)))
    return f"{rate:.{digits}f}"


def head_lines(machine: dict[str, Any]) -> list[str]:
    """The lines above the table."""
    return [
        *machine_lines(machine),
        "attention by scaledot, sdpa and eager, timed in turn: medians; ratio = the peer's time / scaledot's",
        "the models have random weights and few layers; tokens or samples per second are those of these layers",
        f"!: too noisy to trust, because an IQR is above {SPREAD_LIMIT:.0%} of its median",
        "error: largest error against float64 / largest element, of one sample without dropout; limit: 2 x eager's "
        "(gradients 3 x) + 2 ulp",
    ]


class ModelTable:
    """Lines with fixed columns, so that each line can be printed as soon as it is measured."""

    def __init__(self, planned: Sequence[tuple[str, str]], paint: Paint, width: int | None = None) -> None:
        """`width`: of the terminal; columns that do not fit are left out. None: all columns."""
        self.paint = paint
        self.title = max(len("model"), *(len(MODELS[name].title) for name, _ in planned))
        self.columns = Columns(
            [
                Column("model", self.title, left=True),
                Column("type", 4, left=True),
                Column("pass", 9, left=True),
                *(column for side in SIDES for column in (Column(side, 8), Column("IQR", 4, drop=3))),
                *(Column(name, 8) for name in _PEERS.values()),
                Column("per second", 12, drop=4),
                Column("error", 7, drop=2),
                Column("limit", 7, drop=2),
                Column("shape", 40, left=True, drop=1),
            ],
            width,
            first=3,
        )

    def heading(self) -> str:
        names, rule = self.columns.heading()
        return self.paint(names, BOLD) + "\n" + rule

    def lines(self, row: ModelRow) -> list[str]:
        title, dtype = row.model.title, SHORT_DTYPES[row.dtype_name]
        if not row.verdict.passed:
            return [
                self.paint(f"{title:<{self.title}}  {dtype:<4}  FAIL  {problem}", RED)
                for problem in row.verdict.problems()
            ]
        return [self._pass_line(row, which) for which in row.timings]

    def _pass_line(self, row: ModelRow, which: str) -> str:
        cells = [row.model.title, SHORT_DTYPES[row.dtype_name], which]
        for side in SIDES:
            timing = row.timings[which][side]
            cells += [time_of(timing.median), percent(timing.iqr, timing.median)]
        painted = {}
        for pair in (row.pair(which, peer) for peer in PEERS):
            text = marked(ratio_of(pair.ratio), is_noisy(pair))
            painted[len(cells)] = self.paint(text, RED) if is_noisy(pair) else self.paint.ratio(text, pair.ratio)
            cells.append(text)
        rate = "-"
        if which == row.model.whole:
            rate = f"{rate_of(row.rate(which, 'scaledot'))} {row.model.unit}"
        worst = row.verdict.worst(gradient=which not in ("forward", row.model.work))
        errors = ["-", "-"]
        if worst is not None:
            errors = [f"{error / (worst.scale or 1.0):.1e}" for error in (worst.ours, worst.allowed)]
        return self.columns.line([*cells, rate, *errors, row.shape], painted)


def as_json(row: ModelRow) -> dict[str, Any]:
    """The measurements of a model."""
    worst = {"result": row.verdict.worst(gradient=False), "gradient": row.verdict.worst(gradient=True)}
    passes = {}
    for which, sides in row.timings.items():
        passes[which] = {
            **{side: timing.as_json() for side, timing in sides.items()},
            "ratio": {peer: row.pair(which, peer).ratio for peer in PEERS},
            "rate": {side: row.rate(which, side) for side in sides},
            "spread": {side: spread(timing) for side, timing in sides.items()},
            "noisy": any(is_noisy(row.pair(which, peer)) for peer in PEERS),
        }
    return {
        "model": row.name,
        "title": row.model.title,
        "shape": row.shape,
        "dtype": row.dtype_name,
        "unit": row.model.unit,
        "amount": row.amount,
        "correctness": {
            "passed": row.verdict.passed,
            "problems": row.verdict.problems(),
            "share_checked": row.verdict.share,
            "worst": {kind: finding_json(finding) for kind, finding in worst.items() if finding is not None},
        },
        "passes": passes,
    }


def draw(rows: Sequence[ModelRow], machine: dict[str, Any], path: Path, load: Load) -> None:
    """Draws a panel for each peer: the ratio of the whole pass of each model."""
    table = {}
    for row in rows:
        for peer in PEERS if row.timings else ():
            pair = row.pair(row.model.whole, peer)
            assert pair.ratio is not None
            table[row.model.title, row.dtype_name, peer] = [(pair.ratio, is_noisy(pair) or load.too_high)]
    chart = Chart(
        title="Whole models: how many times faster?",
        subtitle=(machine_line(machine), "Medians, timed in turn. Random weights, few layers."),
        panels={"sdpa": "than transformers with sdpa", "eager": "than transformers with eager"},
        groups={row.model.title: row.shape for row in rows},
        table=table,
        wrong={(row.model.title, row.dtype_name) for row in rows if not row.verdict.passed},
        load_too_high=load.too_high,
    )
    draw_chart(chart, path)
