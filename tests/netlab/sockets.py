"""Sockets of this process in the hosts of a lab: a socket stays in the namespace it was made in."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tools.netlab import Host

CLONE_NEWNET = 0x40000000
TIMEOUT_S = 5.0
REFUSED_TIMEOUT_S = 0.3
"""How long a connection that should not come about is given."""


@contextmanager
def inside(host: Host) -> Iterator[None]:
    """This thread is in the host's network during the block."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{host.namespace}", os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(here)
        os.close(here)
        os.close(there)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def connected(
    client: Host, server: Host, ipv6: bool = False, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a TCP connection from one host to another. Raises OSError if it does not come about."""
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    with inside(server):
        listener = socket.create_server(("", 0), family=family)
    with listener, inside(client), socket.socket(family, socket.SOCK_STREAM) as near:
        near.settimeout(timeout_s)
        port = listener.getsockname()[1]
        near.connect((server.address6, port, 0, socket.if_nametoindex("eth0")) if ipv6 else (server.address, port))
        far = listener.accept()[0]
        for end in (near, far):
            end.settimeout(TIMEOUT_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with far:
            yield near, far


def answers(one: socket.socket, other: socket.socket) -> bool:
    """Whether a byte gets from one end to the other and back."""
    one.sendall(b"?")
    assert other.recv(1) == b"?"
    other.sendall(b"!")
    return one.recv(1) == b"!"


def connects(client: Host, server: Host, ipv6: bool = False) -> bool:
    """Whether a host can open a connection to another, which has little time for it."""
    try:
        with connected(client, server, ipv6, REFUSED_TIMEOUT_S) as ends:
            return answers(*ends)
    except OSError:
        return False


def round_trip_ms(client: Host, server: Host, rounds: int = 15) -> float:
    """The shortest time of a byte there and back: what the network takes, whatever else the machine does."""
    with connected(client, server) as ends:
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            assert answers(*ends)
            taken.append((time.perf_counter() - began) * 1e3)
    return min(taken)


def transfer(source: Host, target: Host, data: bytes) -> tuple[bytes, float]:
    """Send data from one host to another; what arrived, and how long it took in seconds."""
    with connected(source, target) as (near, far):
        began = time.perf_counter()

        def send() -> None:
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        received = bytearray()
        while part := far.recv(1 << 20):
            received += part
        sender.join()
        return bytes(received), time.perf_counter() - began


@contextmanager
def listening(host: Host, group: str) -> Iterator[socket.socket]:
    """A UDP socket of the host that has joined a multicast group."""
    ipv6 = ":" in group
    with inside(host), socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.settimeout(TIMEOUT_S)
        receiver.bind(("", 0))
        if ipv6:
            scope = socket.if_nametoindex("eth0").to_bytes(4, "little")
            receiver.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, socket.inet_pton(socket.AF_INET6, group) + scope
            )
        else:
            joined = socket.inet_aton(group) + socket.inet_aton(host.address)
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
        yield receiver


def hears(receiver: Host, sender: Host, group: str) -> bool:
    """Whether a datagram to a group arrives before one that is sent to the receiver alone after it."""
    ipv6 = ":" in group
    with listening(receiver, group) as ear, inside(sender):
        port = ear.getsockname()[1]
        scope = (0, socket.if_nametoindex("eth0")) if ipv6 else ()
        with socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as mouth:
            mouth.sendto(b"to all", (group, port, *scope))
            mouth.sendto(b"to one", (receiver.address6 if ipv6 else receiver.address, port, *scope))
        return ear.recv(100) == b"to all"


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> bool:
    """Wait for something to become true; false if it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
