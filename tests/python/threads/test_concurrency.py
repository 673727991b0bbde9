"""Mixed calls from many threads while the number of threads changes, and in the workers of a DataLoader: the bits of
serial calls. test_sdpa_threads.py and test_free_threading.py have more."""

from __future__ import annotations

import threading

import pytest
import torch
from test_free_threading import (
    assert_same,
    dropout,
    every_output,
    half_precision,
    merged,
    one_query,
    packed,
    transforms,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from threads import in_threads

# Only scaledot computes in these. The bits of torch's own matrix products depend on the number of threads.
JOBS = (every_output, half_precision, one_query, dropout, transforms, packed, merged)


def test_eight_threads_while_another_changes_the_number_of_threads() -> None:
    torch.set_num_threads(2)
    wanted = [job() for job in JOBS]
    done = threading.Event()

    def change() -> None:
        number = 0
        while not done.wait(0.001):
            number = number % 4 + 1
            torch.set_num_threads(number)

    def work(number: int) -> None:
        for turn in range(4 * len(JOBS)):
            k = (number + turn * (1 + 2 * (number % 2))) % len(JOBS)
            if turn % 5 == number % 5:
                torch.set_num_threads(1 + turn % 3)  # OpenMP keeps a number for each thread
            assert_same(JOBS[k](), wanted[k], f"thread {number}: {JOBS[k].__name__}")

    changing = threading.Thread(target=change)
    changing.start()
    try:
        in_threads(work, 8)
    finally:
        done.set()
        changing.join()


class Attending(Dataset[list[Tensor]]):
    """A data set whose items are results, computed in the worker process."""

    def __len__(self) -> int:
        return 2 * len(JOBS)

    def __getitem__(self, index: int) -> list[Tensor]:
        return JOBS[index % len(JOBS)]()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(context: str) -> None:
    torch.set_num_threads(2)
    wanted = [job() for job in JOBS]
    loader = DataLoader(Attending(), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=300)
    for k, found in enumerate(loader):
        assert_same(found, wanted[k % len(JOBS)], f"item {k}")
