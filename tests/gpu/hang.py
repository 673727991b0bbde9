"""Where the first kernel that hung was waiting, from a core dump of the GPU, which cuda-gdb reads.

    python -m gpu.hang --results results.jsonl --out hang.txt [--watchdog FOLDER]

It runs the first probe of the smoke test that hung once more. With the library in FOLDER, whose waits are an error
after two seconds, CUDA writes the core dump at that error. Otherwise, or if none comes, it asks CUDA for one after a
while.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu import lines
from gpu.probes import probes

WITHOUT = "skip_global_memory,skip_local_memory,skip_constbank_memory"  # of the dump, which is large otherwise
BEFORE_ASKING = 10.0  # seconds: a probe starts in fewer, and ends in fewer if it ends at all
PROBE = 14.0  # seconds for the probe
WRITING = 8.0  # seconds for a core dump that was asked for
READING = 15.0  # seconds for cuda-gdb
QUESTIONS = ("info cuda kernels", "info cuda threads", "info cuda warps")


def first_hang(results: Path) -> str | None:
    return next((line["probe"] for line in lines.read(results, "smoke") if line["result"] == "hang"), None)


def debugger() -> str:
    places = [shutil.which("cuda-gdb"), *map(str, Path("/usr/local").glob("cuda*/bin/cuda-gdb"))]
    return next((place for place in places if place), "cuda-gdb")


def debug_command(core: Path) -> list[str]:
    asked = [part for question in QUESTIONS for part in ("-ex", question)]
    return [debugger(), "-batch", "-ex", f"target cudacore {core}", *asked]


class Hang:
    def __init__(self, probe: str, out: Path, device: str, folder: Path) -> None:
        self.probe, self.out, self.device, self.folder = probe, out, device, folder

    def say(self, text: str) -> None:
        print(text, flush=True)
        with self.out.open("a") as file:
            file.write(f"{text}\n")

    def command(self) -> list[str]:
        words = ["--results", str(self.folder / "probe.jsonl"), "--only", self.probe, "--seconds", str(PROBE)]
        return [sys.executable, "-m", "gpu.smoke", "--device", self.device, *words]

    def core(self, more: dict[str, str], asks: bool) -> Path | None:
        """Runs the probe with this environment. Returns the core dump, if there is one."""
        pattern = f"core_{'asked' if asks else 'error'}_"
        pipe = self.folder / "pipe"
        environment = {**os.environ, **more, "CUDA_COREDUMP_FILE": str(self.folder / f"{pattern}%p"),
                       "CUDA_COREDUMP_GENERATION_FLAGS": WITHOUT, "CUDA_COREDUMP_PIPE": str(pipe)}  # fmt: skip
        begin = time.monotonic()
        process = subprocess.Popen(self.command(), env=environment, start_new_session=True)
        try:
            if asks:
                time.sleep(min(BEFORE_ASKING, PROBE) if self.device == "cuda" else 0)
                if pipe.exists():
                    with contextlib.suppress(OSError):
                        os.write(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), b"1")
            limit = WRITING + (PROBE if not asks else max(PROBE - (time.monotonic() - begin), 0))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        return max(self.folder.glob(f"{pattern}*"), key=lambda path: path.stat().st_size, default=None)

    def read(self, core: Path) -> None:
        command = debug_command(core)
        self.say(f"{core.name}, {core.stat().st_size} bytes: {' '.join(command)}")
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=READING)
            self.say(done.stdout)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.say(f"cuda-gdb: {error}")

    def find(self, watchdog: Path | None) -> bool:
        """Returns whether a core dump was read."""
        self.say(f"{self.probe} hung. It runs once more.")
        if watchdog and watchdog.is_dir():
            paths = os.pathsep.join([str(watchdog), os.environ.get("PYTHONPATH", "")])
            core = self.core({"PYTHONPATH": paths, "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1"}, asks=False)
            if core:
                self.read(core)
                return True
            self.say("The library in which waits are an error left no core dump.")
        core = self.core({"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1"}, asks=True)
        if core:
            self.read(core)
            return True
        self.say(f"There is no core dump. With one: {' '.join(debug_command(Path('CORE')))}")
        return False


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("gpu.hang", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, required=True, help="of the smoke test")
    parser.add_argument("--out", type=Path, required=True, help="for the text")
    parser.add_argument("--watchdog", type=Path, metavar="FOLDER", help="with scaledot_cuda in it")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the first probe, hung or not")
    arguments = parser.parse_args(words)
    probe = first_hang(arguments.results)
    if arguments.device == "cpu":
        probe = probe or probes()[0].name
    if probe is None:
        print("no probe hung")
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = Hang(probe, arguments.out, arguments.device, Path(folder)).find(arguments.watchdog)
    return 0 if found or arguments.device == "cpu" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
