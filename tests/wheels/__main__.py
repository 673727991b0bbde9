"""The command line of tests/wheel."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.snippets import ROOT

from .contents import LIBRARIES_OF_SCALEDOT_CUDA, libraries_of_scaledot, minors_in, problems
from .environments import Environment
from .torches import torch_folder

PLATFORM = "manylinux_2_28_x86_64"
LIMIT = 8_000_000
"""The bytes that a wheel for five versions of torch may have."""

CUDA_LIMIT = 24_000_000
"""The bytes that the wheel with the CUDA kernels may have."""

OUTSIDE = ["libtorch*", "libc10.so", "libgomp*", "libscaledot_kernels.so"]
"""Libraries of torch and of the other wheel, which auditwheel must not copy."""

TRIED = {
    "3.10": "2.11",
    "3.11": "2.13",
    "3.12": "2.12",
    "3.13": "2.14",
    "3.14": "2.15",
    "3.13t": "2.12",  # the last torch for it
    "3.14t": "2.15",
}
"""The torch that each Python is tried with: every Python and every torch once."""


HAS_CUDA = """
import scaledot
info = scaledot.build_info()
assert info["cuda_archs"] and info["cuda"], info
print("CUDA", info["cuda"], info["cuda_archs"])
"""


def supported_minors() -> list[str]:
    """Those that pyproject.toml states."""
    sys.path.insert(0, str(ROOT / "python"))
    from scaledot_build.torch_folder import TRIED, text_of

    return [text_of(minor) for minor in TRIED]


def one_of(choices: list[str], text: str) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"got {text}; needs one of {', '.join(choices)}")
    return text


def arguments() -> argparse.Namespace:
    minors = supported_minors()
    parser = argparse.ArgumentParser(
        prog="tests/wheel", description="Builds the wheel and tries it.", allow_abbrev=False
    )
    parser.add_argument(
        "--torch", action="append", type=lambda text: one_of(minors, text), help="a version of torch, such as 2.13; all"
    )
    parser.add_argument(
        "--python",
        action="append",
        type=lambda text: one_of(list(TRIED), text),
        help="try it with this Python, and with --torch if that is given once; all, each with one torch",
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--build-only", action="store_true", help="build and check the wheel, and try nothing")
    steps.add_argument("--wheel", type=Path, help="check and try this wheel, and build none")
    parser.add_argument("--cuda", action="store_true", help="build scaledot-cuda too; needs nvcc")
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.torch = [minor for minor in minors if minor in (chosen.torch or minors)]
    if chosen.python and len(chosen.torch) == 1:
        chosen.pairs = [(name, chosen.torch[0]) for name in chosen.python]
    else:
        wanted = chosen.python or TRIED
        chosen.pairs = [(name, minor) for name, minor in TRIED.items() if name in wanted and minor in chosen.torch]
    if not chosen.pairs:
        parser.error("--python: got a Python that is tried with another torch; needs one --torch to try it with")
    if chosen.wheel is not None:
        chosen.wheel = chosen.wheel.resolve()
    return chosen


def build(minors: list[str], cache: Path) -> Path:
    """Builds the wheel into dist/ and returns its path."""
    print(f"== building the wheel for torch {', '.join(minors)}", flush=True)
    folders = [str(torch_folder(minor, cache)) for minor in minors]
    return make_wheel(ROOT, {"SCALEDOT_TORCH_DIRS": os.pathsep.join(folders), "SCALEDOT_CUDA": "0"})


def make_wheel(project: Path, settings: dict[str, str]) -> Path:
    """Builds the wheel of the project into dist/, makes it one for old systems, and returns its path."""
    dist = ROOT / "dist"
    plain = dist / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(plain), "."]
    defaults = {"SCALEDOT_BUILD_DIR": str(ROOT / "build" / "wheel"), **os.environ}
    subprocess.run(command, check=True, cwd=project, env={**defaults, **settings, "CMAKE_BUILD_TYPE": "Release"})
    (built,) = plain.glob("scaledot*.whl")
    wheel = dist / re.sub(r"-linux_x86_64\.whl$", f"-{PLATFORM}.whl", built.name)
    wheel.unlink(missing_ok=True)
    outside = [word for name in OUTSIDE for word in ("--exclude", name)]
    repair = ["auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *outside, "-w", str(dist), str(built)]
    subprocess.run(repair, check=True)
    built.unlink()
    plain.rmdir()
    if not wheel.is_file():
        raise SystemExit(f"tests/wheel: auditwheel did not make {wheel.name}")
    return wheel


def interpreter(name: str, cache: Path) -> Path:
    """The program of this version of Python; built if there is none."""
    command = ["bash", str(ROOT / "tests" / "interpreters"), name]
    variables = {**os.environ, "SCALEDOT_CACHE": str(cache)}
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    return Path(found.stdout.strip())


def try_wheels(wheels: list[Path], python: str, minor: str, cache: Path) -> None:
    print(f"== Python {python} with torch {minor}", flush=True)
    with Environment(cache) as environment:
        environment.create(interpreter(python, cache), minor)
        environment.install(wheels)
        if len(wheels) > 1:
            environment.run("-c", HAS_CUDA)
        environment.run_readme()
        environment.compare()
        environment.run_tests()


def main() -> int:
    chosen = arguments()
    wheel = chosen.wheel or build(chosen.torch, chosen.cache)
    minors = minors_in(wheel) if chosen.wheel else chosen.torch
    if missing := sorted(set(chosen.torch) - set(minors)):
        raise SystemExit(f"--wheel: got {wheel.name}, which has nothing for torch {', '.join(missing)}")
    wheels = [wheel]
    found = problems(wheel, ROOT / "python" / "scaledot", libraries_of_scaledot(minors), LIMIT)
    if chosen.cuda:
        print("== building the wheel with the CUDA kernels", flush=True)
        project = ROOT / "python" / "scaledot_cuda"
        wheels.append(make_wheel(project, {}))
        found += problems(wheels[1], project, LIBRARIES_OF_SCALEDOT_CUDA, CUDA_LIMIT)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    for each in wheels:
        print(f"{each.name}: {each.stat().st_size:,} bytes", flush=True)
    failed = []
    for python, minor in [] if chosen.build_only else chosen.pairs:
        try:
            try_wheels(wheels, python, minor, chosen.cache)
        except (AssertionError, subprocess.CalledProcessError) as error:
            print(f"FAILED: Python {python} with torch {minor}: {error}", file=sys.stderr, flush=True)
            failed.append(f"{python} with torch {minor}")
    if failed:
        print(f"FAILED: Python {'; '.join(failed)}", file=sys.stderr)
        return 1
    print("the wheel is good")
    return 0


sys.exit(main())
