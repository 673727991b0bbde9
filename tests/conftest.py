"""Fixtures for all test files. The modules of tests/library (cases, layouts, tolerances, ...) can be imported by their
bare names: pyproject.toml puts that folder on pytest's path."""

from __future__ import annotations

import os
import tempfile
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drops the tests of bfloat16-only kernels whose dtype is not bfloat16."""

    def fits(item: pytest.Item) -> bool:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return given.get("kernel") not in BFLOAT16_ONLY or given.get("dtype") == "bfloat16"

    items[:] = [item for item in items if fits(item)]


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
    """The folder with the programs of tests/cpp_package."""
    return cpp_package.build(tmp_path_factory.mktemp("cpp package"))  # the space in the name is deliberate


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
