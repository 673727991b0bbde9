"""The files that a wheel may contain."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zipfile
from pathlib import Path

LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8,)}
"""The newest symbol versions of manylinux_2_28, for 64-bit x86."""

_FROM_TORCH = {"libtorch_cpu.so", "libc10.so"}
_FROM_SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}


def _readelf(option: str, library: Path) -> str:
    return subprocess.check_output(["readelf", "-W", option, str(library)], text=True)


_OF_RUNTIME = re.compile(r"_Z(T[IVST])?(N[VK]*[RO]?)?S[abdiost]|__cxa_")
_OF_TORCH = re.compile(r"2at|3c10|5torch|6caffe2")


def too_new(library: Path) -> list[str]:
    """The symbols that the library takes from elsewhere and that an old system may not have.

    They have a version above the limits, such as "exp@GLIBC_2.29". Or they have none, though they belong to the C++
    runtime: torch's libraries have them too, and the linker took them from there. Not each build of torch has them.
    """
    found = []
    for symbol, version in re.findall(r" UND (\S+?)(?:@+(\S+).*)?$", _readelf("--dyn-syms", library), re.MULTILINE):
        family, _, number = version.partition("_")
        if version and tuple(map(int, number.split("."))) > LIMITS.get(family, ()):
            found.append(f"{symbol}@{version}")
        elif not version and _OF_RUNTIME.match(symbol) and not _OF_TORCH.search(symbol):
            found.append(f"{symbol}, of torch")
    return found


def problems_of_library(library: Path, needed: set[str]) -> list[str]:
    """The faults of a library that may need the libraries `needed` besides the system's."""
    dynamic = _readelf("-d", library)
    paths = [path for found in re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", dynamic) for path in found.split(":")]
    others = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic)) - needed - _FROM_SYSTEM
    problems = [f"needs {name}" for name in sorted(others)]
    problems += [f"RUNPATH {path!r}; needs to begin with $ORIGIN" for path in paths if not path.startswith("$ORIGIN")]
    problems += [f"{symbol}: an older system may not have it" for symbol in too_new(library)]
    if re.search(r"\]\s+\.symtab\s", _readelf("-S", library)):
        problems.append("is not stripped")
    return problems


def libraries_of_scaledot(minors: list[str]) -> dict[str, set[str]]:
    """The libraries of the wheel scaledot for these versions of torch, and what they need besides the system's."""
    ops = {*_FROM_TORCH, "libscaledot_kernels.so"}
    return {
        "scaledot/lib/libscaledot_kernels.so": set(),
        **{f"scaledot/lib/torch{minor}/libscaledot.so": ops for minor in minors},
    }


def minors_in(wheel: Path) -> list[str]:
    """The minor versions of torch that the wheel has ops for."""
    with zipfile.ZipFile(wheel) as archive:
        found = [re.fullmatch(r"scaledot/lib/torch(\d+\.\d+)/libscaledot\.so", name) for name in archive.namelist()]
    return [match[1] for match in found if match]


LIBRARIES_OF_SCALEDOT_CUDA = {"scaledot_cuda/lib/libscaledot_cuda.so": {"libscaledot_kernels.so"}}


def _modules(source: Path) -> list[Path]:
    """The modules of the package in the folder `source`, without its setup.py and what an earlier build left behind."""
    found = source.rglob("*.py")
    return [path for path in found if path.name != "setup.py" and path.relative_to(source).parts[0] != "build"]


def problems(wheel: Path, source: Path, libraries: dict[str, set[str]], limit: int) -> list[str]:
    """The faults of the wheel of the package in the folder `source`, of at most `limit` bytes.

    Its modules must be those in `source`: setuptools may add what an earlier build left behind.
    """
    found = []
    if not wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl"):
        found.append(f"{wheel.name}: needs the tag py3-none-manylinux_2_28_x86_64")
    size = wheel.stat().st_size
    if size > limit:
        found.append(f"{wheel.name}: {size:,} bytes; needs at most {limit:,}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        binaries = [name for name in names if re.search(r"\.(so|a|o)(\.|$)|\.libs/", name)]
        if sorted(binaries) != sorted(libraries):
            found.append(f"libraries: got {sorted(binaries)}; needs {sorted(libraries)}")
        for name, needed in libraries.items():
            if name in names:
                library = Path(archive.extract(name, folder))
                found += [f"{name}: {problem}" for problem in problems_of_library(library, needed)]
        modules = {name for name in names if name.endswith(".py")}
        wanted = {str(path.relative_to(source.parent)) for path in _modules(source)}
        found += [f"{name}: is in the wheel or the source only" for name in sorted(modules ^ wanted)]
        foreign = [name for name in names if not re.match(rf"{source.name}(-[\d.]+\.dist-info)?/", name)]
        found += [f"{name}: is not part of the package" for name in foreign]
    return found
