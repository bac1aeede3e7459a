"""What a link is like: its round trip and its goodput, from echoes."""

from __future__ import annotations

import statistics
from collections import deque

PROBE_BYTES = 256 << 10
PROBE_EVERY_S = 60.0
FIRST_ECHOES, ECHO_EVERY_S = 3, 2.0
"""Round trips that are measured at once, and how often after that: every echo wakes two processors."""
_SAMPLES = 9
_LEAST_S = 1e-4
"""A probe that seems to take less was measured too coarsely to tell."""


class Health:
    """Stamps of what was sent, and what their echoes tell. Times are of the monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[float, int]] = {}
        self._stamp = 0
        self._asked_at = 0.0
        self._rtts: deque[float] = deque(maxlen=_SAMPLES)
        self._goodputs: deque[float] = deque(maxlen=3)
        self.probed_at: float | None = None

    def stamp(self, now: float, size_bytes: int = 0) -> int:
        """A stamp for something sent now."""
        self._stamp += 1
        self._sent[self._stamp] = now, size_bytes
        if len(self._sent) > 2 * _SAMPLES:
            del self._sent[min(self._sent, key=lambda stamp: (self._sent[stamp][1], stamp))]  # probes take long
        return self._stamp

    def echoed(self, stamp: int, now: float) -> None:
        """Note that a stamp has come back; unknown ones are ignored."""
        sent, size_bytes = self._sent.pop(stamp, (None, 0))
        if sent is None:
            return
        if size_bytes:
            self._goodputs.append(size_bytes / max(now - sent - self.rtt_s, _LEAST_S))
        else:
            self._rtts.append(now - sent)

    def wants_echo(self, now: float) -> bool:
        """Whether it is time to measure the round trip; asked before each heartbeat."""
        due = len(self._rtts) < FIRST_ECHOES or now - self._asked_at >= ECHO_EVERY_S
        if due:
            self._asked_at = now
        return due

    def wants_probe(self, now: float) -> bool:
        """Whether it is time to measure the goodput: once the round trip is known, then now and then."""
        under_way = any(size_bytes for _, size_bytes in self._sent.values())
        early = len(self._goodputs) < 2 and not under_way
        due = early or self.probed_at is None or now - self.probed_at >= PROBE_EVERY_S
        return due and len(self._rtts) >= 2

    @property
    def rtt_s(self) -> float:
        """The median of the last round trips; 0 before the first."""
        return statistics.median(self._rtts) if self._rtts else 0.0

    @property
    def goodput_bytes_s(self) -> float:
        """The best of the last probes; 0 before the first."""
        return max(self._goodputs, default=0.0)
