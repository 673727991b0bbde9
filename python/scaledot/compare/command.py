"""The compare command: its options, its progress and its exit code."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .features import DTYPES, FEATURES, PASSES, SHORT_DTYPES, SHORT_PASSES, Case, cases_of
from .figure import draw
from .models.catalogue import MODELS
from .parser import CLOSED_PIPE, HelpLines, did_you_mean
from .report import Table, as_json, head_lines, ratios, summary_lines
from .run import run_case
from .session import Run, Session
from .shapes import SETS, SHAPE_FORM, Entry, entries_of
from .timing import Effort

_DTYPES, _PASSES = ("float32", "bfloat16", "float16"), ("forward", "backward")  # the defaults

EPILOG = f"""\
shapes: {SHAPE_FORM}

sets of shapes:
{chr(10).join(f"  {name:<9} {s.about}" for name, s in SETS.items())}

features:
{chr(10).join(f"  {name:<15} {f.about}" for name, f in FEATURES.items())}

models:
{chr(10).join(f"  {name:<15} {m.title}: {m.about}" for name, m in MODELS.items())}

AVX2: the following lowers the instruction sets of both sides, and the third line of the output names the result. \
MKL and oneDNN, which torch calls, have their own settings:
  SCALEDOT_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=avx2 \\
  MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \\
  python -m scaledot compare --shapes bars

A terminal too narrow for the table gets fewer columns; a file or a pipe gets all of them, and so does --json.

Timings marked ! are too noisy to trust; a warning at the end counts them, and another reports a high load average.

The exit code is 0 if every case or model is right, 1 if one is not, 2 for a wrong option, 130 after Ctrl-C, \
{CLOSED_PIPE} if the program that reads the output ends first, as in compare | head.
"""


def _names(known: Sequence[str], what: str, short: Mapping[str, str] | None = None) -> Callable[[str], tuple[str, ...]]:
    """An argument type: a comma-separated list of known names. `short`: the short form of each, as tables have it."""
    full = {abbreviation: name for name, abbreviation in (short or {}).items()}

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(full.get(name.strip(), name.strip()) for name in text.split(",")))
        for name in names:
            if name not in known:
                or_short = f" (or {', '.join(full)})" if full else ""
                needs = f"needs a {what}: {', '.join(known)}{or_short}"
                raise argparse.ArgumentTypeError(f"got {name!r}; {needs}{did_you_mean(name, known)}")
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
        raise argparse.ArgumentTypeError(f"got {text!r}; needs cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a CUDA device, and torch {torch.__version__} sees none")
    return device


def positive(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """An argument type: a positive integer or number."""

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
    """An argument type: a path that can be written. Checked before the run, which may take an hour."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a file in a folder that exists")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, a folder; needs a file")
    return path


def picture(text: str) -> Path:
    """An argument type: a path for a plot."""
    path = _file(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a .png, .svg or .pdf file")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"got {text!r}; needs matplotlib: run `pip install matplotlib`")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = HelpLines
    parser.epilog = EPILOG
    parser.add_argument("--device", type=_device, default=torch.device("cpu"), help="cpu (default), cuda, cuda:1")
    parser.add_argument(
        "--dtype",
        type=_names(list(DTYPES), "dtype", SHORT_DTYPES),
        metavar="LIST",
        help=f"any of {', '.join(DTYPES)}, or {', '.join(SHORT_DTYPES.values())}; default all but "
        "float64, with --models those of each model",
    )
    parser.add_argument(
        "--shapes", type=_entries, metavar="LIST", help="shapes and sets of shapes; default: the set named default"
    )
    parser.add_argument(
        "--models",
        type=_names(list(MODELS), "model"),
        nargs="?",
        const=tuple(MODELS),
        metavar="LIST",
        help="time whole models with scaledot, sdpa and eager attention, instead of attention calls; default all",
    )
    parser.add_argument(
        "--features", type=_names(list(FEATURES), "feature"), metavar="LIST", help="default: those of the set of shapes"
    )
    parser.add_argument(
        "--pass",
        dest="passes",
        type=_names(list(PASSES), "pass", SHORT_PASSES),
        metavar="LIST",
        help="any of forward, backward, total (both in one call); default forward,backward",
    )
    parser.add_argument(
        "--peer",
        choices=("sdpa", "eager"),
        help="sdpa (default): F.sdpa, or eager torch where F.sdpa lacks the option",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="shorter timing, small models, and the set named quick unless --shapes is given",
    )
    parser.add_argument(
        "--seconds",
        type=positive(float),
        help="timing per side and pass; default 0.4, with --quick 0.05; the first line says how long the run takes",
    )
    parser.add_argument("--threads", type=positive(int), help="torch.set_num_threads; default: torch's choice")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write every reading, the machine and the noise")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the ratios: .png, .svg or .pdf")
    _add_distributed(parser)
    parser.set_defaults(run=lambda arguments: compare(arguments, parser))


