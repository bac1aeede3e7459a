"""The greeting on a new connection: both sides say hello, and each checks the other's against its certificate."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import msgspec

from meshinfer.errors import MeshinferError
from meshinfer.links.lanes import Inbox, Outbox
from meshinfer.security.certificates import certified_id
from meshinfer.wire.frames import FrameError, pack, unpack
from meshinfer.wire.messages import PROTOCOL, Hello

HELLO_TIMEOUT_S = 5.0
_HELLO_BYTES = 32 << 10


class GreetingError(MeshinferError):
    """A node that cannot be linked with; says why."""


class _Version(msgspec.Struct, frozen=True, tag="hello"):
    """All that a hello of any version has."""

    protocol: int


async def greet(ws: Any, mine: Hello) -> Hello:
    """Exchange hellos over a WebSocket on TLS. Raises GreetingError, CertificateError."""
    certified = certified_id(_certificate(ws))  # now: the other side may close at any moment
    outbox = Outbox()
    outbox.put(pack(msgspec.structs.replace(mine, clock_s=time.time())))
    piece = outbox.take()
    assert piece is not None and len(piece) < _HELLO_BYTES
    try:
        await ws.send_bytes(piece)
        got = await ws.receive(timeout=HELLO_TIMEOUT_S)
    except TimeoutError:
        raise GreetingError(f"no hello within {HELLO_TIMEOUT_S:.0f} s") from None
    except (ConnectionError, RuntimeError, aiohttp.ClientError) as error:
        raise GreetingError(f"the connection broke: {error}") from error
    if got.type is not aiohttp.WSMsgType.BINARY:
        why = f": {got.extra}" if isinstance(got.extra, str) and got.extra else ""
        raise GreetingError(f"the other side closed the connection{why}")
    return check_hello(got.data, certified)


def check_hello(piece: bytes, certified: str) -> Hello:
    """The hello in a piece, if it may be believed. Raises GreetingError."""
    if len(piece) > _HELLO_BYTES:
        raise GreetingError("its hello is too long")
    try:
        frame = Inbox(_HELLO_BYTES).put(piece)
        if frame is None:
            raise GreetingError("its hello is not whole")
        version = unpack(frame, _Version)[0].protocol
        if version != PROTOCOL:
            raise GreetingError(
                f"it speaks version {version} of the protocol, this node {PROTOCOL}: install the same meshinfer on both"
            )
        hello: Hello = unpack(frame, Hello)[0]
    except FrameError as error:
        raise GreetingError(f"its hello cannot be read: {error}") from error
    if hello.peer.id != certified:
        raise GreetingError(f"{hello.peer.name} says it is {hello.peer.id[:8]}, its certificate {certified[:8]}")
    return hello


def _certificate(ws: Any) -> bytes:
    ssl_object = ws.get_extra_info("ssl_object")
    shown = ssl_object.getpeercert(binary_form=True) if ssl_object is not None else None
    if not shown:
        raise GreetingError("it showed no certificate")
    return bytes(shown)
