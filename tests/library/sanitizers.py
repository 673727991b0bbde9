"""For `bash tests/sanitize torch`: a plugin of pytest that reports leaks, and errors that have to be reported.

    python -m sanitizers access      a kernel reads the end of a tensor, which is marked as out of bounds
    python -m sanitizers leak        memory that nothing points to
"""

from __future__ import annotations

import ctypes
import gc
import sys

import pytest

RUNTIME = ctypes.CDLL(None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """The check runs while Python still holds its objects: it leaves many behind when the process ends."""
    gc.collect()
    RUNTIME.__lsan_do_recoverable_leak_check()  # the report goes to the log of ASAN_OPTIONS


def access() -> None:
    import torch

    import scaledot

    key = torch.zeros(1, 1, 64, 64)
    end = key.data_ptr() + key.nbytes
    RUNTIME.__asan_poison_memory_region(ctypes.c_void_p(end - 256), ctypes.c_size_t(256))
    scaledot.scaled_dot_product_attention(torch.zeros(1, 1, 16, 64), key, torch.zeros_like(key))


def leak() -> None:
    RUNTIME.malloc(ctypes.c_size_t(1000))
    pytest_sessionfinish()


if __name__ == "__main__":
    {"access": access, "leak": leak}[sys.argv[1]]()
