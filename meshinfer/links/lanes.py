"""How messages share a connection: small ones first, then the steps of the ring, shards last.

A message longer than a piece is sent piece by piece, so that nothing waits for more than one piece of what is less
urgent, and each piece that arrives shows that its sender lives. A piece is one byte that says its lane and whether it
is the last, and bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from meshinfer.wire.frames import MAX_FRAME_BYTES, FrameError

PIECE_BYTES = 64 << 10
MAX_QUEUED_BYTES = 4 * MAX_FRAME_BYTES
_LAST = 0x80


class Lane(IntEnum):
    """The lower goes first."""

    SMALL = 0
    STEPS = 1
    BULK = 2


class Outbox:
    """What is to be sent, in the order in which it is."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[memoryview], ...] = tuple(deque() for _ in Lane)
        self.queued_bytes = 0

    def put(self, frame: bytes, lane: Lane = Lane.SMALL) -> None:
        """Queue a frame; a long one is not small whatever its lane. Frames of one lane keep their order."""
        if lane is Lane.SMALL and len(frame) > PIECE_BYTES:
            lane = Lane.STEPS
        self._lanes[lane].append(memoryview(frame))
        self.queued_bytes += len(frame)

    def take(self) -> bytes | None:
        """The next piece, or None where nothing waits."""
        for lane in Lane:
            if waiting := self._lanes[lane]:
                frame = waiting[0]
                last = len(frame) <= PIECE_BYTES
                if last:
                    waiting.popleft()
                else:
                    waiting[0] = frame[PIECE_BYTES:]
                piece = frame[:PIECE_BYTES]
                self.queued_bytes -= len(piece)
                return bytes((lane | (_LAST if last else 0),)) + piece
        return None


class Inbox:
    """Pieces back to frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: tuple[list[bytes], ...] = tuple([] for _ in Lane)
        self._sizes = [0 for _ in Lane]

    def put(self, piece: bytes) -> bytes | None:
        """The frame that a piece completes, if it does. Raises FrameError."""
        lane = piece[0] & ~_LAST if piece else len(Lane)
        last = bool(piece and piece[0] & _LAST)
        if lane >= len(Lane) or len(piece) > PIECE_BYTES + 1 or (not last and len(piece) <= PIECE_BYTES):
            raise FrameError("a piece that belongs to no frame")
        self._sizes[lane] += len(piece) - 1
        if self._sizes[lane] > self._max_bytes:
            raise FrameError(f"a frame of more than {self._max_bytes} bytes")
        self._parts[lane].append(piece[1:])
        if not last:
            return None
        parts: Sequence[bytes] = self._parts[lane][:]
        self._parts[lane].clear()
        self._sizes[lane] = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)
