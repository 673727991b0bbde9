"""``compare --models``: its options, its progress and its exit code."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..session import Run, Session
from ..timing import Effort
from .catalogue import MODELS, SIDES
from .report import ModelTable, as_json, draw, head_lines
from .run import run_model

Planned = tuple[str, str]  # the model's name and the dtype


def plan(names: Sequence[str], dtypes: Sequence[str] | None) -> tuple[list[Planned], list[str]]:
    """(the models to run, each with a dtype; notes on those that cannot run).

    Raises:
        ValueError: none of the models can run.
    """
    planned: list[Planned] = []
    cannot: dict[str, list[str]] = {}  # the reason, and the models it holds for
    for name in names:
        missing = MODELS[name].missing()
        if missing is None:
            planned += [(name, dtype) for dtype in dtypes or MODELS[name].dtypes]
        else:
            cannot.setdefault(missing, []).append(name)
    notes = [f"{', '.join(models)}: not run: {missing}" for missing, models in cannot.items()]
    if not planned:
        raise ValueError("--models: no model can run: " + "; ".join(notes))
    return planned, notes


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without what the library logs, which would split the table."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: none of the models can run.
        ImportError: transformers is too old.
    """
    planned, notes = plan(arguments.models, arguments.dtype)
    if any(MODELS[name].package == "transformers" for name, _ in planned):
        from ...dropin.transformers import register

        register()
    size = (f"{len(planned)} model{'s' * (len(planned) > 1)}", len(planned) * len(SIDES))
    session = Session(arguments, head_lines, notes, size)

    def measured(name: str, dtype: str) -> Run:
        effort = Effort(session.seconds, 3 if arguments.quick else 5)
        return lambda step: run_model(name, dtype, arguments.quick, effort, step)

    runs = [(f"{name} {dtype}", measured(name, dtype)) for name, dtype in planned]
    with _quiet_transformers():
        rows = session.measure(runs, ModelTable(planned, session.paint, session.width))
    options = {
        "models": list(arguments.models),
        "dtypes": None if arguments.dtype is None else list(arguments.dtype),
        "quick": arguments.quick,
    }
    content = {"models": [as_json(row) for row in rows]}
    timed = any(row.timings for row in rows)
    return session.finish(rows, ("models", "results and gradients"), options, content, draw if timed else None)
