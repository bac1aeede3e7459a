"""The process around an agent: ports, identity, discovery, API, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

from meshinfer import __version__
from meshinfer.agent.admin import admin_routes, status_of
from meshinfer.agent.agent import Agent
from meshinfer.agent.capacity import Capacity
from meshinfer.agent.runtime import Runtime, api_url, new_token, only_agent, write_runtime
from meshinfer.agent.signals import on_stop
from meshinfer.api.guard import Guard
from meshinfer.api.server import serve
from meshinfer.config import Folders
from meshinfer.discovery.addresses import choose
from meshinfer.discovery.interfaces import read_interfaces
from meshinfer.discovery.mdns import Mdns
from meshinfer.discovery.records import Advert
from meshinfer.errors import MeshinferError
from meshinfer.links.links import Links
from meshinfer.links.listen import Listener
from meshinfer.membership.events import Address, AdvertWithdrawn, Peer
from meshinfer.security.identity import Identity, forget_node, load_identity, tls_contexts
from meshinfer.settings import DEFAULT_PORT, Settings, host_port
from meshinfer.shards.store import Store
from meshinfer.wire.codec import CODECS
from meshinfer.wire.messages import PROTOCOL, Hello

log = logging.getLogger(__name__)

Status = Callable[[], dict[str, Any]]
Show = Callable[[Status], Coroutine[Any, Any, None]]
"""Shows the status until it is cancelled."""

CLOSE_S = 5.0
SWITCH_S = 0.0005
"""How long one thread may keep the others from running Python: stage and event loop wait for each other."""


async def run_agent(folders: Folders, settings: Settings, show: Show | None = None) -> None:
    """Run an agent until it is told to stop. Raises InputError and its kinds for what cannot be started."""
    _check(settings)
    sys.setswitchinterval(SWITCH_S)
    stop = asyncio.Event()
    with only_agent(folders), on_stop(stop.set):
        code = settings.join
        while True:
            identity = await asyncio.to_thread(load_identity, folders, code)
            code = None
            again = await _run_once(folders, settings, identity, stop, show)
            if not again:
                return
            forget_node(folders)
            log.warning("another machine has the key of this node, from a copied home: this one becomes a new node")


async def _run_once(
    folders: Folders, settings: Settings, identity: Identity, stop: asyncio.Event, show: Show | None
) -> bool:
    """One life of a node; whether it has to go on as another one."""
    listener = Listener.bind(settings.port)
    me = Peer(identity.id, settings.name, secrets.randbits(62), ())
    capacity = await asyncio.to_thread(Capacity, settings)
    agent = Agent(settings, Store(folders), capacity, me)
    twins: list[Peer] = []

    def twin_found(twin: Peer) -> None:
        twins.append(twin)
        stop.set()

    broken: list[BaseException] = []

    def failed(error: BaseException) -> None:
        broken.append(error)
        stop.set()

    agent.on_twin, agent.on_failure = twin_found, failed
    about: dict[str, Any] = {
        "version": __version__,
        "mesh": identity.mesh_fingerprint,
        "join_code": identity.join_code,
        "port": listener.port,
        "home": str(folders.home),
    }

    mdns: Mdns | None = None

    def status() -> dict[str, Any]:
        return status_of(agent, about | {"other_meshes": mdns.other_meshes if mdns else None})

    token = new_token()
    async with AsyncExitStack() as closing:
        guard = Guard(api_key=settings.api_key, token=token)
        routes = admin_routes(agent, status, stop.set)
        api = await serve(agent.origin, settings.api_host, settings.api_port, guard, routes)
        # In this order, last first: answers that run may end, the others hear of it, then what works is closed.
        closing.push_async_callback(agent.close)
        links = await _linked(closing, agent, identity, listener, settings)
        closing.push_async_callback(api.close)
        about["api"] = api_url(settings.api_host, api.port)
        await agent.start(links)
        for peer in settings.peers:
            links.hint([Address(*host_port(peer, DEFAULT_PORT))])
        write_runtime(
            folders, Runtime(os.getpid(), about["api"], listener.port, settings.name, token, settings.api_key)
        )
        if settings.discovery:
            mdns = await _discover(closing, agent, links, identity, listener.port, settings)
        log.info("node %s, API %s, port %d for other nodes", settings.name, about["api"], listener.port)
        log.info("join code for other machines: meshinfer up --join %s", identity.join_code)
        if show is not None:
            showing = _started(show(status), "show the status")
            closing.push_async_callback(_cancelled, showing)
        await stop.wait()
        log.info("stopping")
    if broken:
        raise MeshinferError(f"the agent cannot go on: {broken[0]!r} (a fault of meshinfer; the log shows where)")
    if twins:
        stop.clear()
    return bool(twins)


async def _linked(
    closing: AsyncExitStack, agent: Agent, identity: Identity, listener: Listener, settings: Settings
) -> Links:
    hello = Hello(
        protocol=PROTOCOL,
        peer=agent.me,
        mesh=identity.mesh_fingerprint,
        versions={"meshinfer": __version__, "openvino": version("openvino")},
        codecs=CODECS,
    )
    links = Links(hello, tls_contexts(identity), agent)
    closing.push_async_callback(links.close, "the node stops")
    interfaces = choose(read_interfaces(), settings.interfaces)
    addresses = [Address(str(host), listener.port) for interface in interfaces for host in interface.addresses]
    await links.open(listener, tuple(addresses[:16]))
    return links


async def _discover(
    closing: AsyncExitStack, agent: Agent, links: Links, identity: Identity, port: int, settings: Settings
) -> Mdns:
    def found(advert: Advert) -> None:
        addresses = [Address(host, advert.port) for host in advert.addresses]
        links.hint(addresses, None if advert.id == identity.id else advert.id)

    memory = await asyncio.to_thread(agent.capacity.memory_bytes)
    advert = Advert(
        PROTOCOL,
        identity.mesh_fingerprint,
        identity.id,
        settings.name,
        port,
        addresses=(),
        memory_bytes=memory,
        devices=(agent.capacity.device.name,),
    )
    mdns = Mdns(advert, found, lambda node: links.happen(AdvertWithdrawn(node)), settings.interfaces)
    running = _started(mdns.run(), "mdns")
    closing.push_async_callback(_cancelled, running)
    closing.push_async_callback(mdns.close)
    return mdns


def _check(settings: Settings) -> None:
    """Raise InputError unless the interfaces exist."""
    choose(read_interfaces(), settings.interfaces)


def _started(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that says so when it fails."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %r", name, error, exc_info=error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task], timeout=CLOSE_S)
