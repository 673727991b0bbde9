"""Fixtures that every test file may use. The modules beside this file (cases, layouts, tolerances, ...) are
importable from all tests, because pytest puts the folder of a conftest.py on sys.path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ours import KERNELS, forced


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of each kernel of the table in turn, forced while the test runs."""
    with forced(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """A test starts from one seed, and whatever it sets in torch is put back."""
    torch.manual_seed(0)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
