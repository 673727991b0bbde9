"""Work in several Python threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Calls work(0), ..., work(count - 1) in threads that begin together. The first exception is raised here."""
    failures: list[BaseException] = []
    start = threading.Barrier(count)

    def guarded(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
