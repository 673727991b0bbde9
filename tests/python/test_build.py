"""The installation: its files, its requirements, and its messages when something does not fit."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import scaledot

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(scaledot.__file__).parent
REBUILD = "run `pip install --force-reinstall --no-deps .` (`-e .` if it was installed so) in the folder of its source"


def run(code: str, *, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter, with `path` first on sys.path."""
    env = {**os.environ, **environment}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd="/")


def last_line(code: str, path: Path, **environment: str) -> str:
    result = run(code, path=path, **environment)
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the package's Python files, without the libraries."""
    copy = tmp_path / "scaledot"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "include", "share", "__pycache__"))
    return tmp_path


# ------------------------------------------------------------------------------------------- import


def test_other_torch_is_refused_before_anything_is_loaded(copied: Path) -> None:
    # The copy has no library at all: reaching for it would be another error.
    (copied / "scaledot" / "torch_version.txt").write_text("2.11.0+cpu\n")
    message = last_line("import scaledot", copied)
    assert message == (
        f"ImportError: scaledot was built for torch 2.11 but torch {torch.__version__} is installed: {REBUILD} to "
        f"build it for this torch ({scaledot._load.torch_requirement()}), or `pip install 'torch==2.11.*'` to have "
        f"that one again."
    )


@pytest.mark.parametrize("found", ["2.13.1", "2.13.0+cu130", "2.13.0a0+git1234"])
def test_patch_level_and_build_of_torch_do_not_matter(found: str) -> None:
    scaledot._load.check_torch("2.13.0+cpu", found)


@pytest.mark.parametrize("found", ["2.12.1", "2.1.3", "3.13.0"])
def test_other_minor_versions_of_torch_are_refused(found: str) -> None:
    with pytest.raises(ImportError, match=re.escape(found)):
        scaledot._load.check_torch("2.13.0+cpu", found)


def test_no_torch(copied: Path) -> None:
    message = last_line("import sys; sys.modules['torch'] = None; import scaledot", copied)
    minor = ".".join(torch.__version__.split(".")[:2])
    assert message == (
        f"ImportError: scaledot needs torch, which is not installed: run `pip install 'torch=={minor}.*'`."
    )


def test_source_tree_that_is_not_built(copied: Path) -> None:
    (copied / "scaledot" / "torch_version.txt").unlink()
    message = last_line("import scaledot", copied)
    assert message == (
        f"ImportError: scaledot in {copied / 'scaledot'} has no compiled library: run `pip install .` (or `pip install "
        f"-e .`) in the folder of its source, and start Python elsewhere or with the editable install."
    )


def test_missing_library(copied: Path) -> None:
    message = last_line("import scaledot", copied)
    library = copied / "scaledot" / "libscaledot.so"
    assert message == f"ImportError: scaledot's library {library} is missing: {REBUILD} to build it again."


@pytest.mark.parametrize(("level", "warning"), [("avx1024", "is not one of default, avx2"), ("default", None)])
def test_capability_is_lowered_or_a_warning_says_why_not(level: str, warning: str | None) -> None:
    code = "import scaledot; print(scaledot.cpu_capability())"
    result = run(code, SCALEDOT_CPU_CAPABILITY=level)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (scaledot.cpu_capability() if warning else level)
    assert (warning in result.stderr) if warning else ("SCALEDOT_CPU_CAPABILITY" not in result.stderr)


# ------------------------------------------------------------------------------------------- the library


def test_build_info() -> None:
    info = scaledot.build_info()
    assert info["version"] == scaledot.__version__
    scaledot._load.check_torch(info["torch"], torch.__version__)
    assert info["cpu_kernels"][-1] == "reference"
    assert info["compiler"]
    assert bool(info["cuda_archs"]) == (info["cuda"] is not None) == (info["cuda_status"] is not None)
    json.dumps(info)


