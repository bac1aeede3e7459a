"""The port for other nodes: bound first, because it is announced, and served once the node is ready to greet."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from meshinfer.errors import InputError
from meshinfer.settings import DEFAULT_PORT

log = logging.getLogger(__name__)

_TRIED = 40
HANDSHAKE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0

Accept = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PortTakenError(InputError):
    """A port that another program listens on."""


class Listener:
    """Sockets of both families on one port."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._servers: list[asyncio.Server] = []
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    @classmethod
    def bind(cls, port: int | None) -> Listener:
        """Listen on `port`; on the usual one or the next free one where it is None. Raises PortTakenError."""
        if port is not None:
            return cls(_bind(port))
        for candidate in range(DEFAULT_PORT, DEFAULT_PORT + _TRIED):
            try:
                return cls(_bind(candidate))
            except PortTakenError:
                continue
        return cls(_bind(0))

    async def accept(self, accept: Accept, tls: ssl.SSLContext) -> None:
        """Serve `/link` to nodes of this mesh. Whoever has no certificate of it gets no answer at all."""
        application = web.Application(client_max_size=1024)
        application.router.add_get("/link", accept)
        self._runner = web.AppRunner(
            application, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_TIMEOUT_S, keepalive_timeout=5.0
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        for bound in self._sockets:
            self._servers.append(
                await loop.create_server(
                    server,
                    sock=bound,
                    ssl=tls,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                    ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
                )
            )

    async def close(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.close()
        if self._runner:
            await self._runner.cleanup()
        for bound in self._sockets:
            bound.close()


def _bind(port: int) -> list[socket.socket]:
    """Sockets for IPv4 and, where there is any, IPv6 on one port."""
    sockets: list[socket.socket] = []
    try:
        sockets.append(_listening(socket.AF_INET, "0.0.0.0", port))
        port = sockets[0].getsockname()[1]
        if socket.has_ipv6:
            try:
                sockets.append(_listening(socket.AF_INET6, "::", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                log.info("no IPv6 here: %s", error.strerror)
    except OSError as error:
        for bound in sockets:
            bound.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is in use" if error.errno == errno.EADDRINUSE else "may not be used by this user"
            raise PortTakenError(f"port {port} for other nodes {why}: choose another with --port") from error
        raise InputError(f"cannot listen on port {port}: {error.strerror}") from error
    return sockets


def _listening(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows, where SO_REUSEADDR lets two programs have one port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound
