"""Real links over loopback: who is let in, and who disturbs whom."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import cbor2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.config import Folders
from meshinfer.links.greet import GreetingError, check_hello
from meshinfer.links.lanes import Lane
from meshinfer.links.link import Link
from meshinfer.links.links import Handler, Links
from meshinfer.links.listen import Listener
from meshinfer.membership.events import Address, Peer
from meshinfer.security.identity import Identity, load_identity, tls_contexts
from meshinfer.types import NodeId
from meshinfer.wire.frames import pack
from meshinfer.wire.messages import PROTOCOL, Cancel, Hello


class Node(Handler):
    """An agent that has links and nothing else."""

    def __init__(self, folder: Path, name: str, code: str | None = None, protocol: int = PROTOCOL) -> None:
        self.name = name
        self.identity: Identity = load_identity(Folders(folder / name), code)
        self.tls = tls_contexts(self.identity)
        peer = Peer(self.identity.id, name, random.getrandbits(62), ())
        self.links = Links(Hello(protocol=protocol, peer=peer), self.tls, self)
        self.seen: list[tuple[str, ...]] = []
        self.opened: list[Link] = []
        self.got: list[tuple[NodeId, msgspec.Struct, int]] = []
        self.port = 0

    @property
    def id(self) -> NodeId:
        return self.identity.id

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    @property
    def members(self) -> set[str]:
        return {peer.name for peer in self.links.members}

    def members_changed(self, members: tuple[Peer, ...]) -> None:
        self.seen.append(tuple(peer.name for peer in members))

    def link_opened(self, link: Link) -> None:
        self.opened.append(link)

    def received(self, sender: NodeId, message: msgspec.Struct, payload: memoryview) -> None:
        self.got.append((sender, message, len(payload)))

    async def open(self) -> None:
        listener = Listener.bind(0)
        self.port = listener.port
        await self.links.open(listener, (self.address,))


def story(tell: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await tell()

    asyncio.run(limited())


async def until(condition: Callable[[], bool], within_s: float = 8.0) -> float:
    """Wait until something holds; how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it did not come to be"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


class Nodes:
    """`async with`: nodes of one mesh, opened and closed together."""

    def __init__(self, folder: Path, *names: str, protocols: dict[str, int] | None = None) -> None:
        self.folder = folder
        first = Node(folder, names[0], protocol=(protocols or {}).get(names[0], PROTOCOL))
        code = first.identity.join_code
        others = [Node(folder, name, code, (protocols or {}).get(name, PROTOCOL)) for name in names[1:]]
        self.all = [first, *others]

    async def __aenter__(self) -> list[Node]:
        for node in self.all:
            await node.open()
        return self.all

    async def __aexit__(self, *args: object) -> None:
        await asyncio.gather(*(node.links.close() for node in self.all))


async def linked(*nodes: Node) -> None:
    for node in nodes:
        node.links.hint([other.address for other in nodes[:1] if other is not node])
    await until(lambda: all(node.members == {other.name for other in nodes} for node in nodes))


