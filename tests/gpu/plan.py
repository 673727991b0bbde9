"""The steps of tests/gpu/run, in order, and the time that each gets.

A step has the seconds that it needs at least and can use at most. The plan takes the steps in order while the least of
all of them fits. A step may use all time but what the later ones of the plan need; a step that is not in the plan runs
if time is left when its turn comes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import hang, library, lines
from gpu.report import Intention, Report, commit, source_package

MINUTES = 9.0
SPARE = 5.0  # seconds for starting and ending
GRACE = 4.0  # seconds before its limit, when a program ends by itself
BUILD = 300.0  # seconds at most


@dataclass
class Run:
    """What a step needs to know."""

    report: Report
    dry: bool  # on the CPU, with small problems
    seconds: float = 0  # for the step

    @property
    def device(self) -> list[str]:
        return ["--device", "cpu" if self.dry else "cuda"]

    def machine(self) -> dict[str, Any]:
        """What the step `import` found."""
        return next(iter(reversed([*lines.read(self.report.results, "import")])), {})

    def program(self, step: str, module: str, *words: str) -> bool:
        """Runs a program of this folder, which gets the file for results and its time."""
        total = f"{max(self.seconds - GRACE, 1):.0f}"
        command = [sys.executable, "-W", "ignore", "-m", f"gpu.{module}", "--results", str(self.report.results)]
        return self.report.run(step, [*command, "--total", total, *words], self.seconds)


def importing(run: Run) -> bool:
    """Imports scaledot, with kernels for this GPU: a build that was made elsewhere, that of the source tree, or a new
    one."""
    command = [sys.executable, "-m", "gpu.machine", "--results", str(run.report.results), *run.device]
    end = time.monotonic() + run.seconds
    if package := library.prebuilt(run.report):
        run.report.use_packages(package)
        if run.report.run("import", command, run.seconds):
            return True
        run.report.step("prebuilt", **run.report.content["steps"]["import"])
        run.report.use_packages(*source_package())
    if run.report.run("import", command, max(end - time.monotonic(), 10)):
        return True
    if run.dry:
        return False
    found = run.machine()
    capability = ".".join(map(str, found.get("capability", (9, 0))))
    if not library.build(run.report, capability, BUILD):
        return False
    run.report.use_packages(*source_package())
    return run.report.run("import", command, 60)


def smoke(run: Run) -> bool:
    """Each kernel once, in a process of its own: right, wrong and where, an error, a crash or a hang."""
    hopper = ["--hopper"] if run.machine().get("capability") == [9, 0] else []
    small = ["--only", "one_tile d64", "--parallel", "2"] if run.dry else []
    return run.program("smoke", "smoke", *run.device, *hopper, *small)


def first_hang(run: Run) -> bool:
    """If a probe hung: where it waited, from a core dump of the GPU."""
    if not run.dry and hang.first_hang(run.report.results) is None:
        return True
    folder = library.watchdog(run.report)
    words = ["--watchdog", str(folder)] if folder else []
    command = [sys.executable, "-m", "gpu.hang", "--results", str(run.report.results), *run.device, *words]
    return run.report.run("hang", [*command, "--out", str(run.report.folder / "hang.txt")], run.seconds)


def correctness(run: Run) -> bool:
    """Each case against the oracle; CUDA graphs; streams; two devices, where there are two."""
    words = ["--quick", "--parallel", "2"] if run.dry else []
    return run.program("correctness", "correctness", "--gpus", str(run.machine().get("gpus", 0)), *words)


def profile(run: Run) -> bool:
    """The microseconds of each kernel of a forward and a backward."""
    return run.program("profile", "kernel_times", *run.device, *(["--tokens", "64"] if run.dry else []))


def bench(run: Run) -> bool:
    """Times beside torch's flash, cuDNN and efficient backends and its varlen_attn, also as a table."""
    small = ["--tokens", "64", "--width", "128", "--longest", "96", "--rows", "12"] if run.dry else []
    return run.program("bench", "bench", *run.device, "--table", str(run.report.folder / "bench.md"), *small)


def races(run: Run) -> bool:
    """1,000 runs of each call while other streams are busy; all have the same bits."""
    return run.program("races", "races", *run.device, *(["--runs", "2", "--length", "40"] if run.dry else []))


def sanitizer(run: Run) -> bool:
    """compute-sanitizer on every kernel: accesses out of bounds. It does not know the barriers of Hopper well enough to
    look for races, which the simulation does."""
    words = ["--total", f"{max(run.seconds - GRACE, 1):.0f}", "--results", str(run.report.results), *run.device]
    command = [sys.executable, "-m", "gpu.small", *words]
    if not run.dry:
        tool = library.program("compute-sanitizer")
        command = [tool, "--tool=memcheck", "--error-exitcode=9", "--kernel-name", "kns=scaledot", *command]
    return run.report.run("sanitizer", command, run.seconds)


