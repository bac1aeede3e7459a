"""All links of a node: listens, dials, greets, keeps them alive, and hands on what comes over them.

Membership decides (`meshinfer.membership.state`); here is only what its instructions do to sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from meshinfer.errors import MeshinferError
from meshinfer.links.dial import DialError, dial
from meshinfer.links.greet import GreetingError, greet
from meshinfer.links.health import PROBE_BYTES
from meshinfer.links.lanes import Lane
from meshinfer.links.link import SOCKET_LIMIT_BYTES, Link
from meshinfer.links.listen import Listener
from meshinfer.membership.events import (
    Address,
    AddressesHinted,
    BecomeAnotherNode,
    Close,
    Dial,
    DialFailed,
    Event,
    FrameArrived,
    Instruction,
    LinkId,
    LinkLost,
    LinkOpened,
    Peer,
    ReportMembers,
    SendHeartbeat,
    SendPeers,
    TimePassed,
)
from meshinfer.membership.state import Membership
from meshinfer.security.certificates import CertificateError
from meshinfer.types import NodeId
from meshinfer.wire.frames import FrameError
from meshinfer.wire.messages import Echo, Goodbye, Heartbeat, Hello, Peers, Probe

log = logging.getLogger(__name__)

TICK_S = 0.2
CLOSE_TIMEOUT_S = 1.0


class Handler:
    """What a node does with what its links tell it. All are called on the event loop and must not block."""

    def members_changed(self, members: tuple[Peer, ...]) -> None:
        """The nodes with a link, and this one."""

    def link_opened(self, link: Link) -> None:
        """There is a new link to `link.hello.peer`."""

    def link_lost(self, node: NodeId) -> None:
        """A link is gone, and with it what was under way; there may be a new one already."""

    def task_failed(self, name: str, error: BaseException) -> None:
        """A task of the links ended as it should not."""

    def received(self, sender: NodeId, message: msgspec.Struct, payload: memoryview) -> None:
        """A message came that links themselves do not answer."""

    def twin_found(self, twin: Peer) -> None:
        """Another process has this node's key; this one has to take a new one."""


