"""The network of the fault tests: packets come late, get lost and are cut off as its links say."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from faults import network
from faults.network import Direction, Link, Network

needs_network = pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not()))
PORT = 5000


# ------------------------------------------------------------------------------------------------- one direction
def test_delay_and_jitter() -> None:
    direction = Direction(Link(delay=0.06, jitter=0.04), seed=0)
    delays = [arrival - 7.0 for _ in range(1000) if (arrival := direction.arrival(7.0, 100)) is not None]
    assert len(delays) == 1000
    assert 0.02 <= min(delays) < 0.022
    assert 0.098 < max(delays) <= 0.1
    assert sum(delays) / 1000 == pytest.approx(0.06, abs=0.003)


def test_packets_wait_for_those_before_them() -> None:
    direction = Direction(Link(delay=0.5, bandwidth=1000.0), seed=0)
    assert [direction.arrival(1.0, 100) for _ in range(3)] == pytest.approx([1.6, 1.7, 1.8])
    assert direction.arrival(9.0, 100) == pytest.approx(9.6)  # the line was free again


@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_loss(loss: float) -> None:
    direction = Direction(Link(loss=loss), seed=0)
    lost = sum(direction.arrival(0.0, 100) is None for _ in range(10_000))
    assert abs(lost - 10_000 * loss) < 4 * math.sqrt(10_000 * loss * (1 - loss))


# ------------------------------------------------------------------------------------------------ namespaces and TUN
T = TypeVar("T")


def inside(namespace: str | int, make: Callable[[], T]) -> T:
    """Runs `make` in the namespace, on another thread."""
    made: list[T] = []

    def run() -> None:
        network.enter(namespace)
        made.append(make())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]


def devices_in(namespace: int) -> set[str]:
    return inside(namespace, lambda: {name for _, name in socket.if_nameindex()})


def socket_of(net: Network, rank: int) -> socket.socket:
    """A UDP socket in the rank's namespace. It stays there, whichever thread uses it."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((network.address(rank), PORT))
        return made

    return inside(net.namespace(rank), make)


@pytest.fixture
def net() -> Iterator[Network]:
    with Network(3) as made:
        yield made


@pytest.fixture
def sockets(net: Network) -> Iterator[list[socket.socket]]:
    made = [socket_of(net, rank) for rank in range(net.ranks)]
    for one in made:
        one.settimeout(30.0)  # on a busy machine; a packet that does not come is an error
    yield made
    for one in made:
        one.close()


def send(sockets: list[socket.socket], source: int, target: int, text: bytes = b"hello") -> None:
    sockets[source].sendto(text, (network.address(target), PORT))


def settle(net: Network, sent: int) -> None:
    """Waits until the network has dealt with this number of packets."""
    for _ in range(3000):
        if net.counts["delivered"] + net.counts["lost"] + net.counts["cut"] >= sent:
            return
        time.sleep(0.01)
    raise AssertionError(f"needs {sent} packets; got {net.counts}")


@needs_network
def test_packets_reach_the_rank_they_are_for(net: Network, sockets: list[socket.socket]) -> None:
    for source, target in ((0, 1), (1, 2), (2, 0)):
        send(sockets, source, target, b"from %d" % source)
        assert sockets[target].recvfrom(100) == (b"from %d" % source, (network.address(source), PORT))
    assert net.counts == {"sent": 3, "delivered": 3}


@needs_network
def test_packets_come_late(net: Network, sockets: list[socket.socket]) -> None:
    net.set_link(Link(delay=0.2, jitter=0.05))
    for _ in range(5):
        start = time.monotonic()
        send(sockets, 0, 1)
        sockets[1].recv(100)
        assert time.monotonic() - start >= 0.15


@needs_network
def test_packets_get_lost(net: Network, sockets: list[socket.socket]) -> None:
    net.set_link(Link(loss=0.05))
    received = 0
    for k in range(1, 1001):
        send(sockets, 0, 1)
        if k % 100 == 0:  # the queues of the kernel hold more than that
            settle(net, k)
            for _ in range(net.counts["delivered"] - received):
                sockets[1].recv(100)
            received = net.counts["delivered"]
    assert 25 <= net.counts["lost"] <= 80
    assert net.counts == {"sent": 1000, "lost": net.counts["lost"], "delivered": received}
    sockets[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        sockets[1].recv(100)


@needs_network
def test_a_cut(net: Network, sockets: list[socket.socket]) -> None:
    """It also drops what is under way, and nothing between other ranks."""
    net.set_link(Link(delay=0.5))
    send(sockets, 0, 1, b"under way")
    net.cut([(0, 1)])
    send(sockets, 1, 0, b"the other direction")
    send(sockets, 0, 2, b"another pair")
    assert sockets[2].recv(100) == b"another pair"
    settle(net, 3)
    assert net.counts == {"sent": 3, "delivered": 1, "cut": 2}
    net.mend()
    send(sockets, 0, 1, b"mended")
    assert sockets[1].recv(100) == b"mended"


@needs_network
def test_nothing_is_left() -> None:
    def held() -> tuple[str, int, int]:
        namespace = os.readlink("/proc/thread-self/ns/net")
        return namespace, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    with Network(2) as net:
        holder = os.open(net.namespace(0), os.O_RDONLY)
        assert devices_in(holder) == {"lo", network.DEVICE}
    try:
        assert devices_in(holder) == {"lo"}
    finally:
        os.close(holder)
    for _ in range(100):  # the kernel may still list a thread that was joined
        if held() == before:
            break
        time.sleep(0.05)
    assert held() == before
