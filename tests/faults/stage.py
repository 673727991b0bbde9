"""Starts the processes of a scenario and its network, wakes a stopped process, cuts links, and judges the answers."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

from faults import rank as rank_module
from faults.network import PORT, Network, address
from faults.scenario import COMPARED, CUT, CUTS_FOR_A_TIME, HARMLESS, LINKS, PAUSED, SETUP, STOPPED, Scenario

LEEWAY = 20.0  # seconds more, for a busy machine
SENTENCES = ("scaledot.distributed: ", "context_parallel_attention: ")  # how every error that a user sees begins


@dataclass
class Answers:
    """What the ranks of a scenario answered, by rank; a missing one was killed or hung."""

    ready: set[int] = field(default_factory=set)
    answers: dict[int, tuple[float, str, str, str | None, dict[str, int]]] = field(default_factory=dict)
    left: dict[int, tuple[int, list[str], list[str]]] = field(default_factory=dict)
    exits: dict[int, int | None] = field(default_factory=dict)
    packets: Counter[str] = field(default_factory=Counter)


def context() -> Any:
    """Processes are forked from one that has imported everything, which saves seconds for each."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([rank_module.__name__])
    # Before Python 3.14 the server does not get this process's sys.path.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return server


def play(scenario: Scenario) -> Answers:
    """Plays the scenario; again, twice at most, if a busy machine could not connect the processes in time."""
    for _ in range(3):
        found = _play_once(scenario)
        if len(found.ready) == scenario.ranks:
            break
    return found


def _play_once(scenario: Scenario) -> Answers:
    found = Answers()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(scenario.ranks)) if scenario.on_network else None
        if network is None:
            store = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/store"
        else:
            store = f"tcp://{address(0)}:{PORT}"
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(scenario.ranks):
            here, there = context().Pipe()
            namespace = None if network is None else network.namespace(rank)
            process = context().Process(
                target=rank_module.play, args=(scenario, rank, store, namespace, there), daemon=True
            )
            process.start()
            there.close()
            pipes[here] = rank
            processes.append(process)
        try:
            _listen(scenario, pipes, [process.pid for process in processes], network, found)
        finally:
            for rank, process in enumerate(processes):
                process.join(LEEWAY if rank in found.left or _killed(scenario, rank, found) else 0.0)
                found.exits[rank] = process.exitcode
                if process.exitcode is None:
                    process.kill()
                    process.join()
            if network is not None:
                found.packets = network.counts
    return found


def _killed(scenario: Scenario, rank: int, found: Answers) -> bool:
    return scenario.fault == "kill" and rank == scenario.victim and rank in found.ready


def _disturb(network: Network, scenario: Scenario) -> None:
    if scenario.fault in LINKS:
        network.set_link(LINKS[scenario.fault])
    else:
        network.cut(scenario.cut_links)


def _listen(
    scenario: Scenario, pipes: dict[Connection, int], pids: list[int], network: Network | None, found: Answers
) -> None:
    deadline = time.monotonic() + 2 * SETUP
    open_pipes, gone = set(pipes), 0
    end_at, end_fault = None, None  # when a fault for a time ends, and by which call
    while open_pipes and time.monotonic() < deadline:
        until = deadline if end_at is None else end_at
        for pipe in wait(list(open_pipes), max(until - time.monotonic(), 0.0)):
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                open_pipes.remove(pipe)
                kind, value = "gone", None
                gone += pipes[pipe] not in found.answers
                if pipes[pipe] not in found.ready:
                    return  # it could not connect
            if kind == "ready":
                found.ready.add(pipes[pipe])
                deadline = time.monotonic() + 2 * scenario.timeout + STOPPED + 2 * LEEWAY
            elif kind == "stopping":
                end_at = time.monotonic() + (STOPPED if scenario.fault == "stop" else PAUSED)
                end_fault = functools.partial(os.kill, pids[scenario.victim], signal.SIGCONT)
            elif kind == "network":
                assert network is not None
                _disturb(network, scenario)
                pipe.send("it has happened")
                if scenario.fault in CUTS_FOR_A_TIME:
                    end_at, end_fault = time.monotonic() + CUT, network.mend
            elif kind == "answer":
                found.answers[pipes[pipe]] = value
            elif kind == "left":
                found.left[pipes[pipe]] = value
            if kind in ("answer", "gone") and len(found.answers) + gone == scenario.ranks:
                for other in open_pipes:  # a rank closes its sockets only when all have ended: the worst for the others
                    if pipes[other] not in found.left:
                        other.send("all have answered")
                gone = -scenario.ranks  # once
        if end_at is not None and end_fault is not None and time.monotonic() >= end_at:
            end_fault()
            end_at = end_fault = None


Digests = Mapping[tuple[str, int, int], str | None]


def digests_of(scenario: Scenario, found: Answers) -> dict[tuple[str, int, int], str | None]:
    """The digests of the results, by method, length and rank."""
    return {(scenario.method, scenario.length, rank): digest for rank, (*_, digest, _) in found.answers.items()}


def faults_of(scenario: Scenario, found: Answers, clean: Digests) -> list[str]:
    """What is wrong with the answers; empty if all is well. `clean`: digests of runs without a fault."""
    wrong = []
    for rank in range(scenario.ranks):
        victim = rank == scenario.victim
        if victim and scenario.fault == "kill":
            if found.exits.get(rank) != -signal.SIGKILL:
                wrong.append(f"rank {rank} was to be killed, and ended with {found.exits.get(rank)}")
            continue
        if rank not in found.answers:
            wrong.append(f"rank {rank} hung, or ended with {found.exits.get(rank)}")
            continue
        seconds, kind, text, digest, _ = found.answers[rank]
        if digest is not None and digest != clean.get((scenario.method, scenario.length, rank), digest):
            wrong.append(f"rank {rank}: other bits than without a fault")
        wrong += [f"rank {rank}: {said}" for said in _wrong_answer(scenario, victim, seconds, kind, text)]
        if found.exits.get(rank) != 0 or rank not in found.left:
            wrong.append(f"rank {rank}: ended with {found.exits.get(rank)} after its answer")
        elif any(found.left[rank]):
            wrong.append(f"rank {rank}: left behind {found.left[rank]}")
    if scenario.fault.startswith("loss") and not found.packets["lost"]:
        wrong.append("no packet was lost")
    return wrong


def _wrong_answer(scenario: Scenario, victim: bool, seconds: float, kind: str, text: str) -> Iterator[str]:
    if scenario.fault in HARMLESS:
        if kind:
            yield f"{kind}: {text}; needs the right results"
        return
    if victim and scenario.fault in ("raise", "no call", "no backward"):
        return  # it ends with its own error, or with none
    in_time = scenario.timeout + LEEWAY + (STOPPED if victim and scenario.fault == "stop" else 0.0)
    if seconds > in_time:
        yield f"ended after {seconds:.1f} s; the group's timeout is {scenario.timeout} s"
    if not kind:
        # Inside the backward the victim may already have sent all that this rank needs.
        if scenario.point.phase != "backward":
            yield "has results, though a rank did not take part"
        return
    own = scenario.fault in COMPARED and victim
    if kind not in ("RuntimeError", "ValueError") or not (own or text.startswith(SENTENCES)):
        yield f"{kind}: {text}; needs a sentence"


def run_all(chosen: Iterable[Scenario], at_a_time: int) -> Iterator[tuple[Scenario, Answers]]:
    """Plays the scenarios, several at a time, because most of their time is waiting."""
    with ThreadPoolExecutor(at_a_time) as pool:
        chosen = list(chosen)
        yield from zip(chosen, pool.map(play, chosen), strict=True)
