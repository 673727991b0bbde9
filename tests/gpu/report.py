"""The steps of tests/gpu/run. Each has a time limit, and all of them end within nine minutes, or --seconds. The report
is written before and after every step, so a crash loses nothing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 525.0  # for everything
MIN_SECONDS = 3.0  # with less time left, a step is not started
KEPT = 20000  # characters of a step's output
SHOWN = 1500  # of them on the screen


class Report:
    """The results so far, in a file. The programs that a step runs write their output to `folder`."""

    def __init__(self, path: Path, folder: Path = ROOT / "build" / "gpu", seconds: float = SECONDS) -> None:
        self.path, self.folder = path, folder
        self.end = time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.content: dict[str, Any] = {"commit": commit(), "machine": machine(), "steps": {}}
        self.environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"), PYTHONUNBUFFERED="1")
        # Programs find CUDA's Multi-Process Service by its pipes, and there are none in this folder: no step uses it.
        self.environment["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / "no_mps")
        self.write()

    def write(self) -> None:
        """Replaces the file atomically, so that it is always complete."""
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        beside.replace(self.path)

    def fresh(self, name: str | Path) -> Path:
        """A file for a program's results, without those of an earlier run. A relative path is in `folder`."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        return path

    def step(self, name: str, **known: Any) -> dict[str, Any]:
        self.content["steps"][name] = known
        self.write()
        return known

    def run(self, name: str, command: list[str], seconds: float) -> bool:
        """Runs a command for at most `seconds`, or the time left, and reports it. Returns whether it succeeded."""
        print(f"== {name}: {' '.join(command)}", flush=True)
        begin = time.monotonic()
        limit = min(seconds, self.end - begin)
        if self.end - begin < MIN_SECONDS:
            self.step(name, exit="not run: out of time")
            return False
        self.step(name, exit="running")
        log = self.folder / f"{name}.log"
        with log.open("w") as file:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self.step(name, exit=f"not started: {error}")
                return False
            try:
                code: int | str = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = f"stopped after {limit:.0f} s"
        output = log.read_text(errors="replace")
        taken = round(time.monotonic() - begin, 1)
        self.step(name, exit=code, seconds=taken, output=output[-KEPT:])
        print(output[-SHOWN:], flush=True)
        print(f"== {name}: exit {code}, {taken} s", flush=True)
        return code == 0


class DryRun(Report):
    """Says what each step would run, and which programs and files are missing. Runs and writes nothing."""

    def __init__(self, path: Path, folder: Path = ROOT / "build" / "gpu") -> None:
        self.path, self.folder, self.environment = path, folder, dict(os.environ)
        self.content = {"machine": machine(), "steps": {}}
        self.missing: set[str] = set()

    def write(self) -> None:
        pass

    def fresh(self, name: str | Path) -> Path:
        return self.folder / name

    def run(self, name: str, command: list[str], seconds: float) -> bool:
        there = shutil.which(command[0]) is not None
        if not there:
            self.missing.add(command[0])
        files = [part for part in command if part.startswith("tests/")]
        self.missing.update(file for file in files if not (ROOT / file).is_file())
        print(f"== {name}, at most {seconds:.0f} s{'' if there else ' (NOT FOUND)'}: {' '.join(command)}", flush=True)
        return True


def dry_run(path: Path, steps: dict[str, Step], seconds: float = SECONDS) -> int:
    """Returns 1 if a program or a file is missing, or a step raised."""
    plan = DryRun(path)
    wrong = [] if run_steps(plan, steps) else [str(step["exit"]) for step in plan.content["steps"].values()]
    if "build" in steps and not shutil.which(nvcc := os.environ.get("CUDACXX", "nvcc")):
        plan.missing.add(nvcc)
    if "correctness" in steps and not importlib.util.find_spec("pytest"):
        plan.missing.add("pytest")
    machine = plan.content["machine"]
    print(f"Python {machine['python']}, torch {machine['torch']}, GPU: {machine['gpu']}")
    print(f"It would take at most {seconds:.0f} s and write {path}")
    wrong += [f"{name}: not found" for name in sorted(plan.missing)]
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


def commit() -> str:
    """The environment variable SCALEDOT_COMMIT, if set (for sources without git), else what git describes."""
    told = os.environ.get("SCALEDOT_COMMIT")
    if told:
        return told
    try:
        command = ["git", "describe", "--always", "--dirty"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = ""
    return found or "unknown"


def machine() -> dict[str, Any]:
    import torch

    there = torch.cuda.is_available()
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if there else "no CUDA device",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if there else None,
        "cpus": os.cpu_count(),
    }


def program(name: str, folder_variable: str) -> str:
    """cmake or ninja: from the Python package if installed, else from the PATH."""
    try:
        path = Path(getattr(importlib.import_module(name), folder_variable)) / name
    except (ImportError, AttributeError):
        return shutil.which(name) or name
    return str(path) if path.is_file() else shutil.which(name) or name


