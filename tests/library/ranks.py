"""Several processes on the loopback interface, connected by gloo, that run functions for tests.

Starting a process costs more than most tests, so four processes stay for the whole session. A test that needs fewer
uses a mesh of some of them.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PATIENCE = 300.0  # seconds: long enough for a busy machine


class Ranks:
    """`count` processes in one process group. Each calls `prepare()` once, if given."""

    def __init__(self, count: int, timeout: float = PATIENCE) -> None:
        context = multiprocessing.get_context("spawn")
        self.count = count
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, f"{self.folder.name}/store", timeout, there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def results(self, patience: float = PATIENCE) -> list[Any]:
        """For each rank ("result", value), or ("error", name of the type, text, traceback)."""
        found: list[Any] = [None] * self.count
        missing = dict(zip(self.pipes, range(self.count), strict=True))
        while missing:
            ready = wait(list(missing), patience)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(missing.values())} did not answer within {patience} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = missing.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    found[rank] = ("error", "Ended", "the process ended", "")
        return found

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of function(*arguments) on each rank. AssertionError with the traceback if it raises on any."""
        self.start(function, *arguments)
        found = self.results()
        failed = [f"rank {rank}:\n{result[3]}" for rank, result in enumerate(found) if result[0] == "error"]
        if failed:
            raise AssertionError("\n".join(failed))
        return [result[1] for result in found]

    def errors(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, str]]:
        """(name of the type, text) of what function(*arguments) raises on each rank; ("", "") if it raises nothing."""
        self.start(function, *arguments)
        return [(result[1], result[2]) if result[0] == "error" else ("", "") for result in self.results()]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(rank: int, count: int, store: str, timeout: float, pipe: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=count, timeout=datetime.timedelta(seconds=timeout)
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send(("result", function(*arguments)))
        except BaseException as error:
            pipe.send(("error", type(error).__name__, str(error), traceback.format_exc()))
