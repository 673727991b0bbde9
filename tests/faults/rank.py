"""The process of a scenario: one forward and backward, with the fault if it is the victim."""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from faults import network
from faults.scenario import CUTS, CUTS_FOR_A_TIME, LINKS, METHODS, SETUP, SLOW, Point, Scenario
from scaledot.distributed import context_parallel_attention, shard, transport

TRANSFERS = ("post", "wait", "all_to_all", "gather_numbers")  # of scaledot.distributed.transport
HEADS, WIDTH = 4, 8


class InjectedError(Exception):
    """The error that the fault "raise" raises."""


class Hook:
    """Counts the transfers of this rank, and lets the fault happen before one of them."""

    def __init__(self, scenario: Scenario, rank: int, pipe: Connection) -> None:
        self.fault = scenario.fault if rank == scenario.victim else "none"
        self.point, self.pipe = scenario.point, pipe
        self.phase, self.counts = "before", {"forward": 0, "backward": 0}
        self.nested = False

    def reach(self, phase: str) -> None:
        self.phase = phase
        if self.point == Point(phase):
            self._happen()

    def before_transfer(self) -> None:
        if self.fault == "slow":
            time.sleep(SLOW)
        if self.phase not in self.counts:
            return
        if self.point == Point(self.phase, self.counts[self.phase]):
            self._happen()
        self.counts[self.phase] += 1

    def _happen(self) -> None:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault in ("stop", "pause"):
            self.pipe.send(("stopping", None))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault in (*LINKS, *CUTS, *CUTS_FOR_A_TIME):
            self.pipe.send(("network", None))
            self.pipe.recv()  # it has happened
        elif self.fault == "raise":
            raise InjectedError("injected")

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Wraps the functions through which all transfers go. A transfer inside another counts once."""

        def wrapped(function: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                outer, self.nested = self.nested, True
                try:
                    if not outer:
                        self.before_transfer()
                    return function(*arguments, **options)
                finally:
                    self.nested = outer

            return call

        with contextlib.ExitStack() as stack:
            for name in TRANSFERS:
                stack.enter_context(mock.patch.object(transport, name, wrapped(getattr(transport, name))))
            yield


def held() -> tuple[int, list[str]]:
    """This process's threads, and its open files and sockets by kind."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{number}").split(":[")[0])
    return len(os.listdir("/proc/self/task")), sorted(files)


def mesh_of(scenario: Scenario) -> DeviceMesh:
    """A mesh whose groups have the timeout. Those that init_device_mesh makes for 2-D meshes have torch's default."""
    shape = METHODS[scenario.method][1]
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    timeout = datetime.timedelta(seconds=scenario.timeout)
    groups = [
        dist.new_subgroups_by_enumeration(ranks.movedim(k, -1).reshape(-1, size).tolist(), timeout=timeout)[0]
        for k, size in enumerate(shape)
    ]
    if len(shape) == 1:
        return DeviceMesh.from_group(groups[0], "cpu")
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("first", "second"))


def whole_inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, HEADS, HEADS, HEADS)  # query, key, value and the gradient of the output
    return [torch.randn(1, heads, length, WIDTH, generator=generator, dtype=dtype) for heads in sizes]


def check_results(output: Tensor, gradients: list[Tensor], mesh: DeviceMesh, length: int) -> str:
    """The digest of this rank's output and gradients, which have to be torch's of the whole sequence."""
    query, key, value, grad = whole_inputs(length)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*leaves)
    found = torch.autograd.grad(wanted, leaves, grad)
    for mine, whole in zip([output, *gradients], [wanted, *found], strict=True):
        torch.testing.assert_close(mine.detach(), shard(whole.detach(), mesh, 2))
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in (output, *gradients))).hexdigest()


def attend(scenario: Scenario, hook: Hook, mesh: DeviceMesh) -> str | None:
    """A forward and a backward, or what the fault has instead; checks the results, and returns their digest."""
    method = METHODS[scenario.method][0]
    dtype = torch.float32 if hook.fault == "other dtype" else torch.float64
    query, key, value, grad = (shard(t, mesh, 2) for t in whole_inputs(scenario.length, dtype))
    options: dict[str, Any] = {"method": method}
    if hook.fault == "other is_causal":
        options["is_causal"] = True
    elif hook.fault == "other shape":
        value = value[..., :-1]
    elif hook.fault == "other method":
        options["method"] = "all_to_all" if method == "ring" else "ring"
    elif hook.fault == "bad argument":
        options["dropout_p"] = 1.5
    local = [t.requires_grad_() for t in (query, key, value)]
    hook.reach("before")
    if hook.fault == "no call":
        return None
    hook.reach("forward")
    output = context_parallel_attention(*local, mesh, **options)
    hook.reach("between")
    if hook.fault == "no backward":
        return None
    if hook.fault == "another call":
        context_parallel_attention(*local, mesh, **options)
        return None
    hook.reach("backward")
    gradients = torch.autograd.grad(output, local, grad)
    hook.reach("after")
    return check_results(output, list(gradients), mesh, scenario.length)


def outcome(scenario: Scenario, hook: Hook, mesh: DeviceMesh) -> tuple[str, str, str | None]:
    """("", "", their digest) after the right results, or (the type of the error, its text, None)."""
    try:
        with hook.installed():
            return "", "", attend(scenario, hook, mesh)
    except Exception as error:
        return type(error).__name__, str(error), None


def play(scenario: Scenario, rank: int, store: str, namespace: str | None, pipe: Connection) -> None:
    """Runs the rank, in a network namespace or in this process's. `store`: an address for init_process_group.

    Sends, in this order: ("ready", None) once all ranks are connected; ("answer", (seconds, the type and the text of
    an error, the digest of the results, counts of transfers)); ("left", (threads, files and names of threads that are
    left behind)).
    """
    os.setsid()  # Linux wakes the stopped processes of a group when the shell that started the group ends
    if namespace is not None:
        network.enter(namespace)
        # The library under TCPStore opens a pipe in each process that hosts one, once.
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else network.DEVICE
    torch.set_num_threads(1)
    threads, files = held()
    dist.init_process_group(
        "gloo",
        store,
        rank=rank,
        world_size=scenario.ranks,
        timeout=datetime.timedelta(seconds=SETUP),
    )
    mesh = mesh_of(scenario)
    hook = Hook(scenario, rank, pipe)
    dist.barrier()
    pipe.send(("ready", None))
    started = time.monotonic()
    kind, text, digest = outcome(scenario, hook, mesh)
    pipe.send(("answer", (time.monotonic() - started, kind, text, digest, hook.counts)))
    pipe.recv()  # all ranks have answered
    dist.destroy_process_group()
    del mesh, hook
    # After an error in a backward, torch keeps the nodes that it has not run, and their groups, until the next one.
    torch.ones((), requires_grad=True).clone().backward()
    gc.collect()
    for _ in range(200):  # threads that are ending
        threads_now, files_now = held()
        if threads_now <= threads and len(files_now) <= len(files):
            break
        time.sleep(0.1)
    extra = [name for name in files_now if files_now.count(name) > files.count(name)]
    pipe.send(("left", (max(threads_now - threads, 0), extra, [t.name for t in threading.enumerate()][1:])))
    sys.stdout.flush()
