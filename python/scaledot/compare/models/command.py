"""``compare --models``: its options, its progress and its exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..machine import describe
from ..noise import Load, end_warnings, load_average, start_warnings
from ..output import progress, write_json
from ..report import RED, Paint, verdict_line
from ..timing import Effort
from .catalogue import MODELS
from .report import ModelTable, as_json, draw, head_lines
from .run import ModelRow, run_model

Planned = tuple[str, str]  # the model's name and the dtype


def plan(names: Sequence[str], dtypes: Sequence[str] | None) -> tuple[list[Planned], list[str]]:
    """(the models to run, each with a dtype; notes on those that cannot run).

    Raises:
        ValueError: none of the models can run.
    """
    planned, notes = [], []
    for name in names:
        missing = MODELS[name].missing()
        if missing is None:
            planned += [(name, dtype) for dtype in dtypes or MODELS[name].dtypes]
        else:
            notes.append(f"{name}: not run: {missing}")
    if not planned:
        raise ValueError("--models: no model can run: " + "; ".join(notes))
    return planned, notes


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the library's warnings, which would break the table."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _measure(
    planned: Sequence[Planned], quick: bool, effort: Effort, table: ModelTable, bar: Any
) -> tuple[list[ModelRow], bool]:
    """Runs the models and prints the table; returns (rows, whether all were run)."""
    rows: list[ModelRow] = []
    bar.write(table.heading())
    try:
        for name, dtype in planned:

            def step(part: str, name: str = name, dtype: str = dtype) -> None:
                bar.set_description_str(f"{name} {dtype} {part}")

            rows.append(run_model(name, dtype, quick, effort, step))
            bar.update(1)
            for line in table.lines(rows[-1]):
                bar.write(line)
    except KeyboardInterrupt:
        return rows, False
    return rows, True


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: none of the models can run, or an option does not go with ``--models``.
        ImportError: transformers is too old.
    """
    _check_options(arguments)
    planned, notes = plan(arguments.models, arguments.dtype)
    if any(MODELS[name].package == "transformers" for name, _ in planned):
        from ...dropin.transformers import register

        register()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    effort = Effort(arguments.seconds or (0.05 if arguments.quick else 0.4), 3 if arguments.quick else 5)
    machine = describe(arguments.device)
    paint = Paint(sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    load = Load(load_average(), None, os.cpu_count() or 1)
    warnings = [paint(line, RED) for line in start_warnings(load)]
    print("\n".join([*head_lines(machine), *notes, *warnings, ""]), flush=True)

    with _quiet_transformers(), progress(len(planned)) as bar:
        rows, complete = _measure(planned, arguments.quick, effort, ModelTable(planned, paint), bar)
    load = replace(load, end=load_average())
    for line in end_warnings(rows, load):
        print("\n" + paint(line, RED))
    options = {
        "models": list(arguments.models),
        "dtypes": None if arguments.dtype is None else list(arguments.dtype),
        "quick": arguments.quick,
        "seconds": effort.seconds,
        "complete": complete,
    }
    write_json(arguments.json, as_json(rows, machine, options, notes, load))
    if arguments.plot is not None and not any(row.timings for row in rows):
        print("\nno plot: nothing was timed")
    elif arguments.plot is not None:
        draw(rows, machine, arguments.plot, load)
        print(f"\nplot: {arguments.plot}")
    wrong = sum(not row.verdict.passed for row in rows)
    print("\n" + verdict_line(("models", "results and gradients"), len(rows), wrong, len(planned), paint))
    return 1 if wrong else 0 if complete else 130


def _check_options(arguments: argparse.Namespace) -> None:
    others = {
        "--shapes": arguments.shapes,
        "--features": arguments.features,
        "--pass": arguments.passes,
        "--peer": arguments.peer,
        "--distributed": arguments.distributed or None,
    }
    given = [option for option, value in others.items() if value is not None]
    if given:
        raise ValueError(f"--models: got {', '.join(given)} too; needs none of {', '.join(others)}")
    if arguments.device.type != "cpu":
        raise ValueError(f"--device: got {arguments.device} with --models; needs cpu")
