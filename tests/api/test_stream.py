"""Streams over real sockets: events, waiting, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from meshinfer.api.handlers import Limits
from meshinfer.api.service import Piece
from meshinfer.errors import RequestLostError
from tests.api.fake import CHAT, HELLO, Client, FakeService, raw_post, with_server

PATH = "/v1/chat/completions"
PATIENT = Limits(waiting_s=20, close_s=20)
"""Nothing in a test ends because one of these is over."""


def test_a_streamed_chat() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat(stream=True, stream_options={"include_usage": True})
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["X-Meshinfer-Trace"] == "anna:0-9, bert:9-17"
        *chunks, usage, done = reply.events
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "Hel"},
            {"content": "lo"},
            {},
        ]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert done == "data: [DONE]"
        assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{reply.headers['X-Request-Id']}"}

    with_server(test)


def test_a_streamed_completion() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.ask("POST", "/v1/completions", json={"prompt": "a", "stream": True})
        *chunks, done = reply.events
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
        assert done == "data: [DONE]"

    with_server(test)


@pytest.mark.parametrize("error", [RequestLostError("the mesh fell apart"), ZeroDivisionError(), None])
def test_a_stream_that_breaks_off_ends_with_an_error(error: Exception | None) -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat(stream=True)
        assert reply.status == 200
        *_, text, failure = reply.events
        assert text["choices"][0]["delta"] == {"content": "Hel"}
        assert failure["error"]["type"] == "server_error"
        assert b"[DONE]" not in reply.body

    with_server(test, pieces=(Piece("Hel"),), breaks_with=error)


@pytest.mark.parametrize("pieces", [(None, *HELLO), (HELLO[0], None, *HELLO[1:])])
def test_a_client_that_waits_hears_that_it_is_not_forgotten(pieces: Any) -> None:
    async def test(client: Client, service: FakeService) -> None:
        async with client.session.post(client.url + PATH, json=CHAT | {"stream": True}) as response:
            text = b""
            while text.count(b": waiting\n\n") < 2:
                text += await asyncio.wait_for(response.content.readany(), 20)
            service.released.set()
            text += await response.read()
        assert text.endswith(b"data: [DONE]\n\n")
        assert text.count(b"Hel") == 1

    with_server(test, pieces=pieces)


def test_pieces_are_sent_when_they_come() -> None:
    async def test(client: Client, service: FakeService) -> None:
        async with client.session.post(client.url + PATH, json=CHAT | {"stream": True}) as response:
            text = b""
            while b"Hel" not in text:
                text += await asyncio.wait_for(response.content.readany(), 20)
            assert not service.released.is_set()
            service.released.set()
            await response.read()

    with_server(test, pieces=(HELLO[0], None, *HELLO[1:]), limits=PATIENT)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pieces", [(None, *HELLO), (HELLO[0], None, *HELLO[1:])])
def test_a_client_that_leaves_ends_its_answer(stream: bool, pieces: Any, reset: bool) -> None:
    async def test(client: Client, service: FakeService) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        writer.write(raw_post(PATH, CHAT | {"stream": stream}))
        await asyncio.wait_for(service.waiting.wait(), 20)
        assert service.open == 1
        if reset:
            writer.transport.abort()
        else:
            writer.close()
        await asyncio.wait_for(service.left.wait(), 20)
        assert service.open == 0

    with_server(test, pieces=pieces, limits=PATIENT)


def test_a_client_that_does_not_read_is_waited_for_and_then_given_up() -> None:
    produced = 0

    class Endless(tuple[Piece, ...]):
        def __iter__(self) -> Any:
            nonlocal produced
            while True:
                produced += 1
                yield Piece("x" * 10_000)

    async def test(client: Client, service: FakeService) -> None:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", client.server.port))
            slow.sendall(raw_post(PATH, CHAT | {"stream": True}))
            await asyncio.wait_for(service.left.wait(), 20)
        assert service.open == 0
        assert produced * 10_000 < 16 << 20, "what nobody reads is not piled up"

    with_server(test, pieces=Endless())
