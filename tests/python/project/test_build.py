"""The installation: its files, its requirements, and its messages when something does not fit."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import scaledot
from wheels.contents import too_new

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(scaledot.__file__).parent
MINOR = ".".join(torch.__version__.split(".")[:2])
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


def built_for(folder: Path, *minors: str) -> None:
    """Makes the copied package in `folder` one that was built for other torches."""
    for path in (folder / "scaledot" / "lib").glob("torch*"):
        path.rename(path.with_name(f"not_{path.name}"))
    for minor in minors:
        library = folder / "scaledot" / "lib" / f"torch{minor}" / "libscaledot.so"
        library.parent.mkdir()
        library.write_text("not a library: reaching for it would be another error")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the package."""
    shutil.copytree(PACKAGE, tmp_path / "scaledot", ignore=shutil.ignore_patterns("include", "share", "__pycache__"))
    return tmp_path


# ------------------------------------------------------------------------------------------- import


@pytest.mark.parametrize(
    ("minors", "words", "advice"),
    [(["2.3"], "2.3", "2.3"), (["2.10", "2.4", "2.3"], "2.3, 2.4 and 2.10", "2.10")],  # in the order of numbers
)
def test_other_torch_is_refused_before_anything_is_loaded(
    copied: Path, minors: list[str], words: str, advice: str
) -> None:
    built_for(copied, *minors)
    message = last_line("import scaledot", copied)
    assert message == (
        f"ImportError: scaledot was built for torch {words} but torch {torch.__version__} is installed: {REBUILD} to "
        f"build it for this torch, or `pip install 'torch=={advice}.*'` to have one that fits (if torchvision is "
        f"installed, name it in the same command, as it fits one torch only)."
    )


def test_the_library_for_this_torch_is_taken_from_several(copied: Path) -> None:
    for minor in ("2.3", "3.1"):
        library = copied / "scaledot" / "lib" / f"torch{minor}" / "libscaledot.so"
        library.parent.mkdir()
        library.write_text("not a library")
    code = "import scaledot; print(scaledot.build_info()['torch_minors'], scaledot.__file__)"
    result = run(code, path=copied)
    assert result.returncode == 0, result.stderr
    built = scaledot.build_info()["torch_minors"]  # a wheel has several
    assert MINOR in built
    assert result.stdout.split("] ")[0] + "]" == str(["2.3", *built, "3.1"])
    assert str(copied) in result.stdout


@pytest.mark.parametrize("found", ["2.13.1", "2.13.0+cu130", "2.13.0a0+git1234"])
def test_patch_level_and_build_of_torch_do_not_matter(found: str) -> None:
    scaledot._load.check_torch(["2.12", "2.13"], found)


@pytest.mark.parametrize("found", ["2.12.1", "2.1.3", "3.13.0"])
def test_other_minor_versions_of_torch_are_refused(found: str) -> None:
    with pytest.raises(ImportError, match=re.escape(found)):
        scaledot._load.check_torch(["2.13"], found)


def test_no_torch(copied: Path) -> None:
    message = last_line("import sys; sys.modules['torch'] = None; import scaledot", copied)
    newest = scaledot.build_info()["torch_minors"][-1]
    assert message == (
        f"ImportError: scaledot needs torch, which is not installed: run `pip install 'torch=={newest}.*'`."
    )


def test_source_tree_that_is_not_built(copied: Path) -> None:
    built_for(copied)
    message = last_line("import scaledot", copied)
    assert message == (
        f"ImportError: scaledot in {copied / 'scaledot'} has no compiled library: run `pip install .` (or `pip install "
        f"-e .`) in the folder of its source, and start Python elsewhere or with the editable install."
    )


@pytest.mark.parametrize(
    ("level", "warning"),
    [("avx1024", "is not one of default"), ("DEFAULT", "is not one of default"), ("default", None), ("", None)],
)
def test_capability_is_lowered_or_a_warning_says_why_not(level: str, warning: str | None) -> None:
    code = "import scaledot; print(scaledot.cpu_capability())"
    result = run(code, SCALEDOT_CPU_CAPABILITY=level)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (scaledot.cpu_capability() if warning or not level else level)
    expected = f"<string>:1: RuntimeWarning: SCALEDOT_CPU_CAPABILITY={level} {warning}"  # the line of the import
    assert result.stderr.count(expected if warning else "SCALEDOT_CPU_CAPABILITY") == (warning is not None)