def build(report: Report) -> bool:
    """CMake without pip. It downloads nothing, and installs nothing outside this source tree."""
    import torch

    capability = report.content["machine"]["capability"] or "8.0"
    report.environment.setdefault("TORCH_CUDA_ARCH_LIST", capability + ("a" if capability == "9.0" else ""))
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": program("ninja", "BIN_DIR"),
        "SCALEDOT_CUDA": "1",
        "SCALEDOT_EDITABLE": "1",
        "SCALEDOT_TORCH_DIRS": str(Path(torch.__file__).parent),
        "Python_EXECUTABLE": sys.executable,
    }
    cmake, definitions = program("cmake", "CMAKE_BIN_DIR"), [f"-D{name}={value}" for name, value in options.items()]
    if not report.run("configure", [cmake, "-S", ".", "-B", str(report.folder), "-G", "Ninja", *definitions], 60):
        return False
    if not report.run("build", [cmake, "--build", str(report.folder), "--target", "install"], 240):
        return False
    show = "import scaledot; print(scaledot.build_info())"
    return report.run("import", [sys.executable, "-c", show], 60)


def correctness(report: Report) -> bool:
    """Each case against the oracle; CUDA graphs; streams; two devices, where there are two."""
    junit = report.fresh("tests.xml")
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=50", f"--junitxml={junit}", *parallel]
    passed = report.run("correctness", [*command, "tests/python/project/test_cuda.py"], 150)
    if junit.is_file():
        report.content["tests"] = counts(junit)
        report.write()
    return passed


def counts(junit: Path) -> dict[str, Any]:
    suite = next(ElementTree.parse(junit).iter("testsuite"))
    skips = [skip.get("message", "") for skip in suite.iter("skipped")]
    failed = [
        case.get("name", "")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {
        **{name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")},
        "failed": failed,
        "skips": {reason: skips.count(reason) for reason in skips},
    }


def sanitizer(report: Report) -> bool:
    """compute-sanitizer on every kernel: accesses out of bounds, races in shared memory."""
    tool = shutil.which("compute-sanitizer") or "compute-sanitizer"
    clean = True
    for check in ("memcheck", "racecheck"):
        command = [tool, f"--tool={check}", "--error-exitcode=9", "--kernel-name", "kns=scaledot"]
        clean &= report.run(check, [*command, sys.executable, "tests/gpu/small.py"], 60)
    return clean


def races(report: Report) -> bool:
    """1,000 runs of each call while other streams are busy; all have the same bits."""
    return report.run("races", [sys.executable, "tests/gpu/races.py", "--seconds", "60"], 80)


def bench(report: Report, *more: str) -> bool:
    """Times beside torch's flash, cuDNN and efficient backends and its varlen_attn, also as a table."""
    readings, table = report.fresh("bench.json"), report.fresh(report.path.with_suffix(".md"))
    command = [sys.executable, "tests/gpu/bench.py", "--json", str(readings), "--table", str(table), "--seconds", "90"]
    command += more
    done = report.run("bench", command, 120)
    if readings.is_file():
        report.content["bench"] = json.loads(readings.read_text())
        report.write()
    return done


Step = Callable[[Report], bool]
STEPS: dict[str, Step] = {
    "build": build,
    "correctness": correctness,
    "sanitizer": sanitizer,
    "races": races,
    "bench": bench,
}


def run_steps(report: Report, steps: dict[str, Step]) -> bool:
    """Runs every step, even after a failure of another one; but none without a successful build."""
    passed = True
    for name, step in steps.items():
        if name != "build" and "build" in steps and not report.content["built"]:
            report.step(name, exit="not run: the build failed")
            continue
        if step.__doc__:
            print(f"-- {name}: {step.__doc__}", flush=True)
        try:
            succeeded = step(report)
        except Exception:
            report.step(f"{name} (report.py)", exit=traceback.format_exc())
            succeeded = False
        if name == "build":
            report.content["built"] = succeeded
        passed &= succeeded
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="?", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu.json")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run and what is missing; run nothing")
    arguments = parser.parse_args()
    wanted = arguments.steps.split(",")
    if unknown := set(wanted) - STEPS.keys():
        parser.error(f"--steps: no step is called {', '.join(sorted(unknown))}")
    steps = {name: STEPS[name] for name in wanted}
    if arguments.dry_run:
        return dry_run(arguments.report.resolve(), steps, arguments.seconds)
    report = Report(arguments.report.resolve(), seconds=arguments.seconds)
    passed = run_steps(report, steps)
    report.content["passed"] = passed
    report.write()
    exits = {name: step["exit"] for name, step in report.content["steps"].items()}
    print(json.dumps({**report.content["machine"], **exits, "tests": report.content.get("tests")}, indent=1))
    if report.content["machine"]["capability"] is None:
        print("no CUDA device: nothing was tested on one", file=sys.stderr)
        return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
