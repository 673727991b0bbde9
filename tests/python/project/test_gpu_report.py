"""The plan of tests/gpu and its results, tried without a GPU, so that no minute of one is spent on a typo."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import hang, library, lines, machine, plan, report
from gpu.plan import STEPS, Run, Step
from gpu.probes import probes
from gpu.report import Report, source_package

ROOT = Path(__file__).resolve().parents[3]
PYTHON = [sys.executable, "-c"]


@pytest.fixture
def new(tmp_path: Path) -> Report:
    return Report(tmp_path / "out", tmp_path / "work")


def steps_of(report: Report) -> dict[str, Any]:
    return json.loads((report.folder / "report.json").read_text())["steps"]


# ---------------------------------------------------------------------------------------------------- one step
def test_a_step_that_succeeds(new: Report) -> None:
    assert new.run("hello", [*PYTHON, "import os; print('hello from', os.environ['PYTHONPATH'])"], 30)
    assert steps_of(new)["hello"]["exit"] == 0
    folders = os.pathsep.join(map(str, (*source_package(), ROOT / "tests", ROOT / "tests" / "library")))
    assert f"hello from {folders}" in new.log.read_text()


def test_a_step_that_fails(new: Report) -> None:
    assert not new.run("broken", [*PYTHON, "print('so far'); raise SystemExit(3)"], 30)
    assert steps_of(new)["broken"]["exit"] == 3
    assert "so far" in new.log.read_text()


def test_a_step_that_takes_too_long_leaves_what_it_said(new: Report) -> None:
    """Its own processes are ended, too."""
    child = "import os, time; print('child', os.getpid(), flush=True); os.fork(); time.sleep(60)"
    begin = time.monotonic()
    assert not new.run("slow", [*PYTHON, child], 2)
    assert time.monotonic() - begin < 12
    assert steps_of(new)["slow"]["exit"] == "stopped after 2 s"
    assert "child" in new.log.read_text()


def test_a_step_does_not_wait_for_what_its_program_left(new: Report) -> None:
    leaves = "import os, time; os.fork() or time.sleep(60)"
    begin = time.monotonic()
    assert new.run("leaves", [*PYTHON, leaves], 30)
    assert time.monotonic() - begin < 12


def test_a_program_that_is_not_there(new: Report) -> None:
    assert not new.run("missing", ["no-such-program"], 5)
    assert "no-such-program" in steps_of(new)["missing"]["exit"]


def test_the_folder_is_complete_during_a_step(new: Report) -> None:
    lines.Lines(new.results).add("looks", result="right")
    show = f"import json; print(json.load(open({str(new.folder / 'report.json')!r}))['steps']['looks']['exit'])"
    assert new.run("looks", [*PYTHON, show], 30)
    assert new.log.read_text().splitlines()[-1] == "running"
    assert steps_of(new)["looks"]["results"] == {"right": 1}
    assert sorted(path.name for path in new.folder.iterdir()) == ["log.txt", "report.json", "results.jsonl"]
    Report(new.folder, new.work)
    assert sorted(path.name for path in new.folder.iterdir()) == ["report.json"]  # of the new run


def test_no_step_uses_the_multi_process_service(new: Report) -> None:
    """Its clients look for its pipes in a folder."""
    assert new.run("mps", [*PYTHON, "import os; print(os.path.exists(os.environ['CUDA_MPS_PIPE_DIRECTORY']))"], 30)
    assert new.log.read_text().splitlines()[-1] == "False"


def test_the_commit_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEDOT_COMMIT", "abc123")
    assert report.commit() == "abc123"
    monkeypatch.delenv("SCALEDOT_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert report.commit() == "unknown"


# ---------------------------------------------------------------------------------------------------- the plan
@pytest.mark.parametrize(
    ("minutes", "left_out"),
    [
        (9, []),
        (5, []),
        (3, ["bench", "races", "sanitizer"]),
        (0.5, ["smoke", "hang", "correctness", "bench", "races", "sanitizer"]),
    ],
)
def test_what_fits(minutes: float, left_out: list[str]) -> None:
    assert [name for name in STEPS if name not in plan.chosen(list(STEPS), 60 * minutes)] == left_out


def test_all_probes_fit() -> None:
    """An H200 with 16 cores ran 93 probes in 62 seconds."""
    assert len(probes()) * 62 / 93 + plan.GRACE <= STEPS["smoke"].least


def test_the_time_of_a_step() -> None:
    """All but what later steps of the plan need; more than the least if earlier ones were quick."""
    planned = plan.chosen(list(STEPS), 205)
    assert plan.limit("smoke", planned, 195) == 195 - plan.SPARE - 25 - 35 - 8 - 25
    assert plan.limit("bench", planned, 100) == 95
    assert plan.limit("bench", planned, 1000) == STEPS["bench"].most
    assert plan.limit("bench", planned, 20) == 0
    assert plan.limit("races", planned, 60) == 55  # not in the plan, but there is time
    assert plan.limit("races", planned, 30) == 0
    assert sum(step.most for step in STEPS.values()) < 12 * 60


def played(new: Report, monkeypatch: pytest.MonkeyPatch, steps: dict[str, Any], answers: bool = True) -> bool:
    monkeypatch.setattr(plan, "STEPS", {name: Step(run, 1, 5) for name, run in steps.items()})
    monkeypatch.setattr(new, "gpu_answers", lambda: answers)
    return plan.run_all(Run(new, dry=False), list(steps), 60)


def test_steps_go_on_after_one_that_fails(new: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(run: Run) -> bool:
        """Has a typo."""
        raise KeyError("a typo")

    def runs(run: Run) -> bool:
        """Works."""
        return run.report.run("runs", [*PYTHON, "pass"], run.seconds)

    assert not played(new, monkeypatch, {"import": runs, "raises": raises, "runs": runs})
    assert "a typo" in steps_of(new)["raises"]["exit"]
    assert steps_of(new)["runs"]["exit"] == 0
    assert played(new, monkeypatch, {"import": runs, "runs": runs})


def test_without_a_library_or_a_gpu_nothing_else_is_tried(new: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Run) -> bool:
        """Fails."""
        return False

    assert not played(new, monkeypatch, {"import": fails, "smoke": fails})
    assert steps_of(new)["smoke"] == {"exit": "not run: scaledot could not be imported"}
    assert not played(new, monkeypatch, {"smoke": fails, "bench": fails}, answers=False)
    assert steps_of(new)["bench"] == {"exit": "not run: the GPU does not answer after the step smoke"}


def test_a_dry_run_runs_the_programs_and_says_what_a_gpu_would_run(tmp_path: Path) -> None:
    """The first two steps. All of them take two minutes."""
    command = [
        "bash",
        str(ROOT / "tests/gpu/run"),
        str(tmp_path),
        "--dry-run",
        "--steps",
        "smoke",
        "--minutes",
        "3",
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "report.json").read_text())
    assert {name: step["exit"] for name, step in content["steps"].items()} == {"import": 0, "smoke": 0}
    assert content["passed"] is False  # no GPU was tested
    assert content["steps"]["smoke"]["results"].keys() == {"right"}
    assert f"with a GPU, at most {STEPS['smoke'].most} s: " in done.stdout
    assert "gpu.smoke" in done.stdout
    assert "--device cuda" in done.stdout
    assert "On a GPU, 3 minutes are for import, smoke, if" in done.stdout


def test_unknown_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(["--steps", "smoke,nothing"])
    assert "--steps: no step is called nothing" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- the library
def test_a_build_without_code_for_hopper_is_refused_there() -> None:
    found = {"gpu": "H100", "capability": [9, 0], "build": {"cuda_archs": ["sm_80", "sm_90"]}}
    assert machine.problem(found) == "the library has kernels for sm_80, sm_90; needs sm_90a"
    assert machine.problem({**found, "build": {"cuda_archs": ["sm_90a"]}}) is None
    assert machine.problem({**found, "capability": [8, 0]}) is None
    assert machine.problem({**found, "build": {"cuda_archs": []}}) == "the library has no GPU kernels"
    assert machine.problem({"build": {"cuda_archs": []}}) is None  # a dry run


def test_the_facts_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert machine.main(["--device", "cpu", "--results", str(file)]) == 0
    (line,) = lines.read(file, "import")
    assert line["torch"] == torch.__version__
    assert line["build"]["version"]


def test_the_architecture_is_always_set(new: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of CUDA may have set it, to 9.0 without the a."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0 10.0+PTX")
    commands: dict[str, list[str]] = {}
    monkeypatch.setattr(new, "run", lambda name, command, seconds: commands.update({name: command}) or True)
    assert library.build(new, "9.0", 100)
    assert new.environment["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert commands.keys() == {"configure", "build"}
    assert "-DCMAKE_CUDA_FLAGS=-lineinfo --split-compile=0" in commands["configure"]
    assert library.build(new, "8.6", 100)
    assert new.environment["TORCH_CUDA_ARCH_LIST"] == "8.6"


def test_a_build_that_was_made_elsewhere(new: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the Python files of the source tree, and is tried first."""
    assert library.prebuilt(new) is None
    assert library.watchdog(new) is None
    made = new.work / library.PREBUILT
    for folder in ("scaledot/lib/torch2.11", "plain/scaledot_cuda/lib", "watchdog/scaledot_cuda/lib"):
        (made / folder).mkdir(parents=True)
    (made / "plain/scaledot_cuda/__init__.py").touch()
    package = library.prebuilt(new)
    assert package is not None
    assert (package / "scaledot" / "_load.py").is_file()
    assert [path.name for path in (package / "scaledot" / "lib").iterdir()] == ["torch2.11"]
    assert (package / "scaledot_cuda" / "__init__.py").is_file()
    assert library.watchdog(new) == made / "watchdog"

    tried: list[str] = []

    def run(name: str, command: list[str], seconds: float) -> bool:
        tried.append(new.environment["PYTHONPATH"].split(os.pathsep)[0])
        new.step(name, exit=0)
        return len(tried) == 2

    monkeypatch.setattr(new, "run", run)
    assert plan.importing(Run(new, dry=False, seconds=60))
    assert tried == [str(package), str((*source_package(), ROOT / "tests")[0])]
    assert steps_of(new)["prebuilt"] == {"exit": 0}


