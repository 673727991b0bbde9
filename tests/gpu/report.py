"""The results of a run, in one folder that is complete at every moment:

report.json    the machine, and of each step how it ended and how long it took; written anew at every change
results.jsonl  a line for each probe, test, row of the bench, ..., appended as they come
log.txt        what the programs printed, as they print it
bench.md       the bench as a table
hang.txt       where the first kernel that hung was waiting
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu import lines

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu"  # nothing of it is a result
FILES = ("report.json", "results.jsonl", "log.txt", "bench.md", "hang.txt")
SHOWN = 1500  # characters of a step's output on the screen
LAST_WAIT = 10.0  # seconds for a killed program
ANSWER = 20.0  # seconds for the GPU to answer after a step that failed


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


def counts(results: Path, step: str) -> dict[str, int]:
    """How many lines of a step have each result."""
    found: dict[str, int] = {}
    for line in lines.read(results, step):
        if "result" in line:
            found[line["result"]] = found.get(line["result"], 0) + 1
    return found


def source_package() -> tuple[Path, ...]:
    """The folder of the source tree's package, if that has a compiled library; otherwise the installed one is used."""
    return (ROOT / "python",) if (ROOT / "python" / "scaledot" / "lib").is_dir() else ()


class Report:
    def __init__(self, folder: Path, work: Path = WORK) -> None:
        self.folder, self.work = folder, work
        self.results, self.log = folder / "results.jsonl", folder / "log.txt"
        self.content: dict[str, Any] = {"commit": commit(), "steps": {}}
        work.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        self.environment = dict(os.environ, PYTHONUNBUFFERED="1")
        self.use_packages(*source_package())
        # Programs find CUDA's Multi-Process Service by its pipes, and there are none in this folder: no step uses it.
        self.environment["CUDA_MPS_PIPE_DIRECTORY"] = str(work / "no_mps")
        self.write()

    def use_packages(self, *folders: Path) -> None:
        """The programs import scaledot, and scaledot_cuda if there is one, from these folders."""
        paths = (*folders, ROOT / "tests", ROOT / "tests" / "library")
        self.environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))

    def write(self) -> None:
        beside = self.folder / "report.json.new"
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        beside.replace(self.folder / "report.json")

    def step(self, name: str, **known: Any) -> None:
        self.content["steps"][name] = known
        self.write()

    def run(self, name: str, command: list[str], seconds: float) -> bool:
        """Runs a program for at most `seconds`, and reports it as a step. Returns whether it succeeded. Its processes
        are ended with it, and a process that the driver holds is not waited for."""
        print(f"== {name}, at most {seconds:.0f} s: {' '.join(command)}", flush=True)
        self.step(name, exit="running")
        begin = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"== {name}: {' '.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            exit = self.wait_for(command, seconds, log)
        with self.log.open("rb") as log:
            log.seek(start)
            output = log.read().decode(errors="replace")
        known = {"exit": exit, "seconds": round(time.monotonic() - begin, 1)}
        if found := counts(self.results, name):
            known["results"] = found
        self.step(name, **known)
        print(output[-SHOWN:], end="" if output.endswith("\n") else "\n")
        print(f"== {name}: exit {exit}, {known['seconds']} s", flush=True)
        return exit == 0

    def wait_for(self, command: list[str], seconds: float, log: Any) -> int | str:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"not started: {error}"
        exit: int | str
        try:
            exit = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            exit = f"stopped after {seconds:.0f} s"
        try:
            os.killpg(process.pid, 9)
            process.wait(timeout=LAST_WAIT)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            exit = f"{exit}, and does not end"
        return exit

    def gpu_answers(self) -> bool:
        """Whether a new process can still use the GPU."""
        return self.run("answer", [sys.executable, "-c", "import torch; print(torch.zeros(1, device='cuda'))"], ANSWER)


class Intention(Report):
    """Says what a run with a GPU would run, and does nothing."""

    def __init__(self, report: Report) -> None:
        self.folder, self.work, self.results, self.log = report.folder, report.work, report.results, report.log
        self.content: dict[str, Any] = {"steps": {}}
        self.environment: dict[str, str] = {}

    def write(self) -> None:
        pass

    def run(self, name: str, command: list[str], seconds: float) -> bool:
        print(f"with a GPU, at most {seconds:.0f} s: {' '.join(command)}", flush=True)
        return True
