"""A separate network for each scenario: a namespace and a TUN device for each rank, and a thread between the devices.

A rank sends IP packets into its device. The thread reads them, and writes each into the device of the rank that it is
for: late, or never, as the link says. What is above IP is the kernel's own, so TCP sends lost packets again as it does
on a real network.

Needs root and /dev/net/tun on Linux; `why_not()` says what is missing. Nothing has to be cleaned up: a namespace and
its device end with their last descriptor.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import heapq
import itertools
import math
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

DEVICE = "tun0"
PORT = 29500  # of the store, free in every namespace
MTU = 1500  # bytes, the kernel's default for TUN devices

# From linux/sched.h, linux/if_tun.h and linux/sockios.h.
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
IFF_UP, IFF_RUNNING = 0x01, 0x40
IPV4_HEADER = 20  # bytes


@dataclass(frozen=True)
class Link:
    """What happens to a packet from one rank to another. Each direction of each pair of ranks has its own bandwidth."""

    delay: float = 0.0  # seconds
    jitter: float = 0.0  # seconds: the delay is drawn between delay - jitter and delay + jitter, so packets overtake
    loss: float = 0.0  # the share of packets that are dropped
    bandwidth: float = math.inf  # bytes a second; a packet waits for those before it


class Direction:
    """From one rank to another: draws what happens to each packet."""

    def __init__(self, link: Link, seed: int) -> None:
        self.link, self.draw, self.free_at = link, random.Random(seed), 0.0

    def arrival(self, now: float, size: int) -> float | None:
        """When a packet that is sent now arrives; None if it is lost."""
        self.free_at = max(now, self.free_at) + size / self.link.bandwidth
        if self.draw.random() < self.link.loss:
            return None
        return self.free_at + self.link.delay + self.draw.uniform(-self.link.jitter, self.link.jitter)


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


# ------------------------------------------------------------------------------------------------------- namespaces
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(namespace: str | int) -> None:
    """Puts this thread, and those that it starts, into the network namespace: its path, or a descriptor of it."""
    if isinstance(namespace, int):
        _checked(_libc.setns(namespace, CLONE_NEWNET))
        return
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        _checked(_libc.setns(descriptor, CLONE_NEWNET))
    finally:
        os.close(descriptor)


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _bring_up(device: str, own_address: str | None = None) -> None:
    """In the namespace of this thread."""
    name = device.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, text in ((SIOCSIFADDR, own_address), (SIOCSIFNETMASK, own_address and "255.255.255.0")):
            if text is not None:
                fcntl.ioctl(control, request, struct.pack("16sH2x4s16x", name, socket.AF_INET, socket.inet_aton(text)))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name, IFF_UP | IFF_RUNNING))


def _node(rank: int) -> tuple[int, int]:
    """Descriptors of a new namespace, and of the TUN device in it."""
    home = _own_namespace()
    try:
        _checked(_libc.unshare(CLONE_NEWNET))
        try:
            namespace = _own_namespace()
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
            _bring_up("lo")
            _bring_up(DEVICE, address(rank))
        finally:
            enter(home)
    finally:
        os.close(home)
    return namespace, tun


@functools.cache
def why_not() -> str | None:
    """Why a Network cannot be made here, in one sentence; None if it can."""
    if not os.path.exists("/proc/thread-self/ns/net"):
        return "faults of the network need Linux"
    if os.geteuid() != 0:
        return f"faults of the network need root, for network namespaces; got user {os.geteuid()}"
    if not os.path.exists("/dev/net/tun"):
        return "faults of the network need /dev/net/tun, which this machine does not have"
    try:
        for descriptor in _node(0):
            os.close(descriptor)
    except OSError as error:
        return f"faults of the network need a TUN device in a network namespace: {error}"
    return None


# ---------------------------------------------------------------------------------------------------------- the thread
class Network:
    """The namespaces of `ranks` ranks, joined by links without a fault at first. A context manager."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self.ranks, self.seed = ranks, seed
        self.counts: Counter[str] = Counter()  # of packets: "sent", and of those "delivered", "lost" and "cut"
        self._cut: set[frozenset[int]] = set()
        self._due: list[tuple[float, int, int, int, bytes]] = []  # arrival, number, from, to, packet
        self._number = itertools.count()
        self._lock = threading.Lock()
        self._nodes = [_node(rank) for rank in range(ranks)]
        self._bell, self._ringer = os.pipe()
        self.set_link(Link())
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, rank: int) -> str:
        """A path of the rank's namespace, for any process of root's."""
        return f"/proc/{os.getpid()}/fd/{self._nodes[rank][0]}"

    def set_link(self, link: Link) -> None:
        """Of every pair, for packets that are sent from now on."""
        with self._lock:
            self._directions = {
                (a, b): Direction(link, self.seed + self.ranks * a + b)
                for a, b in itertools.permutations(range(self.ranks), 2)
            }

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Drops every packet between these ranks, those under way included, until mend()."""
        with self._lock:
            self._cut |= {frozenset(pair) for pair in pairs}

    def mend(self) -> None:
        with self._lock:
            self._cut.clear()

    def close(self) -> None:
        os.write(self._ringer, b"x")
        self._thread.join()
        for descriptor in (self._bell, self._ringer, *itertools.chain(*self._nodes)):
            os.close(descriptor)

    def _forward(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for rank, (_, tun) in enumerate(self._nodes):
                selector.register(tun, selectors.EVENT_READ, rank)
            while True:
                wait = max(self._due[0][0] - time.monotonic(), 0.0) if self._due else None
                for key, _ in selector.select(wait):
                    if key.data is None:
                        return
                    self._take(key.data, os.read(key.fd, MTU))
                self._deliver()

    def _take(self, source: int, packet: bytes) -> None:
        if len(packet) < IPV4_HEADER or packet[0] >> 4 != 4:
            return  # IPv6 looks for routers
        target = int.from_bytes(packet[16:20], "big") - int.from_bytes(socket.inet_aton(address(0)), "big")
        if target == source or not 0 <= target < self.ranks:
            return
        with self._lock:
            self.counts["sent"] += 1
            arrival = self._directions[source, target].arrival(time.monotonic(), len(packet))
            if arrival is None:
                self.counts["lost"] += 1
            else:
                heapq.heappush(self._due, (arrival, next(self._number), source, target, packet))

    def _deliver(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, source, target, packet = heapq.heappop(self._due)
            with self._lock:
                cut = frozenset((source, target)) in self._cut
                self.counts["cut" if cut else "delivered"] += 1
            if not cut:
                os.write(self._nodes[target][1], packet)