def _add_distributed(parser: argparse.ArgumentParser) -> None:
    about = "Of the options above, --quick, --threads, one --dtype, --json and --plot go with it."
    add = parser.add_argument_group("with --distributed, under torchrun", about).add_argument
    add("--distributed", action="store_true", help="shard over torchrun's ranks; model the cost of up to 1,024 ranks")
    add("--length", type=positive(int), help="total positions; default 4096, with --quick 1024")
    add("--heads", type=positive(int), help="query heads; default 8; there are a quarter as many KV heads")
    add("--head-dim", type=positive(int), help="default 64")
    add("--curve-length", type=positive(int), metavar="N", help="positions of the scaling curve; default 1048576")
    add("--tflops", type=positive(float), help="of the scaling curve's ranks; default: as measured here")
    add("--latency", type=positive(float), help="of the scaling curve's links, in us; default 10")
    add("--bandwidth", type=positive(float), help="of the scaling curve's links, in GB/s; default 25")


# Options of one kind of comparison, by their names in the parsed arguments: in another kind they are an error.
_CALLS = ("shapes", "features", "passes", "peer")
_DEFAULTS = {"heads": 8, "head_dim": 64, "curve_length": 2**20, "latency": 10.0, "bandwidth": 25.0}
_RANKS = (*_DEFAULTS, "length", "tflops")


def _refuse_ignored(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program if an option is given that this kind of comparison would ignore."""
    kind, ignored = "", _RANKS
    if arguments.models is not None:
        kind, ignored = "--models", (*_CALLS, "distributed", *_RANKS)
    elif arguments.distributed:
        kind, ignored = "--distributed", (*_CALLS, "seconds")
    option = {action.dest: action.option_strings[0] for action in parser._actions}
    given = ", ".join(option[name] for name in ignored if getattr(arguments, name))
    if given and kind:
        parser.error(f"{kind}: got {given} too; needs none of {', '.join(option[name] for name in ignored)}")
    if given:
        parser.error(f"{given}: got no --distributed; needs --distributed, under torchrun")
    if kind and arguments.device.type != "cpu":
        parser.error(f"--device: got {arguments.device} with {kind}; needs cpu")
    if arguments.distributed and len(arguments.dtype or ()) > 1:
        parser.error(f"--dtype: got {','.join(arguments.dtype)} with --distributed; needs one dtype")


def compare(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Runs the command; returns its exit code."""
    _refuse_ignored(arguments, parser)
    if arguments.models is not None:
        return _compare_models(arguments, parser)
    arguments.dtype = arguments.dtype or _DTYPES
    if arguments.distributed:
        return _compare_distributed(arguments, parser)
    arguments.passes, arguments.peer = arguments.passes or _PASSES, arguments.peer or "sdpa"
    entries = arguments.shapes or SETS["quick" if arguments.quick else "default"].entries
    cases, notes = cases_of(entries, arguments.features, arguments.dtype, arguments.device.type)
    if not cases:
        parser.error("no case to run: " + "; ".join(notes))
    size = (f"{len(cases)} case{'s' * (len(cases) > 1)}", len(cases) * len(arguments.passes) * 2)
    session = Session(arguments, lambda machine: head_lines(machine, arguments.passes), notes, size)

    def measured(case: Case) -> Run:
        effort = Effort(session.seconds, 5)
        return lambda step: run_case(case, arguments.device, arguments.passes, effort, arguments.peer, step)

    planned = [(f"{case.group} {case.shape} {case.dtype_name}", measured(case)) for case in cases]
    rows = session.measure(planned, Table(cases, session.paint, session.width))
    if any(row.passes for row in rows):
        print("\n" + "\n".join(summary_lines(rows, session.paint, session.width)))
    options = {"dtypes": list(arguments.dtype), "passes": list(arguments.passes), "peer": arguments.peer}
    subject = ("cases", "forward and backward")
    return session.finish(rows, subject, options, as_json(rows), draw if ratios(rows) else None)


def _compare_models(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .models import command  # imported here: few calls need it

    try:
        return command.run(arguments)
    except (ValueError, ImportError) as error:
        parser.error(str(error))


def _compare_distributed(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..distributed import report  # imported here: torch.distributed takes a second to load

    vars(arguments).update({name: getattr(arguments, name) or default for name, default in _DEFAULTS.items()})
    try:
        return report.run(arguments)
    except ValueError as error:
        parser.error(str(error))
