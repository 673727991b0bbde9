"""Loads the compiled libraries, after a check that they fit the installed torch. Importing this module does both.

    lib/libscaledot_kernels.so     the CPU kernels; needs no torch and no Python
    lib/torchX.Y/libscaledot.so    the ops, for one minor version of torch; an installation may have several
    lib/libscaledot_cuda.so        the GPU kernels, if they were built; or those of the package scaledot_cuda

The C++ interfaces of torch change with each minor version, and under another one the ops would crash or compute wrong
results. So the check comes before anything is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._keywords import check_keywords
from ._namespace import NAMESPACE

_PACKAGE = Path(__file__).resolve().parent
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_REBUILD = "run `pip install --force-reinstall --no-deps .` (`-e .` if it was installed so) in the folder of its source"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _in_words(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def check_torch(built_for: Sequence[str], found: str) -> None:
    """Raises ImportError unless the minor version of `found`, a version of torch, is one of `built_for`, in order."""
    if _minor(found) not in built_for:
        raise ImportError(
            f"scaledot was built for torch {_in_words(built_for)} but torch {found} is installed: {_REBUILD} to build "
            f"it for this torch, or `pip install 'torch=={built_for[-1]}.*'` to have one that fits (if torchvision is "
            f"installed, name it in the same command, as it fits one torch only)."
        )


def _built_for() -> list[str]:
    """The minor versions of torch with a library, the oldest first."""
    folders = [path.parent.name for path in _PACKAGE.glob(f"lib/torch*/libscaledot{_SUFFIX}")]
    found = [re.fullmatch(r"torch(\d+)\.(\d+)", folder) for folder in folders]
    minors = sorted((int(match[1]), int(match[2])) for match in found if match)
    if not minors:
        raise ImportError(
            f"scaledot in {_PACKAGE} has no compiled library: run `pip install .` (or `pip install -e .`) in the "
            f"folder of its source, and start Python elsewhere or with the editable install."
        )
    return [f"{major}.{minor}" for major, minor in minors]


def _cuda_libraries() -> list[Path]:
    """The library with the GPU kernels, if there is one: of this build, else of the package scaledot_cuda."""
    folders = [_PACKAGE]
    other = importlib.util.find_spec("scaledot_cuda")
    if other is not None and other.origin is not None:
        folders.append(Path(other.origin).parent)
    return [path for folder in folders if (path := folder / "lib" / "libscaledot_cuda.so").is_file()][:1]


def _load() -> Any:
    """Loads the ops and returns their namespace."""
    built_for = _built_for()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"scaledot needs torch, which is not installed: run `pip install 'torch=={built_for[-1]}.*'`."
        ) from None
    check_torch(built_for, torch.__version__)
    torch.ops.load_library(str(_PACKAGE / "lib" / f"torch{_minor(torch.__version__)}" / f"libscaledot{_SUFFIX}"))
    ops = getattr(torch.ops, NAMESPACE)
    for path in _cuda_libraries():
        ctypes.CDLL(str(path))  # registers the kernels
        info = json.loads(ops.build_info())
        if info["cuda_version"] != info["version"]:
            raise ImportError(
                f"scaledot {info['version']} does not fit the GPU kernels of scaledot {info['cuda_version']} in "
                f"{path}: run `pip install ./python/scaledot_cuda` in the source of scaledot {info['version']}."
            )
    return ops


OPS = _load()
"""The ops, as attributes."""

cmake_prefix_path = str(_PACKAGE)
"""The folder that a C++ project adds to CMAKE_PREFIX_PATH so that find_package(scaledot) finds this installation."""


@check_keywords
def build_info() -> dict[str, Any]:
    """How this installation was built.

    Returns:
        A dict with ``version``; ``torch``, the version that the loaded ops were built for; ``torch_minors``, the minor
        versions of torch that there are ops for; ``compiler``; ``build_type``; ``cpu_kernels``, fastest first;
        ``cuda_archs``, empty without CUDA kernels; ``cuda``, the toolkit's version or None; and ``cuda_status``, None
        without CUDA kernels, otherwise whether they were verified on hardware.

    Example:
        >>> scaledot.build_info()["cpu_kernels"][-1]
        'default'
    """
    info: dict[str, Any] = json.loads(OPS.build_info())
    return {
        **{name: info[name] for name in ("version", "torch")},
        "torch_minors": _built_for(),
        **{name: info[name] for name in ("compiler", "build_type")},
        "cpu_kernels": kernel_names(),
        "cuda_archs": info["cuda_archs"].split(";") if "cuda" in info else [],
        "cuda_status": info.get("cuda_status"),
        "cuda": info.get("cuda"),
    }


@check_keywords
def cpu_capability() -> str:
    """The CPU features that the kernels use.

    On x86-64 "default", "avx2", "avx512", "avx512_bf16" or "amx_bf16"; on ARM64 "default", "neon" or "neon_bf16". It is
    what this machine has. The environment variable SCALEDOT_CPU_CAPABILITY, read once, lowers it.
    """
    return str(OPS.cpu_capability())


def kernel_names() -> list[str]:
    """The CPU kernels, fastest first."""
    return list(OPS.kernel_names())


def force_kernel(name: str | None) -> None:
    """For tests: the CPU kernel that is taken first, if it can run the call. None: the fastest first again."""
    if not OPS.force_kernel(name):
        raise ValueError(f"name: got {name!r}; needs one of {kernel_names()}")


def _warn_of_environment() -> None:
    """Gives the warnings of csrc/ops/common/environment.cpp, which a C++ program would get from its first call."""
    from ._warn import warn  # imported here: it imports torch, which is checked first

    for warning in OPS.take_environment_warnings():
        warn(warning, RuntimeWarning)


_warn_of_environment()
