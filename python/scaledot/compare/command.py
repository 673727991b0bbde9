"""The compare command: from its options to its exit code."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .features import DTYPES, FEATURES, PASSES, Case, cases_of
from .machine import describe
from .report import Paint, Table, as_json, head_lines, ratios, summary_lines
from .run import Row, run_case
from .shapes import SETS, SHAPE_FORM, Entry, entries_of
from .timing import Effort

_INSTALL = "pip install 'scaledot[compare]'"

EPILOG = f"""\
a shape: {SHAPE_FORM}

sets of shapes:
{chr(10).join(f"  {name:<9} {s.about}" for name, s in SETS.items())}

features:
{chr(10).join(f"  {name:<15} {f.about}" for name, f in FEATURES.items())}

AVX2: these lower the instructions that either side may use, and the line under the title says what they came down to;
what MKL and oneDNN, which torch calls, run has settings of its own:
  SCALEDOT_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=avx2 \\
  MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 python -m scaledot compare --shapes bars

The exit code is 0 if every case is right, 1 if one is not, 2 for a wrong option, 130 after Ctrl-C.
"""


def _names(known: Sequence[str], what: str) -> Callable[[str], tuple[str, ...]]:
    """An argument type: a comma-separated list of known names."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is no {what}; known are {', '.join(known)}")
        return names

    return parse


def _entries(text: str) -> tuple[Entry, ...]:
    try:
        return entries_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; give cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r}: scaledot runs on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{text!r}: torch {torch.__version__} sees no CUDA device")
    return device


def positive(kind: type[int] | type[float]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"got {text!r}; needs a positive {'integer' if kind is int else 'number'}")
        return number

    return parse


