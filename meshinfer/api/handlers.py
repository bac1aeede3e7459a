"""The endpoints: read a request, run it, send the answer; whatever goes wrong becomes a problem for the client."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from meshinfer import __version__
from meshinfer.api import render, schema
from meshinfer.api.problems import SERVER, Problem, RequestError, problem_of
from meshinfer.api.service import Answer, FinishReason, Piece, Service
from meshinfer.errors import MeshinferError, RequestLostError, UnknownModelError

logger = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take, and how often a waiting one hears of us."""

    body_bytes: int = 4 << 20
    body_s: float = 30
    idle_s: float = 75
    stalled_s: float = 120
    """How long a client may take nothing of its stream before it is given up."""
    waiting_s: float = 10
    close_s: float = 5


class _ClientGoneError(Exception):
    """Nobody reads the stream any more."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """The endpoints of one service."""

    service: Service
    limits: Limits

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat, expect_handler=_expect_nothing_yet),
            web.post("/v1/completions", self.completion, expect_handler=_expect_nothing_yet),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:.+}", self.model),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, schema.chat_call)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, schema.completion_call)

    async def models(self, request: web.Request) -> web.Response:
        return _json(render.models(self.service.models()))

    async def model(self, request: web.Request) -> web.Response:
        name, cards = request.match_info["id"], self.service.models()
        for card in cards:
            if card.id == name:
                return _json(render.model(card))
        raise UnknownModelError(f"no model '{name}' here (have: {', '.join(card.id for card in cards) or 'none yet'})")

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "version": __version__})

    async def ready(self, request: web.Request) -> web.Response:
        status, content, headers = render.readiness(self.service.readiness())
        return _json(content, status, headers)

    async def _answer(self, request: web.Request, read: Callable[[bytes, int], schema.Call]) -> web.StreamResponse:
        call = read(await _body(request, self.limits), secrets.randbits(63))
        form = render.Form(
            kind="text" if call.job.messages is None else "chat",
            request_id=request[REQUEST_ID],
            created=int(time.time()),
            model=call.job.model or next((card.id for card in self.service.models()), ""),
            include_usage=call.include_usage,
        )
        async with self.service.answer(call.job) as answer:
            if not call.stream:
                text, finish_reason = await _all(answer)
                body = form.whole(text, finish_reason, render.Usage.of(answer))
                return _response(body, 200, render.trace_header(answer.trace))
            stream = _Stream(request, form, answer, self.limits)
            await stream.run()
        return stream.end()


class _Stream:
    """One answer as server-sent events.

    Nothing is sent before the first piece is there or `waiting_s` is over: an answer that fails at once still gets
    the status of its error.
    """

    def __init__(self, request: web.Request, form: render.Form, answer: Answer, limits: Limits) -> None:
        self._request, self._form, self._answer, self._limits = request, form, answer, limits
        self._response: web.StreamResponse | None = None
        self._gone = False

    async def run(self) -> None:
        """Send the answer, or as much of it as the client takes. Raises what the answer raises before it begins."""
        try:
            await self._relay()
        except _ClientGoneError as error:
            logger.debug("request %s: %s", self._form.request_id, error)
            self._gone = True

    def end(self) -> web.StreamResponse:
        """The response that was sent. A client that took it no more is cut off: that cancels this very request."""
        if self._gone and self._request.transport is not None:
            self._request.transport.abort()
        assert self._response is not None
        return self._response

    async def _relay(self) -> None:
        try:
            async with aclosing(_paced(aiter(self._answer), self._limits.waiting_s)) as pieces:
                finish_reason: FinishReason | None = None
                async for piece in pieces:
                    if piece is None:
                        await self._send(render.WAITING)
                    else:
                        finish_reason = piece.finish_reason or finish_reason
                        await self._send(self._form.text(piece.text) if piece.text else b"")
            closing = self._form.closing(_reason(finish_reason), render.Usage.of(self._answer))
            await self._send(closing)
        except _ClientGoneError:
            raise
        except Exception as error:
            if self._response is None:
                raise
            await self._send(render.failure(problem_for(error, self._form.request_id)))

    async def _send(self, data: bytes) -> None:
        """Wait until the client has room for it; raises _ClientGoneError."""
        try:
            async with asyncio.timeout(self._limits.stalled_s):
                if self._response is None:
                    self._response = await self._begin()
                if data:
                    await self._response.write(data)
        except (ConnectionError, TimeoutError) as error:
            raise _ClientGoneError("the client left" if isinstance(error, ConnectionError) else "it stalled") from error

    async def _begin(self) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**headers, **render.trace_header(self._answer.trace)})
        self._response = response
        await response.prepare(self._request)
        if opening := self._form.opening():
            await response.write(opening)
        return response


async def _paced(pieces: AsyncIterator[Piece], every_s: float) -> AsyncGenerator[Piece | None]:
    """The pieces as they come, and None as often as none has come for `every_s`."""
    following: asyncio.Task[Piece | None] | None = None
    try:
        while True:
            following = asyncio.create_task(_next(pieces), name="next piece of an answer")
            while not (await asyncio.wait({following}, timeout=every_s))[0]:
                yield None
            piece = following.result()
            if piece is None:
                return
            yield piece
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait({following})


async def _next(pieces: AsyncIterator[Piece]) -> Piece | None:
    """The next piece, or None at the end. That the work was cancelled, and not this task, is an error like others."""
    try:
        return await anext(pieces, None)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RequestLostError("the work on this answer was cancelled") from error


async def _all(answer: Answer) -> tuple[str, FinishReason]:
    texts, finish_reason, pieces = [], None, aiter(answer)
    while (piece := await _next(pieces)) is not None:
        texts.append(piece.text)
        finish_reason = piece.finish_reason or finish_reason
    return "".join(texts), _reason(finish_reason)


def _reason(finish_reason: FinishReason | None) -> FinishReason:
    if finish_reason is None:
        raise RequestLostError("the answer broke off")
    return finish_reason


async def _expect_nothing_yet(request: web.Request) -> None:
    """`100 Continue` is sent when the body is wanted, not before the request has been looked at."""


async def _body(request: web.Request, limits: Limits) -> bytes:
    try:
        async with asyncio.timeout(limits.body_s):
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}") from error


def problem_for(error: Exception, request_id: str) -> Problem:
    """The problem to tell the client; what nobody foresaw is logged, and only its number is told."""
    if isinstance(error, MeshinferError):
        return problem_of(error)
    logger.error("request %s failed", request_id, exc_info=error)
    return Problem(500, f"an error inside of meshinfer; its log says more about request {request_id}", SERVER)


def problem_response(problem: Problem) -> web.Response:
    """A problem as a response."""
    return _response(problem.body, problem.status, problem.headers)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return _response(msgspec.json.encode(content), status, headers or {})


def _response(body: bytes, status: int, headers: Mapping[str, str]) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