def test_nvcc_is_found_where_images_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    assert library.find_nvcc() == str(nvcc)
    monkeypatch.delenv("CUDACXX")
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert library.find_nvcc() == str(nvcc)


# ---------------------------------------------------------------------------------------------------- the first hang
FAKE_SMOKE = """
import os, sys, time
from pathlib import Path
core = os.environ["CUDA_COREDUMP_FILE"].replace("%p", "1")
if "CUDA_ENABLE_COREDUMP_ON_EXCEPTION" in os.environ:
    Path(core).write_text("of an error")
    sys.exit()
pipe = os.environ["CUDA_COREDUMP_PIPE"]
os.mkfifo(pipe)
with open(pipe) as asked:
    asked.read(1)
Path(core).write_text("that was asked for")
time.sleep(60)
"""


@pytest.mark.parametrize("watchdog", [True, False])
def test_where_a_kernel_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watchdog: bool) -> None:
    """A stand-in for cuda-gdb gets the core dump of a stand-in for the probe."""
    debugger = tmp_path / "cuda-gdb"
    debugger.write_text('#!/bin/sh\necho "asked: $@"\n')
    debugger.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hang.Hang, "command", lambda self: [*PYTHON, FAKE_SMOKE])
    monkeypatch.setattr(hang, "BEFORE_ASKING", 1.5)
    monkeypatch.setattr(hang, "PROBE", 2.0)
    monkeypatch.setattr(hang, "WRITING", 1.5)
    results, out = tmp_path / "results.jsonl", tmp_path / "hang.txt"
    words = ["--results", str(results), "--out", str(out), *(["--watchdog", str(tmp_path)] if watchdog else [])]
    assert hang.main(words) == 0  # nothing hung
    lines.Lines(results).add("smoke", probe="plain d64 bfloat16", result="hang")
    lines.Lines(results).add("smoke", probe="causal d64 bfloat16", result="hang")
    assert hang.main(words) == 0
    said = out.read_text()
    assert said.startswith("plain d64 bfloat16 hung.")
    assert f"core_{'error' if watchdog else 'asked'}_1" in said
    assert "asked: -batch -ex target cudacore" in said
    assert "info cuda threads" in said


