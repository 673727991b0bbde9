"""Fixtures for all test files. The modules of tests/library (cases, layouts, tolerances, ...) can be imported by their
bare names: pyproject.toml puts that folder on pytest's path."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Waiting threads sleep. On a loaded machine, spinning threads make the tests ten times slower. Must be set before torch
# loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Compiled graphs are kept on disk, by their code but not by the schemas of our ops: those of another build would fail.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="scaledot-inductor-")  # of all processes of this run
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name

import pytest
import torch

import cpp_build as cpp_package
from kernels_under_test import BFLOAT16_ONLY, GENERAL, forced
from ranks import Ranks

# The files with few tests that take long, most of them because they compile. If `pytest -n` runs the files in parallel,
# these come first, and then those with the most tests. Otherwise one process runs the last of them alone, for minutes.
COMPILERS = ("test_hub_kernel", "test_cpp_package", "test_aotinductor", "test_add_option")  # of C++
LONG_FILES = (
    *COMPILERS,
    "test_external",
    "test_compile",
    "test_hf_models",
    "test_sdpa_opcheck",
    "test_examples",
    "test_sdpa_dispatch",
    "test_hf_relative_bias",
    "test_distributed_programs",
    "test_distributed_faults",
    "test_large_results",
)
IN_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a sample: one case of each test function")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would order the files by their numbers of tests


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """The middle case of each test function. Files that compile C++ give none, other long files their first case."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.stem in COMPILERS:
            continue
        function = "" if item.path.stem in LONG_FILES else getattr(item, "originalname", item.name)
        cases.setdefault((item.path, function), []).append(item)
    return [of_one[len(of_one) // 2 if function else 0] for (_, function), of_one in cases.items()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops the tests of bfloat16-only kernels whose dtype is not bfloat16. Orders the files."""

    def fits(item: pytest.Item) -> bool:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return given.get("kernel") not in BFLOAT16_ONLY or given.get("dtype") == "bfloat16"

    items[:] = [item for item in items if fits(item)]
    if config.getoption("--quick"):
        items[:] = sample(items)
    if IN_PARALLEL:
        tests = Counter(item.path for item in items)
        long = {name: turn for turn, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: (long.get(item.path.stem, len(long)), -tests[item.path]))


@pytest.fixture(params=GENERAL + BFLOAT16_ONLY)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kernel, forced while the test runs: each that takes any shape, or those that the test lists."""
    with forced(request.param):
        yield request.param


@pytest.fixture
def registered_in_transformers() -> Iterator[None]:
    """attn_implementation="scaledot" works, and transformers logs errors only."""
    import transformers

    from scaledot.dropin.transformers import register

    register()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes in one process group."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def cpp_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of tests/cpp_package. Parallel processes share it; only the first one compiles."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if IN_PARALLEL else own) / "cpp package"  # the space in the name is deliberate
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cpp_package.build(folder)


@pytest.fixture(autouse=True)
def seeded_and_restored() -> Iterator[None]:
    """Seeds each test, and restores the settings of torch after it."""
    torch.manual_seed(0)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports inductor, which takes seconds
        torch.use_deterministic_algorithms(deterministic)