def test_force_kernel_names_the_kernels_there_are() -> None:
    with pytest.raises(ValueError, match=r"no kernel is called 'fastest'; there are \[.*'reference'\]"):
        scaledot._load._C.force_kernel("fastest")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime() -> None:
    # With two of them torch.set_num_threads would not reach ours. numpy's and others' do not count: import ours alone.
    code = "import scaledot; print(open('/proc/self/maps').read())"
    mapped = {line.split()[-1] for line in run(code).stdout.splitlines() if re.search(r"lib\w*omp[\w.-]*\.so", line)}
    assert len(mapped) == 1, mapped


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_library_needs_nothing_of_torch_cuda_or_python() -> None:
    dynamic = subprocess.check_output(["readelf", "-d", str(PACKAGE / "libscaledot.so")], text=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert any(name.startswith("libtorch_cpu") for name in needed)
    assert not [name for name in needed if re.search("cuda|python", name)]


# ------------------------------------------------------------------------------------------- the C++ package


def test_installed_headers_include_only_installed_headers() -> None:
    include = Path(scaledot.cmake_prefix_path) / "include"
    headers = list(include.rglob("*.h"))
    assert include / "scaledot" / "scaledot.h" in headers
    for header in headers:
        for name in re.findall(r'#include "(.*)"', header.read_text()):
            assert (header.parent / name).is_file() or (include / name).is_file(), f"{header}: {name}"
        for name in re.findall(r"#include <(scaledot/.*)>", header.read_text()):
            assert (include / name).is_file(), f"{header}: {name}"


def test_cmake_package_is_installed() -> None:
    folder = Path(scaledot.cmake_prefix_path) / "share" / "cmake" / "scaledot"
    assert sorted(path.name for path in folder.iterdir()) == ["scaledotConfig.cmake", "scaledotConfigVersion.cmake"]


# ------------------------------------------------------------------------------------------- the PEP 517 backend


def backend_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "torch_folder", ROOT / "python" / "scaledot_build" / "torch_folder.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_in(folder: Path, version: str) -> Path:
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder / "torch"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """torch_folder.py, seeing nothing on sys.path, as in pip's isolated builds."""
    module = backend_module()
    monkeypatch.setattr(module.sys, "path", [])
    monkeypatch.delenv("SCALEDOT_TORCH_DIR", raising=False)
    return module


def test_backend_finds_torch_in_the_users_environment(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = torch_in(tmp_path / "site-packages", "2.12.1+cpu")
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path), str(tmp_path / "site-packages")])
    assert build.find_torch() == folder
    assert build.torch_version(folder) == "2.12.1+cpu"


def test_backend_sees_this_environment(build: ModuleType) -> None:
    assert Path(torch.__file__).parent.resolve() == build.find_torch()


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0", "1.13.1", "nightly"])
def test_backend_refuses_other_versions_of_torch(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    torch_in(tmp_path, version)
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path)])
    with pytest.raises(build.TorchNotFoundError, match=re.escape(f"torch: got {version} in")):
        build.find_torch()


def test_backend_without_torch(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path)])
    with pytest.raises(build.TorchNotFoundError, match="torch: got none in this Python environment"):
        build.find_torch()


def test_the_torch_range_is_read_from_pyproject(build: ModuleType) -> None:
    assert f'dependencies = ["{build.REQUIREMENT}"]' in (ROOT / "pyproject.toml").read_text()
    changed = '[project]\ndependencies = ["torch>=3.0,<3.12"]\n'
    assert build._torch_range(changed) == ("torch>=3.0,<3.12", (3, 0), (3, 12))
    with pytest.raises(ValueError, match="needs a line `dependencies"):
        build._torch_range('dependencies = ["torch"]')


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (["torch<2.14,>=2.11", 'matplotlib>=3.8; extra == "plot"'], "torch>=2.11,<2.14"),
        (["torchvision>=0.1", "torch (>=2.11,<2.14)"], "torch>=2.11,<2.14"),
        (["numpy"], "torch"),
        (None, "torch"),
    ],
)
def test_the_torch_range_is_read_from_metadata(
    metadata: list[str] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: metadata)
    assert scaledot._load.torch_requirement() == expected


def test_the_torch_range_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    assert scaledot._load.torch_requirement() == "torch"


# ------------------------------------------------------------------------------------------- pyproject.toml


def test_project_urls_and_console_script() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    urls = text.split("[project.urls]\n")[1].split("\n\n")[0]
    found = dict(line.split(" = ", 1) for line in urls.splitlines())
    assert {"Documentation", "Source", "Changelog", "Issues"} <= set(found)
    for url in found.values():
        assert url.startswith('"https://')
    assert 'scaledot = "scaledot.__main__:main"' in text.split("[project.scripts]\n")[1].split("\n\n")[0]
    assert callable(importlib.import_module("scaledot.__main__").main)