@pytest.mark.parametrize("name", ["SCALEDOT_SAVE_FOR_BACKWARD", "SCALEDOT_KEEP_WEIGHTS"])
@pytest.mark.parametrize(("value", "warns"), [("off", True), ("0", False), ("1", False), ("", False)])
def test_a_switch_with_another_value_warns(name: str, value: str, warns: bool) -> None:
    result = run("import scaledot", **{name: value})
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"{name}={value} is not one of 0, 1: using 1.") == warns


@pytest.mark.parametrize("name", ["SCALEDOT_BUILD_TESTS", "SCALEDOT_WERROR"])
def test_a_switch_of_the_build_with_another_value_ends_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "python")
    settings = importlib.import_module("scaledot_build.cmake_build").cmake_settings
    for value, wanted in (("1", "1"), ("0", "0"), ("", "0")):
        monkeypatch.setenv(name, value)
        assert settings(False)[name] == wanted
    monkeypatch.setenv(name, "yes")
    with pytest.raises(SystemExit, match=f"{name}: got 'yes'; needs 1 or 0"):
        settings(False)


def test_links_of_the_description_lead_to_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that shows the description has none of the files that README.md links to."""
    monkeypatch.syspath_prepend(ROOT / "python")
    description = importlib.import_module("scaledot_build.readme").long_description()
    readme = (ROOT / "README.md").read_text()
    pattern = r'\]\(([^)\s]+)\)|src="([^"]+)"'
    links, packaged = ([a or b for a, b in re.findall(pattern, text)] for text in (readme, description))
    assert len(links) == len(packaged) >= 20
    for link, found in zip(links, packaged, strict=True):
        assert found.startswith("https://")
        assert found == link or found.endswith(f"/main/{link}")
    assert "raw.githubusercontent.com" in description
    assert '"readme"' in (ROOT / "pyproject.toml").read_text().split("dynamic = ")[1].splitlines()[0]


# ------------------------------------------------------------------------------------------- the library


def test_build_info() -> None:
    info = scaledot.build_info()
    assert info["version"] == scaledot.__version__
    assert info["torch"].startswith(f"{MINOR}.")
    assert MINOR in info["torch_minors"]
    assert info["cpu_kernels"][-1] == "default"
    assert info["compiler"]
    assert bool(info["cuda_archs"]) == (info["cuda"] is not None) == (info["cuda_status"] is not None)
    json.dumps(info)


def test_force_kernel_names_the_kernels_there_are() -> None:
    with pytest.raises(ValueError, match=r"name: got 'fastest'; needs one of \[.*'default'\]"):
        scaledot._load.force_kernel("fastest")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime() -> None:
    # With two of them torch.set_num_threads would not reach ours. numpy's and others' do not count: import ours alone.
    code = "import scaledot; print(open('/proc/self/maps').read())"
    mapped = {line.split()[-1] for line in run(code).stdout.splitlines() if re.search(r"lib\w*omp[\w.-]*\.so", line)}
    assert len(mapped) == 1, mapped


def needed_by(library: Path) -> list[str]:
    dynamic = subprocess.check_output(["readelf", "-d", str(library)], text=True)
    return re.findall(r"NEEDED.*\[(.*)\]", dynamic)


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_kernels_need_nothing_of_torch_and_ops_nothing_of_cuda_or_python() -> None:
    kernels = needed_by(PACKAGE / "lib" / "libscaledot_kernels.so")
    assert not [name for name in kernels if re.search("torch|c10|cuda|python|gomp", name)]
    ops = needed_by(PACKAGE / "lib" / f"torch{MINOR}" / "libscaledot.so")
    assert "libscaledot_kernels.so" in ops
    assert any(name.startswith("libtorch_cpu") for name in ops)
    assert not [name for name in ops if re.search("cuda|python|gomp", name)]


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_libraries_load_on_systems_as_old_as_manylinux_2_28() -> None:
    for library in [PACKAGE / "lib" / "libscaledot_kernels.so", *PACKAGE.glob("lib/torch*/libscaledot.so")]:
        assert not too_new(library), library


def test_nothing_depends_on_the_version_of_python() -> None:
    assert not [path.name for path in PACKAGE.rglob("*.so") if "cpython" in path.name or "abi3" in path.name]


def test_gpu_kernels_of_another_version_are_refused(copied: Path) -> None:
    """The package scaledot_cuda, whose library says that it is of another version."""
    folder = copied / "scaledot_cuda"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    source = folder / "library.cpp"
    source.write_text(
        '#include "cuda/library.h"\n'
        'namespace { const scaledot::CudaLibrary library = {"9.8.7", "13.0", "sm_80"};\n'
        "const bool done = (scaledot::register_cuda_library(&library), true); }\n"
    )
    library = folder / "lib" / "libscaledot_cuda.so"
    kernels = PACKAGE / "lib" / "libscaledot_kernels.so"
    compile_ = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)]
    subprocess.run([*compile_, str(kernels), "-Wl,-rpath,$ORIGIN/../../scaledot/lib"], check=True)
    (copied / "scaledot" / "lib" / "libscaledot_cuda.so").unlink(missing_ok=True)
    message = last_line("import scaledot", copied)
    assert message == (
        f"ImportError: scaledot {scaledot.__version__} does not fit the GPU kernels of scaledot 9.8.7 in {library}: "
        f"run `pip install ./python/scaledot_cuda` in the source of scaledot {scaledot.__version__}."
    )


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


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scaledot_build.torch_folder, seeing nothing on sys.path, as in pip's isolated builds."""
    monkeypatch.syspath_prepend(ROOT / "python")
    module = importlib.import_module("scaledot_build.torch_folder")
    module.environment_paths()  # imports what it needs while sys.path is whole
    monkeypatch.setattr(module.sys, "path", [])
    monkeypatch.delenv("SCALEDOT_TORCH_DIRS", raising=False)
    return module