def test_two_that_dial_at_once_have_one_link(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b") as (a, b):
            a.links.hint([b.address])
            b.links.hint([a.address])
            await until(lambda: a.members == b.members == {"a", "b"})
            await asyncio.sleep(1.0)  # a second link would come within that
            assert len(a.links.all) == len(b.links.all) == len(a.links._links) == len(b.links._links) == 1
            assert a.seen[-1] == b.seen[-1] and len(a.seen) == len(b.seen) == 1
            a.links.post(b.id, Cancel(epoch=1, number=2))
            b.links.post(a.id, Cancel(epoch=3, number=4))
            await until(lambda: len(a.got) == len(b.got) == 1)

    story(tell)


def test_three_find_each_other_through_one(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b", "c") as (a, b, c):
            b.links.hint([a.address])
            c.links.hint([a.address])
            await until(lambda: a.members == b.members == c.members == {"a", "b", "c"})

    story(tell)


def test_another_mesh_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path / "one", "a") as (a,), Nodes(tmp_path / "other", "b") as (b,):
            a.links.hint([b.address])
            b.links.hint([a.address])
            await until(lambda: bool(a.links.failures and b.links.failures))
            for node in (a, b):
                assert "another mesh" in next(iter(node.links.failures.values()))
                assert node.members == {node.name} and not node.links._links

    story(tell)


def test_another_version_is_refused_with_the_reason_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b", protocols={"b": PROTOCOL + 1}) as (a, b):
            a.links.hint([b.address])
            await until(lambda: bool(a.links.failures))
            why = a.links.failures[b.address]
            assert f"speaks version {PROTOCOL + 1}" in why and "install the same meshinfer" in why
            await until(lambda: "refused a link" in caplog.text)
            assert a.members == {"a"} and b.members == {"b"}

    story(tell)


def test_nobody_listens(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a") as (a,):
            a.links.hint([Address("127.0.0.1", 1)])
            await until(lambda: bool(a.links.failures))
            assert a.links.failures[Address("127.0.0.1", 1)] == "nobody listens there"

    story(tell)


def test_half_open_connections_are_in_nobodys_way(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b") as (a, b):
            silent = [await asyncio.open_connection("127.0.0.1", a.port) for _ in range(50)]
            began = time.monotonic()
            await linked(a, b)
            assert time.monotonic() - began < 2
            for _, writer in silent:
                writer.close()

    story(tell)


def test_plain_http_gets_no_answer_and_does_no_harm(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b") as (a, b):
            for request in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(1000), b"\x16\x03\x01" + b"\xff" * 500):
                reader, writer = await asyncio.open_connection("127.0.0.1", a.port)
                writer.write(request)
                async with asyncio.timeout(7):
                    answer = await reader.read(1000)
                assert b"HTTP" not in answer
                writer.close()
            await linked(a, b)

    story(tell)


async def raw(node: Node, target: Node) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    """A WebSocket with a certificate of the mesh, and no greeting yet."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=node.tls[1], force_close=True))
    return session, await session.ws_connect(f"https://127.0.0.1:{target.port}/link", compress=0)


def hello_of(node: Node) -> bytes:
    return b"\x80" + pack(node.links.hello)


@pytest.mark.parametrize(
    "sent",
    [
        [b"\x80" + b"garbage"],
        [b""],
        [b"\xff" * 100],
        [b"\x80" + bytes(60_000)],
        [b"\x00" + bytes(1 << 16), b"\x00" + bytes(1 << 16)],
    ],
)
def test_garbage_instead_of_a_hello_ends_that_connection_alone(tmp_path: Path, sent: list[bytes]) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b", "c") as (a, b, c):
            await linked(a, b)
            session, ws = await raw(c, a)
            for piece in sent:
                await ws.send_bytes(piece)
            await ws.receive()  # its hello
            end = await ws.receive(timeout=7)
            assert end.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
            await session.close()
            assert a.members == {"a", "b"} == set(a.seen[-1])

    story(tell)


@pytest.mark.parametrize(
    "sent",
    [
        [b"\x80" + b"garbage"],
        [b"\x80" + struct.pack("<I", 1 << 30) + b"x"],
        [b"\x80" + bytes((1 << 16) + 100)],
        [b"\x07"],
        [b"\x80" + pack(Cancel(epoch=1, number=1))[:-1]],
        ["text"],
    ],
)
def test_garbage_after_the_greeting_ends_that_link_alone(tmp_path: Path, sent: list[bytes | str]) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b", "c") as (a, b, c):
            await linked(a, b)
            session, ws = await raw(c, a)
            await ws.send_bytes(hello_of(c))
            await until(lambda: a.members == {"a", "b", "c"})
            for piece in sent:
                await (ws.send_str(piece) if isinstance(piece, str) else ws.send_bytes(piece))
            await until(lambda: a.members == {"a", "b"}, within_s=1.2)  # at once: silence would take longer
            await session.close()
            a.links.post(b.id, Cancel(epoch=1, number=1))
            await until(lambda: len(b.got) == 1)

    story(tell)


def test_a_message_that_cannot_be_is_no_reason_to_end_a_link(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b") as (a, b):
            await linked(a, b)
            link = a.links.link(b.id)
            assert link is not None
            link.post(a.links.hello)  # a second hello means nothing
            a.links.post(b.id, Cancel(epoch=1, number=1))
            await until(lambda: any(isinstance(message, Cancel) for _, message, _ in b.got))
            assert a.links.link(b.id) is link

    story(tell)


def test_who_says_goodbye_is_gone_at_once_and_not_dialled_again(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b", "c") as (a, b, c):
            await linked(a, b, c)
            began = time.monotonic()
            await b.links.close("it is evening")
            assert time.monotonic() - began < 2
            assert await until(lambda: a.members == c.members == {"a", "c"}) < 0.5
            await asyncio.sleep(1.5)
            assert b.address not in a.links.failures and b.address not in c.links.failures

    story(tell)


def test_heartbeats_and_small_messages_pass_by_a_lot_of_bulk(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a", "b") as (a, b):
            await linked(a, b)
            await until(lambda: all(link.health.rtt_s > 0 for node in (a, b) for link in node.links.all))
            seen = len(a.seen), len(b.seen)
            for number in range(50):
                a.links.post(b.id, Cancel(epoch=2, number=number), (bytes(1 << 20),), Lane.BULK)
            a.links.post(b.id, Cancel(epoch=1, number=7))
            await until(lambda: len(b.got) == 51, within_s=20)
            assert [message.epoch for _, message, _ in b.got if isinstance(message, Cancel)].index(1) < 10
            assert sum(size for _, _, size in b.got) == 50 << 20
            assert (len(a.seen), len(b.seen)) == seen

    story(tell)


def test_several_addresses_of_which_the_first_is_a_black_hole(tmp_path: Path) -> None:
    async def tell() -> None:
        with socket.create_server(("127.0.0.1", 0)) as hole:  # takes connections and never says a word
            silent = Address("127.0.0.1", hole.getsockname()[1])
            async with Nodes(tmp_path, "a", "b") as (a, b):
                a.links.hint([silent, Address("127.0.0.1", 1), b.address])
                assert await until(lambda: a.members == {"a", "b"}) < 2
                assert a.links.failures[Address("127.0.0.1", 1)] == "nobody listens there"

    story(tell)


def test_without_a_certificate_nobody_gets_in(tmp_path: Path) -> None:
    async def tell() -> None:
        async with Nodes(tmp_path, "a") as (a,):
            anyone = ssl.create_default_context()
            anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=anyone)) as session:
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"https://127.0.0.1:{a.port}/link")

    story(tell)


PEER = Peer(NodeId("n" * 32), "pc", 1, ())


def piece(hello: Hello) -> bytes:
    return b"\x80" + pack(hello)


def test_a_hello_is_believed_where_the_certificate_says_the_same() -> None:
    hello = Hello(protocol=PROTOCOL, peer=PEER, clock_s=5.0)
    assert check_hello(piece(hello), PEER.id) == hello


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (piece(Hello(protocol=PROTOCOL + 1, peer=PEER)), "version"),
        (piece(Hello(protocol=PROTOCOL, peer=Peer(NodeId("x"), "pc", 1, ()))), "certificate"),
        (piece(Hello(protocol=PROTOCOL, peer=PEER, versions={"a": "b" * 40_000})), "too long"),
        (b"\x00" + pack(Hello(protocol=PROTOCOL, peer=PEER)), "cannot be read"),
        (b"\x80" + pack(Cancel(epoch=1, number=1)), "cannot be read"),
        (b"", "cannot be read"),
        (b"\x80", "cannot be read"),
    ],
)
def test_hellos_that_are_not_believed(sent: bytes, why: str) -> None:
    with pytest.raises(GreetingError, match=why):
        check_hello(sent, PEER.id)


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_garbage_is_no_hello(data: bytes) -> None:
    with pytest.raises(GreetingError):
        check_hello(data, PEER.id)


def test_a_hello_of_another_version_need_not_be_readable_for_its_version_to_be_named() -> None:
    """A later version may have changed anything but the number."""
    header = cbor2.dumps({"type": "hello", "protocol": PROTOCOL + 1, "peer": {"key": "what a later version calls it"}})
    with pytest.raises(GreetingError, match=f"version {PROTOCOL + 1}"):
        check_hello(b"\x80" + len(header).to_bytes(4, "little") + header, PEER.id)