def _file(text: str) -> Path:
    """A path that can be written: better to know before an hour of measuring."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; needs a file's name")
    return path


def picture(text: str) -> Path:
    path = _file(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a plot is a .png, .svg or .pdf file")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"a plot needs matplotlib: run `{_INSTALL}`")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--device", type=_device, default=torch.device("cpu"), help="cpu (default), cuda, cuda:1")
    parser.add_argument(
        "--dtype",
        type=_names(list(DTYPES), "dtype"),
        default=("float32", "bfloat16", "float16"),
        metavar="LIST",
        help=f"of {', '.join(DTYPES)}; default all but float64",
    )
    parser.add_argument(
        "--shapes", type=_entries, metavar="LIST", help="sets of shapes or shapes; default the set default"
    )
    parser.add_argument(
        "--features", type=_names(list(FEATURES), "feature"), metavar="LIST", help="default those of the set of shapes"
    )
    parser.add_argument(
        "--pass",
        dest="passes",
        type=_names(list(PASSES), "pass"),
        default=("forward", "backward"),
        metavar="LIST",
        help="of forward, backward and total (both in one); default forward,backward",
    )
    parser.add_argument(
        "--peer", choices=("sdpa", "eager"), default="sdpa", help="sdpa: F.sdpa where it can, else eager torch"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the set quick, unless --shapes says another, and shorter timing"
    )
    parser.add_argument("--seconds", type=positive(float), help="how long to time each side of each pass; default 0.4")
    parser.add_argument("--threads", type=positive(int), help="torch.set_num_threads; default torch's own choice")
    parser.add_argument("--json", type=_file, metavar="FILE", help="every reading, and all that it depends on")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture of the ratios: .png, .svg or .pdf")
    _add_distributed(parser)
    parser.set_defaults(run=lambda arguments: compare(arguments, parser))


def _add_distributed(parser: argparse.ArgumentParser) -> None:
    of_these = "--quick, --threads, the first --dtype, --json and --plot"
    title = f"with --distributed, under torchrun (of the others it takes {of_these})"
    add = parser.add_argument_group(title).add_argument
    add("--distributed", action="store_true", help="sharded over torchrun's ranks, and a cost model to 1,024 of them")
    add("--length", type=positive(int), help="positions in all; default 4096, 1024 with --quick")
    add("--heads", type=positive(int), default=8, help="default 8; a quarter as many key and value heads")
    add("--head-dim", type=positive(int), default=64, help="default 64")
    add("--curve-length", type=positive(int), default=2**20, help="positions of the scaling curve; default 1048576")
    add("--tflops", type=positive(float), help="of the scaling curve's ranks; default what is measured here")
    add("--latency", type=positive(float), default=10.0, help="of the scaling curve's links, in us; default 10")
    add("--bandwidth", type=positive(float), default=25.0, help="of the scaling curve's links, in GB/s; default 25")


class _Quiet:
    """In place of a progress bar where tqdm is not installed."""

    def update(self, _: int) -> None: ...

    def set_description_str(self, _: str) -> None: ...

    def write(self, text: str) -> None:
        print(text, flush=True)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on the terminal; its `write` prints a line above it."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        print(f"(without tqdm there is no progress bar: {_INSTALL})", file=sys.stderr)
        yield _Quiet()
        return
    layout = "{desc:<48} {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
    # disable=None: not where standard error is a file.
    with tqdm(total=total, disable=None, leave=False, bar_format=layout, dynamic_ncols=True) as bar:
        yield bar


def _measure(cases: list[Case], arguments: argparse.Namespace, effort: Effort, table: Table) -> tuple[list[Row], bool]:
    """(rows, whether all cases were run); prints the table on the way."""
    rows: list[Row] = []
    parts = 1 + len(arguments.passes)
    with _progress(parts * len(cases)) as bar:
        bar.write(table.heading())
        try:
            for number, case in enumerate(cases):
                done = parts * number

                def step(part: str, done: int = done, case: Case = case) -> None:
                    bar.set_description_str(f"{case.group} {case.shape} {case.dtype_name} {part}"[:48])
                    if part != "check":
                        bar.update(1)

                row = run_case(case, arguments.device, arguments.passes, effort, arguments.peer, step)
                rows.append(row)
                bar.update(parts - len(row.passes))
                for line in table.lines(row):
                    bar.write(line)
        except KeyboardInterrupt:
            return rows, False
    return rows, True


def compare(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Runs the command; returns its exit code."""
    if arguments.distributed:
        return _compare_distributed(arguments, parser)
    entries = arguments.shapes or SETS["quick" if arguments.quick else "default"].entries
    effort = Effort(arguments.seconds or (0.05 if arguments.quick else 0.4), 5)
    cases, notes = cases_of(entries, arguments.features, arguments.dtype)
    if not cases:
        parser.error("nothing to run: " + "; ".join(notes))
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    machine = describe(arguments.device)
    paint = Paint(sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    print("\n".join([*head_lines(machine, arguments.passes), *notes, ""]), flush=True)

    rows, complete = _measure(cases, arguments, effort, Table(cases, paint))
    if any(row.passes for row in rows):
        print("\n" + "\n".join(summary_lines(rows, paint)))
    if arguments.json is not None:
        options = {
            "dtypes": list(arguments.dtype),
            "passes": list(arguments.passes),
            "peer": arguments.peer,
            "seconds": effort.seconds,
            "complete": complete,
        }
        text = json.dumps(as_json(rows, machine, options, notes), indent=1, allow_nan=False)
        arguments.json.write_text(text + "\n")
        print(f"\nreadings: {arguments.json}")
    if arguments.plot is not None and not ratios(rows):
        print("\nno plot: nothing was timed against torch")
    elif arguments.plot is not None:
        from .figure import draw

        draw(rows, machine, arguments.plot)
        print(f"\nplot: {arguments.plot}")
    wrong = sum(not row.verdict.passed for row in rows)
    print("\n" + _verdict(len(rows), wrong, len(cases), paint))
    return 1 if wrong else 0 if complete else 130


def _compare_distributed(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..distributed import report  # here, because torch.distributed takes a second to load

    try:
        return report.run(arguments)
    except ValueError as error:
        parser.error(str(error))


def _verdict(run: int, wrong: int, planned: int, paint: Paint) -> str:
    stopped = "" if run == planned else f" Stopped after {run} of {planned} cases."
    if wrong:
        return paint(f"FAIL: {wrong} of {run} cases are wrong.", "\033[31;1m") + stopped
    return f"All {run} cases are right: within the limits against float64, forward and backward.{stopped}"