@pytest.fixture
def backend(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scaledot_build, in an environment of pip's: setuptools is beside the user's environment."""
    module = importlib.import_module("scaledot_build")
    monkeypatch.setattr(module, "environment_paths", lambda: ["/nowhere"])
    for name in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        monkeypatch.setattr(module.build_meta, name, lambda settings: ["wheel"])  # setuptools' own: runs setup.py
    return module


def torch_in(folder: Path, version: str) -> Path:
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder / "torch"


def test_backend_finds_torch_in_the_users_environment(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = torch_in(tmp_path / "site-packages", "2.12.1+cpu")
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path), str(tmp_path / "site-packages")])
    assert build.find_torches() == [folder]
    assert build.torch_version(folder) == "2.12.1+cpu"


def test_backend_sees_this_environment(build: ModuleType) -> None:
    assert build.find_torches() == [Path(torch.__file__).parent.resolve()]


def test_backend_builds_for_several_torches(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [torch_in(tmp_path / version, version) for version in ("2.11.0", "2.15.0")]
    monkeypatch.setenv("SCALEDOT_TORCH_DIRS", ":".join(map(str, folders)))
    assert build.find_torches() == folders
    again = torch_in(tmp_path / "again", "2.15.1")
    monkeypatch.setenv("SCALEDOT_TORCH_DIRS", ":".join(map(str, [*folders, again])))
    with pytest.raises(build.TorchNotFoundError, match=r"got 2\.11, 2\.15, 2\.15; needs one torch of each minor"):
        build.find_torches()


@pytest.mark.parametrize("version", ["2.10.0", "1.13.1", "nightly"])
def test_a_torch_that_is_too_old_ends_the_build_before_anything_is_downloaded(
    backend: ModuleType, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    folder = torch_in(tmp_path, version)
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        backend.get_requires_for_build_wheel()
    assert str(ended.value) == (
        f"scaledot: torch: got {version} in {folder}; needs 2.11 or newer to build scaledot (nothing was installed or "
        f"changed)"
    )


@pytest.mark.parametrize(("version", "newer"), [("2.15.3", False), ("2.16.0a0", True), ("3.0.0", True)])
def test_a_newer_torch_than_the_newest_tried_is_built_for_with_a_warning(
    backend: ModuleType,
    build: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    newer: bool,
) -> None:
    torch_in(tmp_path, version)
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path)])
    assert not [name for name in backend.get_requires_for_build_wheel() if name.startswith("torch")]
    warned = capsys.readouterr().err
    assert (f"torch {version} is newer than the newest that scaledot was tested with, 2.15" in warned) == newer


def test_backend_without_torch_requires_one(
    backend: ModuleType, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path)])
    assert build.REQUIREMENT == "torch>=2.11,<2.16"
    assert build.REQUIREMENT in backend.get_requires_for_build_wheel()
    assert build.REQUIREMENT in backend.get_requires_for_build_editable()


def test_an_environment_that_hides_torch_ends_the_build(
    backend: ModuleType, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "environment_paths", lambda: [str(tmp_path)])
    # As uv and `build` do: setuptools is in the environment that sys.prefix names.
    monkeypatch.setattr(backend, "environment_paths", lambda: [str(Path(backend.setuptools.__file__).parents[1])])
    with pytest.raises(SystemExit, match=r"torch of your environment cannot be seen; needs .*--no-build-isolation"):
        backend.get_requires_for_build_wheel()


def test_the_version_of_cuda_of_a_torch(build: ModuleType, tmp_path: Path) -> None:
    folder = torch_in(tmp_path, "2.13.0")
    assert build.torch_cuda(folder) is None
    for text, version in (("cuda: Optional[str] = None\n", None), ("cuda: Optional[str] = '13.0'\n", "13.0")):
        (folder / "version.py").write_text(f"__all__ = ['cuda']\n{text}hip = '6.4'\n")
        assert build.torch_cuda(folder) == version


def test_the_gpus_that_a_build_compiles_for(tmp_path: Path) -> None:
    script = tmp_path / "archs.cmake"
    script.write_text(
        f'include("{ROOT}/csrc/cmake/cuda_archs.cmake")\n'
        'scaledot_find_cuda_archs("$ENV{WORDS}")\n'
        'message("${CMAKE_CUDA_ARCHITECTURES} ${SCALEDOT_CUDA_ARCHS}")\n'
    )

    def archs(words: str, gpus: str = "") -> str:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
        smi.chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "WORDS": words}
        done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True, check=False, env=env)
        return " ".join(done.stderr.split())

    assert archs("8.0+PTX 9.0a") == "80-real;80-virtual;90a-real sm_80;compute_80;sm_90a"
    assert archs("10.0;12.0") == "100-real;120-real sm_100;sm_120"
    assert archs("native", r"9.0\n9.0\n12.0\n") == "90a-real;120-real sm_90a;sm_120"
    assert archs("native,8.0+PTX", r"8.6\n") == "86-real;80-real;80-virtual sm_86;sm_80;compute_80"
    assert "got native, but nvidia-smi names no GPU; needs architectures such as 8.0" in archs("native")
    assert "got 'Hopper'; needs native, or architectures such as 8.0" in archs("Hopper")


def test_a_build_says_what_it_compiles_and_how_to_compile_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "python")
    module = importlib.import_module("scaledot_build.notice")
    monkeypatch.delenv("SCALEDOT_CUDA", raising=False)
    all_kernels = module.notice("sm_80;compute_80;sm_90a", torch_has_cuda=True)
    assert "CUDA kernels for sm_80, compute_80, sm_90a. The CUDA kernels for all GPUs take about 15" in all_kernels
    assert "`SCALEDOT_CUDA=0 pip install .` leaves them out" in all_kernels
    without = module.notice("", torch_has_cuda=True)
    assert without.endswith("No CUDA kernels: nvcc was not found, which has to be on the PATH or in CUDACXX.")
    for_cpu = "scaledot: compiling the CPU kernels and the ops, which takes a few minutes on two cores."
    assert module.notice("", torch_has_cuda=False) == for_cpu
    monkeypatch.setenv("SCALEDOT_CUDA", "0")
    assert module.notice("", torch_has_cuda=True) == for_cpu
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "build_info.h").write_text('#define SCALEDOT_CUDA_ARCHS "sm_90a"\n')
    assert module.archs_of(tmp_path) == "sm_90a"


def test_a_build_says_so_on_the_terminal_though_pip_hides_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "python")!r})
sys.stderr = open({str(log)!r}, "w")
from scaledot_build.notice import show
show("it takes a while")
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    said = b""
    with contextlib.suppress(OSError):  # Linux's answer after the end
        while more := os.read(terminal, 1000):
            said += more
    os.waitpid(pid, 0)
    assert said.split() == b"it takes a while".split()
    assert log.read_text() == "it takes a while\n"


def test_the_installed_package_requires_torch_without_limits() -> None:
    """pip would replace a torch outside of the limits."""
    assert "torch" in (importlib.metadata.requires("scaledot") or [])


def test_a_torch_that_pip_downloaded_for_the_build_is_the_one_required(
    backend: ModuleType, build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.runtime_requirement() == "torch"
    overlay = tmp_path / "pip-build-env-abc" / "normal"
    torch_in(overlay, "2.15.1")
    monkeypatch.setattr(build.sys, "path", [str(overlay)])
    assert backend.runtime_requirement() == "torch==2.15.*"


def test_the_torch_range_is_read_from_pyproject(build: ModuleType) -> None:
    assert build._tried_minors('a = 1\n[tool.scaledot]\ntorch = ["3.9", "3.10"]  # why\n') == [(3, 9), (3, 10)]
    with pytest.raises(ValueError, match=r"needs a table \[tool.scaledot\]"):
        build._tried_minors('[tool.scaledot]\ntorch = "3.9"\n')


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
