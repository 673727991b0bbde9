"""python -m external.engines [--only WORD ...]: other engines' attention on this CPU against scaledot, as Markdown.

Each side is checked against float64 and then timed in turn with the others, in one process. "packed", "pages" and "per
head" are scaledot over keys in token order, in pages of 128, and with the keys of each head together. It exits with 1
if a side is wrong or raises, and if nothing was timed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from external.engines.comparison import LIMITS, PEER_LIMITS, measure, problems, table
from external.engines.peers import VLLM, load, vllm_library
from external.engines.workloads import WORKLOADS
from scaledot.compare.machine import describe
from scaledot.compare.noise import SPREAD_LIMIT, Load, end_warnings, load_average, noise_json
from scaledot.compare.parser import HelpLines, Parser
from scaledot.compare.report import machine_lines
from scaledot.compare.timing import Effort


def parser() -> Parser:
    made = Parser(prog="external.engines", description=__doc__, formatter_class=HelpLines)
    words = "only engines and shapes whose `engine, dtype, shape` contains one of these words"
    made.add_argument("--only", nargs="+", default=[""], metavar="WORD", help=words)
    made.add_argument("--dtype", choices=LIMITS, nargs="+", default=["float32", "bfloat16"])
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--seconds", type=float, default=0.5, help="for each side of each line")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every reading")
    made.add_argument("--vllm", type=Path, metavar="LIBRARY", help="vLLM's library; default: that of --download")
    made.add_argument("--download", action="store_true", help=f"fetch the library of {VLLM} (130 MB) if it is missing")
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    peers, missing = load(options.vllm or vllm_library(options.download), options.threads)
    print("".join(f"not found: {line}\n" for line in missing), end="", file=sys.stderr)
    start, results = load_average(), []
    for dtype in options.dtype:
        for workload in WORKLOADS:
            wanted = [p for p in peers if any(word in f"{p.name}, {dtype}, {workload}" for word in options.only)]
            if wanted:
                print(f"{dtype}, {workload}", file=sys.stderr, flush=True)
                results.append(measure(workload, dtype, wanted, Effort(options.seconds, 7)))
    machine, load_of_run = describe(torch.device("cpu")), Load(start, load_average(), os.cpu_count() or 1)
    wrong = problems(results)
    head = [
        *machine_lines(machine),
        f"{date.today():%-d %B %Y}. Medians of calls in turn; ratio = the engine's time / scaledot's.",
        f"!: an IQR is above {SPREAD_LIMIT:.0%} of its median.",
    ]
    tables = [table(peer.name, dtype, results) for dtype in options.dtype for peer in peers]
    sections = [head, *tables, wrong, end_warnings(results, load_of_run)]
    print("\n\n".join("\n".join(lines) for lines in sections if lines))
    if options.json is not None:
        facts: dict[str, Any] = {
            "machine": machine,
            "date": str(date.today()),
            "missing": missing,
            "limits": LIMITS,
            "peer_limits": PEER_LIMITS,
        }
        facts |= {"noise": noise_json(results, load_of_run), "rows": [result.as_json() for result in results]}
        options.json.write_text(json.dumps(facts, indent=1))
    return 1 if wrong or not any(result.timings for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
