"""What tests/gpu/run does: each step with a time limit of its own, all of them within nine minutes, and the report
written again after every step, so that what was seen survives whatever comes next."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
KEPT = 20000  # characters of a step's output

Step = Callable[["Report"], None]


class Report:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"commit": commit(), "machine": machine(), "steps": {}}
        self.environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"), PYTHONUNBUFFERED="1")

    def write(self) -> None:
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def run(self, name: str, command: list[str], seconds: float) -> dict[str, Any]:
        """Runs a command for at most so long; what became of it stands in the report."""
        print(f"== {name}: {' '.join(command)}", flush=True)
        begin = time.monotonic()
        log = BUILD / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | str = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = f"stopped after {seconds:.0f} s"
        output = log.read_text(errors="replace")
        step = {"exit": code, "seconds": round(time.monotonic() - begin, 1), "output": output[-KEPT:]}
        self.content["steps"][name] = step
        self.write()
        print(output[-1500:], flush=True)
        print(f"== {name}: exit {code}, {step['seconds']} s", flush=True)
        return step


def commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    import torch

    there = torch.cuda.is_available()
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if there else "no CUDA device",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if there else None,
    }


def build(report: Report) -> None:
    import torch

    capability = report.content["machine"]["capability"] or "8.0"
    report.environment.setdefault("TORCH_CUDA_ARCH_LIST", capability + ("a" if capability == "9.0" else ""))
    options = {
        "SCALEDOT_CUDA": "1",
        "SCALEDOT_WERROR": "1",
        "SCALEDOT_EDITABLE": "1",
        "SCALEDOT_TORCH_DIR": str(Path(torch.__file__).parent),
        "Python_EXECUTABLE": sys.executable,
    }
    configure = ["cmake", "-S", ".", "-B", str(BUILD), "-G", "Ninja", *(f"-D{k}={v}" for k, v in options.items())]
    if report.run("configure", configure, 60)["exit"] == 0:
        report.run("build", ["cmake", "--build", str(BUILD), "--target", "install"], 240)


def correctness(report: Report) -> None:
    junit = BUILD / "tests.xml"
    junit.unlink(missing_ok=True)
    parallel = ["-n", "8"] if _has("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=50", f"--junitxml={junit}", *parallel]
    report.run("correctness", [*command, "tests/python/test_cuda.py"], 200)
    if junit.is_file():
        suite = next(ElementTree.parse(junit).iter("testsuite"))
        counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        failed = [
            case.get("name", "")
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        report.content["tests"] = {**counts, "failed": failed}
        report.write()


def sanitizer(report: Report) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        report.content["steps"]["sanitizer"] = {"exit": "compute-sanitizer was not found"}
        return
    for check in ("memcheck", "racecheck"):
        command = [tool, f"--tool={check}", "--error-exitcode=9", "--kernel-regex", "kns=scaledot"]
        report.run(check, [*command, sys.executable, "tests/gpu/small.py"], 70)


def bench(report: Report) -> None:
    readings = BUILD / "bench.json"
    readings.unlink(missing_ok=True)
    command = [sys.executable, "-m", "scaledot", "compare", "--device", "cuda", "--quick", "--json", str(readings)]
    report.run("bench", command, 90)
    if readings.is_file():
        report.content["bench"] = json.loads(readings.read_text())
        report.write()


def _has(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


STEPS: dict[str, Step] = {"build": build, "correctness": correctness, "sanitizer": sanitizer, "bench": bench}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="?", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu.json")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of %(default)s")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.report.resolve())
    report.write()
    for name in arguments.steps.split(","):
        STEPS[name](report)
    report.write()
    exits = {name: step["exit"] for name, step in report.content["steps"].items()}
    print(json.dumps({**report.content["machine"], **exits, "tests": report.content.get("tests")}, indent=1))
    there = report.content["machine"]["capability"] is not None
    if not there:
        print("no CUDA device: nothing was tested on one", file=sys.stderr)
    return 0 if there and all(code == 0 for code in exits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
