"""Makes a kernel for the Hugging Face hub, a folder that `kernels.get_local_kernel` and `kernels.get_kernel` load:
    PYTHONPATH=python python -m scaledot_build.hub_kernel FOLDER

It is built from this source, for the torch of the environment or those that SCALEDOT_TORCH_DIRS names. FOLDER gets
    build/torch213-cxx11-cpu-x86_64-linux/    for each torch
        __init__.py                           the functions of scaledot, and of scaledot.dropin.flash_attn
        metadata.json                         what the kernels package reads
        scaledot/                             the package, with its CPU kernels
The ops have a namespace that names this version of the source. So several versions, and an installed scaledot, can be
loaded in one process. https://huggingface.co/docs/kernels/kernel-requirements describes the format.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import tempfile
from pathlib import Path

from .cmake_build import ROOT, build_and_install, cmake_settings
from .torch_folder import Minor, check_version, find_torches, minor_of, text_of

PACKAGE = ROOT / "python" / "scaledot"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "__main__.py", "compare", "include", "lib", "share", "*.so")
"""The command line is not part of a kernel."""

INIT = '''"""scaledot: scaled dot-product attention on a CPU, under scaledot's names and flash-attn's."""

from .scaledot import *
from .scaledot import __version__
from .scaledot.dropin.flash_attn import (
    bert_padding,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
'''


def namespace_of(source: Path) -> str:
    """The namespace of the ops: it changes with every file that a kernel is built from."""
    digest = hashlib.sha256()
    for folder in ("csrc", "python/scaledot"):
        for path in sorted((source / folder).rglob("*")):
            if path.suffix in (".cpp", ".h", ".py", ".cmake"):
                digest.update(f"{path.relative_to(source)}\n".encode())
                digest.update(path.read_bytes())
    return f"scaledot_{digest.hexdigest()[:12]}"


def metadata(namespace: str) -> dict[str, object]:
    return {
        "id": f"_{namespace}",
        "name": "scaledot",
        "version": 1,  # of the kernel's interface
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }


def variant_of(minor: Minor) -> str:
    """The folder's name, such as torch213-cxx11-cpu-x86_64-linux."""
    return f"torch{minor[0]}{minor[1]}-cxx11-cpu-{platform.machine()}-{platform.system().lower()}"


def build(namespace: str, torches: list[Path], prefix: Path) -> None:
    """Compiles the libraries, and installs them to prefix/lib."""
    settings = {
        **cmake_settings(False),
        "SCALEDOT_BUILD_TESTS": 0,
        "SCALEDOT_CUDA": 0,
        "SCALEDOT_OP_NAMESPACE": namespace,
        "SCALEDOT_TORCH_DIRS": ";".join(map(str, torches)),
    }
    build_and_install("hub_kernel", settings, prefix, strip=True)


def write_variant(folder: Path, namespace: str, libraries: Path, minor: Minor) -> None:
    """The kernel for one torch, from the folder of the compiled libraries."""
    package = folder / "scaledot"
    shutil.copytree(PACKAGE, package, ignore=LEFT_OUT)
    (package / "_namespace.py").write_text(f'"""The namespace of the ops in torch."""\n\nNAMESPACE = "{namespace}"\n')
    own = f"torch{text_of(minor)}"
    (package / "lib" / own).mkdir(parents=True)
    shutil.copy(libraries / f"lib{namespace}_kernels.so", package / "lib")
    shutil.copy(libraries / own / "libscaledot.so", package / "lib" / own)
    (folder / "__init__.py").write_text(INIT)
    (folder / "metadata.json").write_text(json.dumps(metadata(namespace), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="where the kernel goes; must not exist, or be empty")
    folder: Path = parser.parse_args().folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"folder: got {folder}, which has files; needs a new or an empty folder")
    torches, namespace = find_torches(), namespace_of(ROOT)
    minors = [minor_of(check_version(torch)) for torch in torches]
    with tempfile.TemporaryDirectory() as prefix:
        build(namespace, torches, Path(prefix))
        for minor in minors:
            write_variant(folder / "build" / variant_of(minor), namespace, Path(prefix) / "lib", minor)
    print(f"{folder}: {', '.join(map(variant_of, minors))}, ops in torch.ops.{namespace}")


if __name__ == "__main__":
    main()