class Links:
    """`open` listens; from then on `hint` says where nodes may be, until `close`."""

    def __init__(self, hello: Hello, tls: tuple[ssl.SSLContext, ssl.SSLContext], handler: Handler) -> None:
        """`tls`: for accepting and for dialling, see `security.identity.tls_contexts`."""
        self.hello = hello
        self._accepting, self._dialling = tls
        self._handler = handler
        self._state = Membership(hello.peer, random.random)
        self._links: dict[LinkId, Link] = {}
        self._by_node: dict[NodeId, Link] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._listener: Listener | None = None
        self.failures: dict[Address, str] = {}
        """Why the last dial of an address failed, for people."""

    @property
    def members(self) -> tuple[Peer, ...]:
        return self._state.members

    def link(self, node: NodeId) -> Link | None:
        """The link to a node, if there is one."""
        return self._by_node.get(node)

    @property
    def all(self) -> tuple[Link, ...]:
        return tuple(self._by_node.values())

    async def open(self, listener: Listener, announced: tuple[Address, ...]) -> None:
        """Accept links on an open `listener`, and be found at `announced`."""
        peer = msgspec.structs.replace(self.hello, peer=_at(self.hello.peer, announced)).peer
        self.hello = msgspec.structs.replace(self.hello, peer=peer)
        self._state = Membership(peer, random.random)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._dialling, limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=3.0),
        )
        self._listener = listener
        await listener.accept(self._accept, self._accepting)
        self._spawn(self._tick(), "links tick")

    def hint(self, addresses: Sequence[Address], node: NodeId | None = None) -> None:
        """An advert, the user or another node says where a node may be."""
        self.happen(AddressesHinted(tuple(addresses), node))

    def post(
        self, node: NodeId, message: msgspec.Struct, payloads: Sequence[bytes] = (), lane: Lane = Lane.SMALL
    ) -> bool:
        """Send to a node; False where there is no link."""
        link = self._by_node.get(node)
        if link is not None:
            link.post(message, payloads, lane)
        return link is not None

    def post_all(self, message: msgspec.Struct) -> None:
        """Send to every node."""
        for link in self._by_node.values():
            link.post(message)

    async def close(self, reason: str = "") -> None:
        """Say goodbye and end all links, within a deadline."""
        self.post_all(Goodbye(reason=reason))
        await asyncio.gather(*(link.flush(CLOSE_TIMEOUT_S) for link in self.all))
        for link in list(self._links.values()):
            link.abort()
        if self._listener:
            await self._listener.close()
        if self._session:
            await self._session.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S) if self._tasks else None

    # --- membership ---------------------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """Tell membership something, and do what it decides."""
        for instruction in self._state.handle(event, time.monotonic()):
            self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Dial(addresses):
                self._spawn(self._dial(addresses), f"dial {addresses[0].host}")
            case Close(number, reason):
                if link := self._links.get(number):
                    log.info("link to %s closed: %s", link.name, reason)
                    self._forget(link)
                    link.abort()
            case SendHeartbeat(number):
                self._beat(number)
            case SendPeers(number, peers):
                if link := self._links.get(number):
                    link.post(Peers(peers=peers))
            case ReportMembers(members):
                self._handler.members_changed(members)
            case BecomeAnotherNode(twin):
                self._handler.twin_found(twin)

    def _beat(self, number: LinkId) -> None:
        link = self._links.get(number)
        if link is None:
            return
        now = time.monotonic()
        link.post(Heartbeat(stamp=link.health.stamp(now) if link.health.wants_echo(now) else 0))
        if link.health.wants_probe(now):
            link.health.probed_at = now
            link.post(Probe(stamp=link.health.stamp(now, PROBE_BYTES), padding=random.randbytes(PROBE_BYTES)))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.happen(TimePassed())

    # --- connections --------------------------------------------------------------------------------------------

    async def _dial(self, addresses: tuple[Address, ...]) -> None:
        assert self._session is not None
        try:
            found = await dial(self._session, addresses, self.hello, self.failures)
        except DialError:
            self.happen(DialFailed(addresses))
            return
        except Exception:
            self.happen(DialFailed(addresses))
            raise
        await self._serve(found.socket, found.hello, found.address)

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        """The other side of a dial: a WebSocket from a node that has shown a certificate of this mesh."""
        ws = web.WebSocketResponse(max_msg_size=SOCKET_LIMIT_BYTES, compress=False, timeout=CLOSE_TIMEOUT_S)
        await ws.prepare(request)
        try:
            hello = await greet(ws, self.hello)
        except (GreetingError, CertificateError) as error:
            log.warning("refused a link from %s: %s", request.remote, error)
            return ws
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(ws, hello, None)
        finally:
            self._tasks.discard(task)
        return ws

    async def _serve(self, ws: Any, hello: Hello, dialled: Address | None) -> None:
        """Read a link to its end."""
        link = Link(LinkId(next(self._numbers)), ws, hello, dialled)
        link.clock_offset_s = hello.clock_s - time.time()
        rival = self._by_node.get(hello.peer.id)
        self._links[link.number] = self._by_node[hello.peer.id] = link
        self.happen(LinkOpened(link.number, hello.peer, dialled))
        if self._links.get(link.number) is not link:  # membership has closed it again
            if rival is not None and self._links.get(rival.number) is rival:
                self._by_node[hello.peer.id] = rival
            with suppress(Exception):
                await ws.close()
            return
        self._handler.link_opened(link)
        writing = asyncio.create_task(link.write(), name=f"write to {link.name}")
        left = False
        try:
            async for got in link.read():
                if self._links.get(link.number) is not link:
                    return
                self.happen(FrameArrived(link.number))
                if got is not None:
                    left = self._take(link, *got) or left
        except FrameError as error:
            log.warning("closing the link to %s: %s", link.name, error)
        finally:
            writing.cancel()
            link.abort()
            known = self._links.get(link.number) is link
            self._forget(link)
            if known:
                self.happen(LinkLost(link.number, left))

    def _forget(self, link: Link) -> None:
        if self._links.pop(link.number, None) is None:
            return
        if self._by_node.get(link.hello.peer.id) is link:
            del self._by_node[link.hello.peer.id]
        self._handler.link_lost(link.hello.peer.id)

    def _take(self, link: Link, message: msgspec.Struct, payload: memoryview) -> bool:
        """Handle one message; whether its sender leaves for good."""
        match message:
            case Heartbeat(stamp=0):
                pass
            case Heartbeat(stamp=stamp) | Probe(stamp=stamp):
                link.post(Echo(stamp=stamp))
            case Echo(stamp=stamp):
                link.health.echoed(stamp, time.monotonic())
            case Peers(peers=peers):
                for peer in peers:
                    if peer.id != link.hello.peer.id and peer.addresses:
                        self.happen(AddressesHinted(peer.addresses, peer.id, lasting=False))
            case Goodbye():
                return True
            case _:
                try:
                    self._handler.received(link.hello.peer.id, message, payload)
                except MeshinferError as error:
                    log.warning("%s sent a %s that cannot be: %s", link.name, type(message).__name__, error)
        return False

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._handler.task_failed(task.get_name(), error)


def _at(peer: Peer, addresses: tuple[Address, ...]) -> Peer:
    return Peer(peer.id, peer.name, peer.incarnation, addresses)
