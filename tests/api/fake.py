"""A service that gives a fixed answer, and what tests need to talk to a server in front of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from meshinfer.api.guard import Guard
from meshinfer.api.handlers import Limits
from meshinfer.api.server import ApiServer, serve
from meshinfer.api.service import Job, ModelCard, Piece, Readiness

CARD = ModelCard("smollm2-135m", 1_700_000_000, 8192)
HELLO = (Piece("Hel"), Piece("lo"), Piece("", "stop"))
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
FAST = Limits(waiting_s=0.05, body_s=0.5, stalled_s=0.5, close_s=0.2)
"""Limits that a test does not wait for."""


@dataclass
class FakeAnswer:
    """The pieces of a service, and how often it was left."""

    service: FakeService
    prompt_tokens: int = 3
    completion_tokens: int = 0
    trace: tuple[str, ...] = ()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for piece in self.service.pieces:
            if piece is None:
                self.service.waiting.set()
                await asyncio.wait_for(self.service.released.wait(), 20)
                continue
            self.trace = ("anna:0-9", "bert:9-17")
            self.completion_tokens += 1
            yield piece
        if self.service.breaks_with is not None:
            raise self.service.breaks_with


@dataclass
class FakeService:
    """Answers with `pieces`, None among them being a wait for `released`, and then `breaks_with`."""

    pieces: tuple[Piece | None, ...] = HELLO
    breaks_with: BaseException | None = None
    refuses_with: Exception | None = None
    ready: Readiness = field(default_factory=lambda: Readiness(True, "", 0))
    jobs: list[Job] = field(default_factory=list)
    open: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def models(self) -> tuple[ModelCard, ...]:
        return (CARD,)

    def readiness(self) -> Readiness:
        return self.ready

    @asynccontextmanager
    async def answer(self, job: Job) -> AsyncIterator[FakeAnswer]:
        self.jobs.append(job)
        if self.refuses_with is not None:
            raise self.refuses_with
        self.open += 1
        try:
            yield FakeAnswer(self)
        finally:
            await asyncio.sleep(0)  # whoever leaves lets this end
            self.open -= 1
            self.left.set()


@dataclass(frozen=True)
class Reply:
    """A response that has been read."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, comments left out."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


@dataclass
class Client:
    """Talks to one server."""

    server: ApiServer
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def ask(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, self.url + path, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def chat(self, **fields: Any) -> Reply:
        return await self.ask("POST", "/v1/chat/completions", json=CHAT | fields)

    async def raw(self, data: bytes) -> bytes:
        """Everything that comes back for these bytes, until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()


def with_server(
    test: Callable[[Client, FakeService], Coroutine[Any, Any, None]],
    guard: Guard | None = None,
    extra_routes: Any = (),
    limits: Limits = FAST,
    **service: Any,
) -> None:
    """Run a test against a server on a free port."""

    async def run() -> None:
        fake = FakeService(**service)
        server = await serve(fake, "127.0.0.1", 0, guard or Guard(), extra_routes, limits)
        try:
            async with aiohttp.ClientSession() as session:
                await test(Client(server, session), fake)
        finally:
            await server.close()
        assert fake.open == 0

    asyncio.run(run())


def raw_post(path: str, content: Any, *headers: str) -> bytes:
    """A POST request as bytes."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
