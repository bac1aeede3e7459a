"""Multicast DNS: says that this node is there, and hears of others (RFC 6762, RFC 6763)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from zeroconf import DNSQuestionType, ServiceStateChange, Zeroconf
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from meshinfer.discovery.addresses import Interface, choose, rank, sources
from meshinfer.discovery.interfaces import read_interfaces
from meshinfer.discovery.records import MOST_ADDRESSES, Advert, parse, txt
from meshinfer.errors import InputError
from meshinfer.types import NodeId

SERVICE = "_meshinfer._tcp.local."
RETRY_S = 10.0
CLOSE_S = 2.0
_RESOLVE_MS, _RESOLVE_ATTEMPTS = 3000, 5
_MOST_NAMES, _MOST_MESHES = 1024, 64
_TTL_S = 1200
"""How long others remember a node that went without a word; their resolvers take nothing much shorter."""
_DUAL_STACK = sys.platform in ("linux", "win32")
log = logging.getLogger(__name__)


class Mdns:
    """Advertises one node and hears of others, on the interfaces that are there at the time.

    `on_found` is told of a node of this mesh when it appears or says something new, its likeliest address
    first; `on_gone` when its advert is withdrawn or has run out. A node with this one's own id is found as well
    where another process has it, from a copied home; the advert of this process never is.
    """

    def __init__(
        self,
        advert: Advert,
        on_found: Callable[[Advert], None],
        on_gone: Callable[[NodeId], None],
        wanted: Sequence[str] = (),
        read: Callable[[], Sequence[Interface]] = read_interfaces,
    ) -> None:
        """`wanted`: interfaces by name or address, empty for all that make sense. Fills in the advert's addresses."""
        self._advert, self._on_found, self._on_gone = advert, on_found, on_gone
        self._wanted, self._read = wanted, read
        self._host = f"{advert.id}-{secrets.token_hex(4)}"  # a copied home or a restart is somebody else
        self._instance = f"{self._host}.{SERVICE}"
        self._mine: Sequence[Interface] = ()
        self._chosen: Sequence[Interface] = ()
        self._seen: dict[str, Advert] = {}
        self._strangers: dict[str, set[str]] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._complaint = ""
        self._closing = False
        self._wake, self._ended = asyncio.Event(), asyncio.Event()
        self._ended.set()

    @property
    def other_meshes(self) -> dict[str, int]:
        """How many nodes of other meshes are heard, by the fingerprint of their mesh."""
        return {mesh: len(names) for mesh, names in self._strangers.items() if names}

    async def run(self) -> None:
        """Advertise and listen until `close`; what fails is logged and tried again every `RETRY_S`."""
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as group:
                while not self._closing:
                    try:
                        await self._session(group)
                    except (OSError, ZeroconfError, InputError) as error:
                        self._complain(str(error) or type(error).__name__)
                        await self._pause()
                    if not self._closing:
                        self._forget_all()
        finally:
            self._ended.set()

    def update(self, advert: Advert) -> None:
        """Say something else from now on; the id stays."""
        assert advert.id == self._advert.id
        self._advert = advert
        self._wake.set()

    async def close(self) -> None:
        """Withdraw the advert and end `run`, within `CLOSE_S` or little more."""
        self._closing = True
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                await self._ended.wait()

    async def _session(self, group: asyncio.TaskGroup) -> None:
        """Be there until the interfaces change, or `close`. Raises OSError, ZeroconfError, InputError."""
        self._mine, self._chosen = self._look()
        aio = _open(self._chosen)
        browser: AsyncServiceBrowser | None = None

        def hear(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            self._hear(group, zeroconf, name, state_change)

        try:
            await aio.zeroconf.async_wait_for_start()
            if not aio.zeroconf.engine.senders:
                raise OSError("no network interface takes multicast")
            # Not before the start: a resolver that is cancelled while it waits for that would cancel the start itself.
            # Answers by unicast would reach any one of several processes on this machine.
            browser = AsyncServiceBrowser(aio.zeroconf, SERVICE, handlers=[hear], question_type=DNSQuestionType.QM)
            await self._stay(aio)
        finally:
            if browser is not None:
                await browser.async_cancel()
            for task in self._resolving.values():
                task.cancel()
            self._resolving.clear()
            await _close(aio)

    async def _stay(self, aio: AsyncZeroconf) -> None:
        told = self._advert
        await (await aio.async_register_service(self._info(told), cooperating_responders=True))
        self._complaint = ""
        while not self._closing:
            if self._advert != told:
                told = self._advert
                await (await aio.async_update_service(self._info(told)))
            await self._pause()
            if not self._closing and self._look()[1] != self._chosen:
                log.info("the network interfaces have changed: looking for nodes anew")
                return

    def _complain(self, reason: str) -> None:
        """Say why it does not work, once."""
        if reason != self._complaint:
            log.warning("nodes cannot be found by multicast now: %s", reason)
        self._complaint = reason

    async def _pause(self) -> None:
        """Wait until there is something to do, `RETRY_S` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._wake.wait()
        self._wake.clear()

    def _look(self) -> tuple[Sequence[Interface], Sequence[Interface]]:
        """The interfaces that are there, and those to use."""
        there = self._read()
        chosen = choose(there, self._wanted)
        if not chosen:
            raise OSError("no network interface is up")
        return there, chosen

    def _info(self, advert: Advert) -> AsyncServiceInfo:
        addresses = [address for interface in self._chosen for address in interface.addresses]
        return AsyncServiceInfo(
            SERVICE,
            self._instance,
            port=advert.port,
            properties=txt(advert),
            server=f"{self._host}.local.",
            other_ttl=_TTL_S,
            parsed_addresses=addresses[:MOST_ADDRESSES],
        )

    def _hear(self, group: asyncio.TaskGroup, zeroconf: Zeroconf, name: str, change: ServiceStateChange) -> None:
        if name.lower() == self._instance:
            return
        if (task := self._resolving.pop(name, None)) is not None:
            task.cancel()
        if change is ServiceStateChange.Removed:
            self._forget(name)
        elif len(self._resolving) < _MOST_NAMES and len(self._seen) < _MOST_NAMES:
            task = group.create_task(self._resolve(zeroconf, name), name=f"resolve {name}")
            self._resolving[name] = task

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        """Ask until a name has said what is behind it."""
        for _ in range(_RESOLVE_ATTEMPTS):
            try:
                info = AsyncServiceInfo(SERVICE, name)
                complete = await info.async_request(zeroconf, _RESOLVE_MS, question_type=DNSQuestionType.QM)
            except ZeroconfError:
                return
            if complete:
                self._accept(name, parse(info.properties, info.parsed_scoped_addresses(), info.port))
                return

    def _accept(self, name: str, advert: Advert | None) -> None:
        ranked = () if advert is None else rank(advert.addresses, self._mine, self._chosen)
        if advert is None or not ranked:
            self._forget(name)
        elif advert.mesh != self._advert.mesh:
            self._forget(name)
            if advert.mesh not in self._strangers and len(self._strangers) >= _MOST_MESHES:
                return  # whoever is on this network may say so
            if advert.mesh not in self._strangers:
                log.warning("another mesh (fingerprint %s) is on this network: join it with --join", advert.mesh)
            names = self._strangers.setdefault(advert.mesh, set())
            if len(names) < _MOST_NAMES:
                names.add(name)
        elif self._seen.get(name) != (found := replace(advert, addresses=ranked)):
            self._seen[name] = found
            self._on_found(found)

    def _forget(self, name: str) -> None:
        for names in self._strangers.values():
            names.discard(name)
        advert = self._seen.pop(name, None)
        if advert is not None and all(other.id != advert.id for other in self._seen.values()):
            self._on_gone(advert.id)

    def _forget_all(self) -> None:
        for name in list(self._seen):
            self._forget(name)
        self._strangers = {mesh: set() for mesh in self._strangers}


def _open(interfaces: Sequence[Interface]) -> AsyncZeroconf:
    try:
        return AsyncZeroconf(interfaces=sources(interfaces, _DUAL_STACK))
    except RuntimeError as error:  # an address that went while it was being opened
        raise OSError(str(error)) from error


async def _close(aio: AsyncZeroconf) -> None:
    """Withdraw what was advertised and close the sockets, within `CLOSE_S`."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await aio.async_close()
    except TimeoutError:
        log.warning("multicast DNS did not end within %g s", CLOSE_S)
