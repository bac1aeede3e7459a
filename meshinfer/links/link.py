"""One authenticated connection to another node: messages in both directions over a WebSocket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from meshinfer.links.health import Health
from meshinfer.links.lanes import MAX_QUEUED_BYTES, PIECE_BYTES, Inbox, Lane, Outbox
from meshinfer.membership.events import Address, LinkId
from meshinfer.wire.frames import FrameError, pack, unpack
from meshinfer.wire.messages import AnyMessage, Hello

log = logging.getLogger(__name__)

Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse
SOCKET_LIMIT_BYTES = PIECE_BYTES + 64
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_UNSENT_BYTES = 2 * PIECE_BYTES


class Link:
    """`hello` is what the other node said of itself; `dialled` where it was found, None where it came."""

    def __init__(self, number: LinkId, ws: Socket, hello: Hello, dialled: Address | None) -> None:
        self.number, self.hello, self.dialled = number, hello, dialled
        self.health = Health()
        self.clock_offset_s = 0.0
        self._ws = ws
        self._outbox, self._inbox = Outbox(), Inbox()
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._closed = False
        self._socket = ws.get_extra_info("socket")
        keep_unsent_short(self._socket)

    @property
    def name(self) -> str:
        return self.hello.peer.name

    def post(self, message: msgspec.Struct, payloads: Sequence[bytes] = (), lane: Lane = Lane.SMALL) -> None:
        """Send when its turn comes; nothing happens where the link is gone by then."""
        if self._closed:
            return
        self._outbox.put(pack(message, payloads), lane)
        if self._outbox.queued_bytes > MAX_QUEUED_BYTES:
            log.warning("%s takes nothing any more: closing the link", self.name)
            self.abort()
        self._empty.clear()
        self._wake.set()

    async def write(self) -> None:
        """Send what is posted until the link is closed."""
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            while not self._closed and (piece := self._outbox.take()) is not None:
                try:
                    await self._ws.send_bytes(piece)
                except (ConnectionError, RuntimeError, aiohttp.ClientError):
                    self.abort()
            self._empty.set()

    async def read(self) -> AsyncIterator[tuple[msgspec.Struct, memoryview] | None]:
        """What comes in, until the link ends; None for a part of a message. Raises FrameError."""
        async for piece in self._ws:
            if piece.type is not aiohttp.WSMsgType.BINARY:
                return
            frame = self._inbox.put(piece.data)
            yield unpack(frame, AnyMessage) if frame is not None else None
        if isinstance(error := self._ws.exception(), aiohttp.WebSocketError):
            raise FrameError(str(error))

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything posted is sent, but not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    def abort(self) -> None:
        """End the connection at once, whatever it still holds."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            self._empty.set()
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


def keep_unsent_short(raw: Any) -> None:
    """Let little wait in the system's send buffer, where nothing can overtake it any more (not on Windows)."""
    if raw is not None and _TCP_NOTSENT_LOWAT is not None:
        raw.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
