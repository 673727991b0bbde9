"""Loads the compiled library, after a check that it fits the installed torch. Importing this module does both.

The library is compiled for one minor version of torch. The C++ interfaces of torch change with each, and under another
version the library would crash or compute wrong results. So the check comes before the library is loaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import warnings
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_REBUILD = "run `pip install --force-reinstall --no-deps .` (`-e .` if it was installed so) in the folder of its source"
_CAPABILITIES = ("default", "avx2", "avx512", "avx512_bf16")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def torch_requirement() -> str:
    """The supported range of torch, such as "torch>=2.11,<2.14".

    pyproject.toml states it, and pip installs it as the package's metadata. Without metadata (a source tree on
    PYTHONPATH) it is just "torch".
    """
    try:
        requirements = importlib.metadata.requires("scaledot") or []
    except importlib.metadata.PackageNotFoundError:
        return "torch"
    for requirement in requirements:
        match = re.fullmatch(r"torch\s*\(?([<>=!~][^;()]*)\)?", requirement)
        if match is not None:  # setuptools sorts the limits; here the lower one comes first
            return "torch" + ",".join(sorted((limit.strip() for limit in match[1].split(",")), reverse=True))
    return "torch"


def check_torch(built_for: str, found: str) -> None:
    """Raises ImportError unless `found`, a version of torch, has the major and minor number of `built_for`."""
    if _minor(built_for) != _minor(found):
        raise ImportError(
            f"scaledot was built for torch {_minor(built_for)} but torch {found} is installed: {_REBUILD} to build it "
            f"for this torch ({torch_requirement()}), or `pip install 'torch=={_minor(built_for)}.*'` to have that one "
            f"again."
        )


def _built_for() -> str:
    try:
        return (_PACKAGE / "torch_version.txt").read_text().strip()
    except OSError:
        raise ImportError(
            f"scaledot in {_PACKAGE} has no compiled library: run `pip install .` (or `pip install -e .`) in the "
            f"folder of its source, and start Python elsewhere or with the editable install."
        ) from None


def _load() -> Any:
    built_for = _built_for()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"scaledot needs torch, which is not installed: run `pip install 'torch=={_minor(built_for)}.*'`."
        ) from None
    check_torch(built_for, torch.__version__)
    library = _PACKAGE / "libscaledot.so"
    if not library.is_file():
        raise ImportError(f"scaledot's library {library} is missing: {_REBUILD} to build it again.")
    torch.ops.load_library(str(library))

    from . import _C

    return _C


def _warn_of_capability(_C: Any) -> None:
    wanted = os.environ.get("SCALEDOT_CPU_CAPABILITY")
    if wanted and wanted not in _CAPABILITIES:
        problem = f"is not one of {', '.join(_CAPABILITIES)}"
    elif wanted and wanted != _C.cpu_capability():
        problem = "is more than this machine offers"
    else:
        return
    warnings.warn(
        f"SCALEDOT_CPU_CAPABILITY={wanted} {problem}: using {_C.cpu_capability()}.", RuntimeWarning, stacklevel=3
    )


_C = _load()
_warn_of_capability(_C)

cmake_prefix_path = str(_PACKAGE)
"""What a C++ project adds to CMAKE_PREFIX_PATH so that find_package(scaledot) finds this installation."""


def build_info() -> dict[str, Any]:
    """How this installation was built.

    Returns:
        A dict with ``version``; ``torch``, the version it was built for; ``compiler``; ``build_type``; ``cpu_kernels``,
        fastest first; ``cuda_archs``, empty without CUDA kernels; ``cuda``, the toolkit's version or None; and
        ``cuda_status``, None without CUDA kernels, otherwise whether they were verified on hardware.

    Example:
        >>> scaledot.build_info()["cpu_kernels"][-1]
        'reference'
    """
    return dict(_C.build_info())


def cpu_capability() -> str:
    """The CPU features that the kernels use: "default", "avx2", "avx512" or "avx512_bf16".

    It is what this machine has. The environment variable SCALEDOT_CPU_CAPABILITY, read once, lowers it.
    """
    return str(_C.cpu_capability())
