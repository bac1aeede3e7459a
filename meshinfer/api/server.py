"""The HTTP server of an agent: guards, request ids, errors as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from meshinfer.api.guard import Guard
from meshinfer.api.handlers import REQUEST_ID, Handlers, Limits, problem_for, problem_response
from meshinfer.api.problems import Problem
from meshinfer.api.service import Service
from meshinfer.errors import InputError

logger = logging.getLogger(__name__)

_DEFAULT_LIMITS = Limits()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """A server that listens."""

    def __init__(self, runner: web.AppRunner, running: set[asyncio.Task[Any]], close_s: float) -> None:
        self._runner, self._running, self._close_s = runner, running, close_s
        self.port: int = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening, give running requests `Limits.close_s` to end, then cancel them."""
        for site in list(self._runner.sites):
            await site.stop()
        await self._wait()
        for task in self._running:
            task.cancel()
        await self._wait()
        for task in self._running:
            logger.warning("a request does not end: %r", task)
        await self._runner.cleanup()

    async def _wait(self) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=self._close_s)


async def serve(
    service: Service,
    host: str,
    port: int,
    guard: Guard,
    extra_routes: Iterable[web.RouteDef] = (),
    limits: Limits = _DEFAULT_LIMITS,
) -> ApiServer:
    """Listen on `host`; port 0 takes any that is free. Raises InputError where that cannot be.

    `extra_routes` are guarded like all others: below `/mesh/` they need the token of `guard`.
    """
    running: set[asyncio.Task[Any]] = set()
    app = _application(Handlers(service, limits), guard.listening_on(host), extra_routes, running)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,  # a client that leaves ends its request, also while no token comes
        keepalive_timeout=limits.idle_s,
        shutdown_timeout=0.1,  # `ApiServer.close` has waited
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise InputError(_why_not(host, port, error)) from error
    return ApiServer(runner, running, limits.close_s)


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --api HOST:PORT"
    return f"cannot listen on port {port} of {host}: {error.strerror or error}; choose another with --api HOST:PORT"


def _application(
    handlers: Handlers, guard: Guard, extra_routes: Iterable[web.RouteDef], running: set[asyncio.Task[Any]]
) -> web.Application:
    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        task.add_done_callback(running.discard)
        return await handler(request)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        _name(request)
        resource = request.match_info.route.resource
        refusal = guard.refusal(request.path if resource is None else resource.canonical, request.headers)
        if refusal is not None:
            return problem_response(refusal)
        try:
            if (request.content_length or 0) > handlers.limits.body_bytes:
                raise web.HTTPRequestEntityTooLarge(handlers.limits.body_bytes)
            return await handler(request)
        except web.HTTPException as error:
            return _of_http(request, error, handlers.limits)
        except Exception as error:
            return problem_response(problem_for(error, _name(request)))

    async def signed(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Request-Id"] = _name(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Server"] = "meshinfer"

    app = web.Application(middlewares=[counted, guarded], client_max_size=handlers.limits.body_bytes)
    app.on_response_prepare.append(signed)
    app.add_routes([*handlers.routes(), *extra_routes])
    return app


def _name(request: web.Request) -> str:
    """The id of a request, drawn when it is first asked for."""
    if REQUEST_ID not in request:
        request[REQUEST_ID] = secrets.token_hex(12)
    return request[REQUEST_ID]


def _of_http(request: web.Request, error: web.HTTPException, limits: Limits) -> web.StreamResponse:
    """aiohttp's own errors as OpenAI's; redirections stay what they are."""
    if error.status < 400:
        raise error
    message = f"{error.reason} at {request.method} {request.path}"
    match error:
        case web.HTTPMethodNotAllowed():
            message = f"{request.path} answers to {', '.join(sorted(error.allowed_methods))}, not to {request.method}"
        case web.HTTPNotFound():
            message = f"there is nothing at {request.path}"
        case web.HTTPRequestEntityTooLarge():
            message = f"the body is larger than the {limits.body_bytes} bytes that are allowed"
        case web.HTTPRequestTimeout():
            message = f"the body did not arrive within {limits.body_s:g} s"
        case _:
            pass
    response = problem_response(Problem(error.status, message))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
