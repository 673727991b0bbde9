"""Jobs in forked processes, each with a time limit. A job that hangs or crashes takes no other with it.

The parent imports what the jobs need, once, and never starts CUDA: a process that is forked after that cannot use it.
It never waits for a process that the driver holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")
Facts = dict[str, Any]
Tell = Callable[..., None]

KEPT = 3000  # characters of a traceback
LOOK = 0.05  # seconds between two looks at the clock
LAST_WAIT = 5.0  # seconds for processes to end
OUT_OF_TIME = "out of time"
PR_SET_PDEATHSIG = 1


@dataclass
class Worker:
    """A forked process, as its parent sees it."""

    pid: int
    orders: int  # where the numbers of its jobs are written
    replies: int  # where its lines of JSON are read
    job: int = -1  # the current one; -1: none
    begin: float = 0
    done: int = 0  # jobs
    told: Facts = field(default_factory=dict)  # of the current job, so far
    rest: bytes = b""  # of a line of which the end has not come


def _child(orders: int, replies: int, jobs: Sequence[Job], work: Callable[[Job, Tell], Facts]) -> None:
    def reply(kind: str, facts: Facts) -> None:
        os.write(replies, (json.dumps([kind, facts], default=str) + "\n").encode())

    with os.fdopen(orders) as lines:
        for line in lines:
            try:
                facts = work(jobs[int(line)], lambda **told: reply("told", told))
            except BaseException:
                # The device may be unusable now: this process takes no further job.
                reply("done", {"result": "error", "error": traceback.format_exc()[-KEPT:]})
                return
            reply("done", facts)


def _fork(jobs: Sequence[Job], work: Callable[[Job, Tell], Facts], others: Sequence[Worker]) -> Worker:
    read_orders, write_orders = os.pipe()
    read_replies, write_replies = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(read_orders)
        os.close(write_replies)
        return Worker(pid, write_orders, read_replies)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the parent, however that ends
        for end in (write_orders, read_replies, *(end for other in others for end in (other.orders, other.replies))):
            os.close(end)
        _child(read_orders, write_replies, jobs, work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def how_it_ended(pid: int) -> str:
    end = time.monotonic() + LAST_WAIT
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit {code}"
        time.sleep(LOOK)
    return "it closed its pipe and does not end"


class Crew(Generic[Job]):
    """Runs jobs, `parallel` at a time, in order. `work(job, tell)` runs in a forked process and returns facts of JSON;
    `tell(**facts)` says facts earlier. `ended(job, facts)` gets all of them, in this process. "result" is what `work`
    says, or "error" (an exception), "crash" or "hang" (after `seconds`), or "not run": `until` came before, or `skip`
    gave a reason. A process is replaced after `jobs_a_process` jobs, after an error, and if work says "leave"."""

    def __init__(
        self,
        jobs: Sequence[Job],
        work: Callable[[Job, Tell], Facts],
        ended: Callable[[Job, Facts], None],
        *,
        parallel: int,
        seconds: float,
        jobs_a_process: float = 1,
        until: float = math.inf,
        skip: Callable[[Job], str | None] = lambda _: None,
    ) -> None:
        self.jobs, self.work, self.ended, self.skip = jobs, work, ended, skip
        self.parallel, self.seconds, self.jobs_a_process, self.until = parallel, seconds, jobs_a_process, until
        self.workers: list[Worker] = []
        self.leaving: set[int] = set()
        self.next = 0

    def run(self) -> None:
        try:
            while self._give() or any(worker.job >= 0 for worker in self.workers):
                self._look()
        finally:
            for worker in list(self.workers):
                self._dismiss(worker, kill=worker.job >= 0)
            end = time.monotonic() + LAST_WAIT
            while self._held() and time.monotonic() < end:
                time.sleep(LOOK)
        if held := self._held():
            print(f"processes that do not end: {sorted(held)}", file=sys.stderr, flush=True)

    def _give(self) -> bool:
        """Gives every free process a job. Returns whether jobs are left."""
        while self.next < len(self.jobs):
            reason = OUT_OF_TIME if time.monotonic() > self.until else self.skip(self.jobs[self.next])
            if reason:
                self.ended(self.jobs[self.next], {"result": "not run", "reason": reason})
                self.next += 1
                continue
            worker = next((worker for worker in self.workers if worker.job < 0), None)
            if worker is None:
                if len(self.workers) == self.parallel:
                    return True
                worker = _fork(self.jobs, self.work, self.workers)
                self.workers.append(worker)
            worker.job, worker.begin, worker.told = self.next, time.monotonic(), {}
            self.next += 1
            with contextlib.suppress(BrokenPipeError):  # it has crashed: _look will see that
                os.write(worker.orders, f"{worker.job}\n".encode())
        return False

    def _look(self) -> None:
        by_end = {worker.replies: worker for worker in self.workers}
        for ready in select.select(list(by_end), [], [], LOOK)[0]:
            self._read(by_end[ready])
        for worker in list(self.workers):
            limit = min(worker.begin + self.seconds, max(self.until, worker.begin))
            if worker.job >= 0 and time.monotonic() > limit:
                late = time.monotonic() > worker.begin + self.seconds
                self._dismiss(worker, kill=True)
                self._end(worker, {"result": "hang"} if late else {"result": "not run", "reason": OUT_OF_TIME})
        self._held()

    def _read(self, worker: Worker) -> None:
        more = os.read(worker.replies, 1 << 16)
        if not more:
            ended = how_it_ended(worker.pid)
            self._dismiss(worker, kill=False)
            if worker.job >= 0:
                self._end(worker, {"result": "crash", "ended": ended})
            return
        *lines, worker.rest = (worker.rest + more).split(b"\n")
        for line in lines:
            kind, facts = json.loads(line)
            if kind == "told":
                worker.told |= facts
                continue
            worker.done += 1
            leaves = facts.pop("leave", False) or facts.get("result") == "error"
            if leaves or worker.done >= self.jobs_a_process:
                self._dismiss(worker, kill=False)
            self._end(worker, facts)

    def _end(self, worker: Worker, facts: Facts) -> None:
        job, worker.job = worker.job, -1
        seconds = round(time.monotonic() - worker.begin, 2)
        self.ended(self.jobs[job], {**worker.told, **facts, "seconds": seconds})

    def _dismiss(self, worker: Worker, *, kill: bool) -> None:
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        os.close(worker.orders)  # it ends when it reads that
        os.close(worker.replies)
        if kill:
            os.kill(worker.pid, signal.SIGKILL)
        self.leaving.add(worker.pid)

    def _held(self) -> set[int]:
        """The processes that were dismissed and have not ended. It waits for none."""
        for pid in list(self.leaving):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self.leaving.remove(pid)
            except ChildProcessError:  # waited for already
                self.leaving.remove(pid)
        return self.leaving