# ---------------------------------------------------------------------------------------------------- the build
def test_a_build_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it runs, and what it leaves: programs that compile are replaced."""
    path = ROOT / "tests" / "gpu" / "build"
    loader = importlib.machinery.SourceFileLoader("gpu_build", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_build", loader))
    loader.exec_module(module)
    commands: list[list[str]] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> None:
        assert env["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0a"
        commands.append(command)
        if "--install" in command:
            library = Path(command[command.index("--prefix") + 1]) / "lib" / f"{command[-2]}.so"
            library.parent.mkdir(parents=True)
            library.write_bytes(bytes(1000))

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0 10.0+PTX")  # as images of CUDA do
    monkeypatch.setattr(module, "WORK", tmp_path)
    monkeypatch.setattr(module.subprocess, "run", run)
    torch_folder = str(Path(torch.__file__).parent)
    assert module.main(["--torch", torch_folder, "--archs", "8.0,9.0a"]) == 0
    assert [command[1] for command in commands] == ["-S", "--build", "--install", "--install", "--install"]
    assert f"-DSCALEDOT_TORCH_DIRS={torch_folder}" in commands[0]
    assert "-DSCALEDOT_WATCHDOG=1" in commands[0]
    made = tmp_path / library.PREBUILT
    assert sorted(str(file.relative_to(made)) for file in made.rglob("*") if file.is_file()) == [
        "plain/scaledot_cuda/__init__.py",
        "plain/scaledot_cuda/lib/cuda.so",
        "scaledot/lib/scaledot.so",
        "watchdog/scaledot_cuda/__init__.py",
        "watchdog/scaledot_cuda/lib/watchdog.so",
    ]
    monkeypatch.setattr(module, "LIMIT", 0)
    assert module.main(["--torch", torch_folder, "--archs", "8.0,9.0a"]) == 1
