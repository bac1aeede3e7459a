"""Nodes find each other by real multicast: over loopback in one process, and between two hosts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_interface
from typing import Any

import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from meshinfer.discovery import mdns as module
from meshinfer.discovery.addresses import Interface
from meshinfer.discovery.mdns import SERVICE, Mdns
from meshinfer.discovery.records import Advert, txt
from meshinfer.types import NodeId

LO = Interface("lo", (ip_interface("127.0.0.1/8"),), loopback=True)
MESH = secrets.token_hex(8)
"""Of this run alone: whatever else is on this machine belongs to other meshes."""
FOUND_WITHIN_S = 2.0
WITHIN_S = 10.0
"""Who has just answered does not answer again for a second or two (RFC 6762, section 6)."""
QUIET_S = 0.5


@dataclass
class Node:
    """A node, and what it was told."""

    advert: Advert
    there: dict[NodeId, Advert] = field(default_factory=dict)
    told: int = 0
    interfaces: tuple[Interface, ...] = (LO,)
    mdns: Mdns = field(init=False)

    def __post_init__(self) -> None:
        self.mdns = Mdns(self.advert, self._found, self._gone, read=lambda: self.interfaces)

    def _found(self, advert: Advert) -> None:
        self.there[advert.id] = advert
        self.told += 1

    def _gone(self, node: NodeId) -> None:
        del self.there[node]

    def sees(self, *others: Node) -> bool:
        return set(self.there) == {other.advert.id for other in others}


def advert(digit: str, **changes: Any) -> Advert:
    return replace(Advert(1, MESH, NodeId(digit * 32), "same-host-name", 7000 + int(digit)), **changes)


@asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(node.mdns.run())
        yield
        await asyncio.gather(*(node.mdns.close() for node in nodes))


async def eventually(true: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - a condition of many parts
            await asyncio.sleep(0.01)


def story(told: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine function."""

    def test(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(module, "RETRY_S", 0.1)
        with caplog.at_level(logging.INFO):
            asyncio.run(told(caplog))

    test.__name__, test.__doc__ = told.__name__, told.__doc__
    return test


@story
async def test_nodes_of_the_same_host_name_find_each_other_and_see_each_other_go(log: Any) -> None:
    a, b, c = Node(advert("1")), Node(advert("2", memory_bytes=7, devices=("CPU",))), Node(advert("3"))
    async with running(a, b, c):
        await eventually(lambda: a.sees(b, c) and b.sees(a, c) and c.sees(a, b), FOUND_WITHIN_S)
        assert a.there[b.advert.id] == replace(b.advert, addresses=("127.0.0.1",))
        began = time.monotonic()
        await b.mdns.close()
        assert time.monotonic() - began < module.CLOSE_S
        await eventually(lambda: a.sees(c) and c.sees(a))
    assert [record.message for record in log.records if record.name.startswith("meshinfer")] == []


@story
async def test_what_a_node_says_later_is_heard_once(log: Any) -> None:
    a, b = Node(advert("1")), Node(advert("2"))
    async with running(a, b):
        await eventually(lambda: a.sees(b))
        b.mdns.update(replace(b.advert, memory_bytes=99))
        await eventually(lambda: a.there[b.advert.id].memory_bytes == 99)
        await asyncio.sleep(QUIET_S)
        assert a.told == 2


@story
async def test_a_node_that_is_cancelled_withdraws_its_advert(log: Any) -> None:
    a, b = Node(advert("1")), Node(advert("2"))
    async with running(a):
        task = asyncio.create_task(b.mdns.run())
        await eventually(lambda: a.sees(b))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await eventually(a.sees)


@story
async def test_a_copied_home_is_found_and_the_node_itself_is_not(log: Any) -> None:
    a, twin = Node(advert("1")), Node(advert("1", port=7999))
    async with running(a, twin):
        await eventually(lambda: a.sees(a) and twin.sees(a))
        assert a.there[a.advert.id].port == 7999 and twin.there[a.advert.id].port == a.advert.port


@story
async def test_another_mesh_is_counted_and_said_once_but_not_found(log: Any) -> None:
    other = secrets.token_hex(8)
    a, b, strangers = Node(advert("1")), Node(advert("2")), [Node(advert(digit, mesh=other)) for digit in "34"]
    async with running(a, b, *strangers):
        await eventually(lambda: a.mdns.other_meshes.get(other) == 2 and a.sees(b))
        await strangers[0].mdns.close()
        await eventually(lambda: a.mdns.other_meshes.get(other) == 1)
    said = [message for message in log.messages if f"(fingerprint {other})" in message and "--join" in message]
    assert len(said) == 2  # a and b, once each


async def raw(name: str, properties: dict[bytes, bytes]) -> AsyncZeroconf:
    """Something that is not this program advertises under the same type."""
    aio = AsyncZeroconf(interfaces=["127.0.0.1"])
    info = AsyncServiceInfo(
        SERVICE, f"{name}.{SERVICE}", port=1, properties=properties, parsed_addresses=["127.0.0.1"], server="x.local."
    )
    await (await aio.async_register_service(info, cooperating_responders=True))
    return aio


@story
async def test_other_services_under_the_same_type_are_ignored(log: Any) -> None:
    a, b = Node(advert("1")), Node(advert("2"))
    others = [await raw("printer", {}), await raw("B\u00fcro printer", {b"v": b"\xff", b"mesh": b"x"})]
    async with running(a, b):
        await eventually(lambda: a.sees(b))
        await asyncio.sleep(QUIET_S)
        assert a.told == b.told == 1
    for aio in others:
        await aio.async_close()


@story
async def test_a_node_that_died_stays_a_hint_and_comes_back_under_the_same_id(log: Any) -> None:
    a, b = Node(advert("1")), Node(advert("2"))
    dead = await raw("dead", txt(b.advert))
    async with running(a):
        await eventually(lambda: a.sees(b))
        await dead.zeroconf._async_close()  # without a word
        await asyncio.sleep(QUIET_S)
        assert a.sees(b)
        async with running(b):
            await eventually(lambda: a.there[b.advert.id].port == b.advert.port)
        await asyncio.sleep(QUIET_S)
        assert a.sees(b)  # its other advert has not run out


@story
async def test_without_a_network_it_says_why_once_and_goes_on_when_there_is_one(log: Any) -> None:
    a, b = Node(advert("1"), interfaces=()), Node(advert("2"))
    async with running(a, b):
        await asyncio.sleep(QUIET_S)
        assert log.messages.count("nodes cannot be found by multicast now: no network interface is up") == 1
        a.interfaces = (LO,)
        await eventually(lambda: a.sees(b) and b.sees(a))
        a.interfaces = ()
        await eventually(lambda: a.sees() and b.sees())
        assert log.messages.count("nodes cannot be found by multicast now: no network interface is up") == 2


# zeroconf leaves the socket that it opened first to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@story
async def test_interfaces_that_cannot_be_opened_are_tried_again(log: Any) -> None:
    gone = Interface("eth7", (ip_interface("203.0.113.7/24"),))
    a, b = Node(advert("1"), interfaces=(gone,)), Node(advert("2"))
    async with running(a, b):
        await asyncio.sleep(QUIET_S)
        assert not a.there and any("cannot be found by multicast now" in message for message in log.messages)
        a.interfaces = (LO,)
        await eventually(lambda: a.sees(b) and b.sees(a))


@story
async def test_interfaces_that_change_are_used(log: Any) -> None:
    a, b = Node(advert("1")), Node(advert("2"))
    async with running(a, b):
        await eventually(lambda: a.sees(b) and b.sees(a))
        a.interfaces = (Interface("lo", (ip_interface("127.0.0.2/8"),), loopback=True),)
        await eventually(lambda: b.sees(a) and b.there[a.advert.id].addresses == ("127.0.0.2",) and a.sees(b))


@story
async def test_closing_before_it_runs_ends_it_at_once(log: Any) -> None:
    a = Node(advert("1"))
    await a.mdns.close()
    await a.mdns.run()