@dataclass(frozen=True)
class Step:
    run: Callable[[Run], bool]
    least: float  # seconds
    most: float


STEPS = {
    "import": Step(importing, 10, 60),
    "smoke": Step(smoke, 94, 120),  # all probes, as an H200 ran them
    "hang": Step(first_hang, 25, 60),
    "correctness": Step(correctness, 35, 150),  # and the time of the step before, if nothing hung
    "profile": Step(profile, 8, 30),
    "bench": Step(bench, 25, 120),
    "races": Step(races, 40, 80),
    "sanitizer": Step(sanitizer, 40, 90),
}
NEEDED = "import"  # without it, nothing else can run


def chosen(names: Sequence[str], seconds: float) -> list[str]:
    """The steps that fit, in order."""
    fit, taken = [], SPARE
    for name in names:
        if taken + STEPS[name].least <= seconds:
            fit.append(name)
            taken += STEPS[name].least
    return fit


def limit(name: str, planned: Sequence[str], left: float) -> float:
    """The seconds that a step gets; 0: it is not run."""
    order = list(STEPS)
    later = [step for step in planned if order.index(step) > order.index(name)]
    free = min(left - SPARE - sum(STEPS[step].least for step in later), STEPS[name].most)
    return free if free >= STEPS[name].least else 0


def run_all(run: Run, names: Sequence[str], seconds: float) -> bool:
    """Runs the steps. One that fails, or raises, stops no other, unless the GPU no longer answers."""
    end = time.monotonic() + seconds
    planned = chosen(names, seconds)
    run.report.content["plan"] = {name: [STEPS[name].least, STEPS[name].most] for name in planned}
    passed, stopped = True, ""
    for name in names:
        run.seconds = STEPS[name].most if run.dry else limit(name, planned, end - time.monotonic())
        if stopped or not run.seconds:
            run.report.step(name, exit=f"not run: {stopped or 'no time for it'}")
            passed = False
            continue
        print(f"-- {name}: {STEPS[name].run.__doc__}", flush=True)
        try:
            if run.dry:
                STEPS[name].run(Run(Intention(run.report), dry=False, seconds=run.seconds))
            succeeded = STEPS[name].run(run)
        except Exception:
            run.report.step(name, exit=traceback.format_exc())
            succeeded = False
        passed &= succeeded
        if not succeeded and name == NEEDED:
            stopped = "scaledot could not be imported"
        elif not succeeded and not run.dry and not run.report.gpu_answers():
            stopped = f"the GPU does not answer after the step {name}"
    return passed


def missing(names: Sequence[str]) -> list[str]:
    """Programs that steps would run and that are not on this machine."""
    found = [] if library.find_nvcc() else ["nvcc (to build)"]
    tools = {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"} if NEEDED in names else {}
    tools |= {"compute-sanitizer": ""} if "sanitizer" in names else {}
    found += [name for name, variable in tools.items() if not os.access(library.program(name, variable), os.X_OK)]
    if "hang" in names and not os.access(hang.debugger(), os.X_OK):
        found.append("cuda-gdb")
    return found


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "tests/gpu/run", description="Tests and times the GPU kernels on this machine.", allow_abbrev=False
    )
    default = Path(os.environ.get("OUT", "gpu-results"))
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="for all results (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything (default: %(default)s)")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small problems; no GPU is needed")
    arguments = parser.parse_args(words)
    asked = arguments.steps.split(",")
    if unknown := set(asked) - STEPS.keys():
        parser.error(f"--steps: no step is called {', '.join(sorted(unknown))}")
    names = [name for name in STEPS if name in asked or name == NEEDED]
    run = Run(Report(arguments.folder.resolve()), arguments.dry_run)
    print(f"scaledot {commit()}, at most {arguments.minutes:g} minutes, results in {run.report.folder}", flush=True)
    passed = run_all(run, names, 60 * arguments.minutes)
    run.report.content["passed"] = passed and not arguments.dry_run
    run.report.write()
    print(json.dumps(run.report.content["steps"], indent=1))
    if arguments.dry_run:
        planned = chosen(names, 60 * arguments.minutes)
        print(f"On a GPU, {arguments.minutes:g} minutes are for {', '.join(planned)}, if each takes its least time.")
        print(f"Missing on this machine: {', '.join(missing(names)) or 'nothing'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
