"""The delay lines of `netlab.py`: a program that hands frames from one network device to another, later.

It works for kernels without `tc netem`. It reads lines like `h1 h1-line 12.5` from its standard input: what comes in at
one of the two devices goes out at the other after 12.5 ms, and the other way round. It answers each line with `ok`, or
with what is wrong, and ends when its input ends. A line for the same devices changes their delay.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# From linux/if_packet.h, linux/if_ether.h and asm-generic/socket.h; Python has no names for them.
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33

FRAME_BYTES = 1 << 17
"""No frame is longer: 64 kB of data that the kernel has not cut into packets yet, and headers."""
BUFFER_BYTES = 16 << 20
FRAMES_AT_ONCE = 64
"""So many frames are taken from a device before those that are due are sent."""
EARLY_S = 2e-4
"""An idle machine wakes late, so the last moments before a frame is due are not slept through."""
LOST = {errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN, errno.EMSGSIZE, errno.EINVAL, errno.ENXIO, errno.ENODEV}
"""A frame that cannot be sent for one of these reasons is lost, as on any network."""


def open_device(name: str) -> socket.socket:
    """All frames that come in at a device, and a way to send some.

    Each frame has a virtio header in front, which says how the kernel would cut it and what checksum is missing. So
    large frames pass in one piece, and nothing has to be switched off at the devices.
    """
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    device.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    device.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    device.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    device.setblocking(False)
    device.bind((name, ETH_P_ALL))
    return device


@dataclass(slots=True)
class Direction:
    """Frames on their way from one device to another, in order."""

    source: socket.socket
    target: socket.socket
    delay_s: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        """Take what has come in; while a device is down nothing does."""
        due = time.monotonic() + self.delay_s
        with suppress(OSError):
            for _ in range(FRAMES_AT_ONCE):
                self.waiting.append((due, self.source.recv(FRAME_BYTES)))

    def send_due(self) -> None:
        """Send every frame whose time has come."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            try:
                self.target.send(self.waiting.popleft()[1])
            except OSError as error:
                if error.errno not in LOST:
                    raise


class DelayLines:
    """All lines of one program."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[Direction]] = {}
        self._by_source: dict[socket.socket, Direction] = {}

    def set(self, near: str, far: str, delay_ms: float) -> None:
        """Open a line between two devices, or change its delay."""
        if (near, far) not in self._lines:
            one, other = open_device(near), open_device(far)
            line = [Direction(one, other, 0.0), Direction(other, one, 0.0)]
            self._lines[near, far] = line
            self._by_source |= {direction.source: direction for direction in line}
        for direction in self._lines[near, far]:
            direction.delay_s = delay_ms / 1e3

    def run(self) -> None:
        """Hand frames on and obey commands until there are no more."""
        while True:
            dues = [direction.waiting[0][0] for direction in self._by_source.values() if direction.waiting]
            timeout_s = max(0.0, min(dues) - time.monotonic() - EARLY_S) if dues else None
            ready, _, _ = select.select([sys.stdin, *self._by_source], [], [], timeout_s)
            for source in ready:
                if source in self._by_source:
                    self._by_source[source].take()
            for direction in self._by_source.values():
                direction.send_due()
            if sys.stdin in ready and not self._obey(sys.stdin.readline()):
                return

    def _obey(self, command: str) -> bool:
        if not command:
            return False
        near, far, delay_ms = command.split()
        try:
            self.set(near, far, float(delay_ms))
        except OSError as error:
            print(f"{near}, {far}: {error}", flush=True)
        else:
            print("ok", flush=True)
        return True


if __name__ == "__main__":
    # A line has to keep its time while the hosts use every core, and without slack in the timers.
    with suppress(OSError):
        os.nice(-10)
        Path("/proc/self/timerslack_ns").write_text("1")
    DelayLines().run()
