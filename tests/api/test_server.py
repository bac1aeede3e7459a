"""The server over real sockets: answers that are not streamed, errors, guards, closing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import logging
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings

from meshinfer import __version__
from meshinfer.api.guard import TOKEN_HEADER, Guard
from meshinfer.api.handlers import Limits
from meshinfer.api.server import serve
from meshinfer.api.service import Piece, Readiness
from meshinfer.errors import (
    BusyError,
    ContextLengthError,
    InputError,
    MeshinferError,
    NotReadyError,
    RequestLostError,
    UnknownModelError,
)
from tests.api.fake import CHAT, FAST, HELLO, Client, FakeService, raw_post, with_server
from tests.api.test_schema import BODIES

CHAT_PATH, PLAIN_PATH = "/v1/chat/completions", "/v1/completions"


def test_a_chat() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat(model="smollm2-135m", temperature=0.5, stop="\n")
        assert reply.status == 200
        assert reply.headers["Content-Type"].startswith("application/json")
        assert reply.headers["X-Meshinfer-Trace"] == "anna:0-9, bert:9-17"
        assert reply.json["choices"][0]["message"]["content"] == "Hello"
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        assert reply.json["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert reply.json["model"] == "smollm2-135m"
        assert reply.json["id"] == f"chatcmpl-{reply.headers['X-Request-Id']}"
        (job,) = service.jobs
        assert (job.model, job.sampling.temperature, job.stop) == ("smollm2-135m", 0.5, ("\n",))

    with_server(test)


def test_a_completion() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.ask("POST", PLAIN_PATH, json={"prompt": [1, 2, 3], "max_tokens": 2})
        assert reply.status == 200
        assert reply.json["choices"][0]["text"] == "Hello"
        assert reply.json["model"] == "smollm2-135m"
        assert service.jobs[0].prompt == (1, 2, 3)

    with_server(test)


def test_a_seed_is_drawn_for_each_request_that_brings_none() -> None:
    async def test(client: Client, service: FakeService) -> None:
        for _ in range(3):
            await client.chat()
        assert len({job.sampling.seed for job in service.jobs}) == 3

    with_server(test)


def test_models() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.ask("GET", "/v1/models")
        assert [card["id"] for card in reply.json["data"]] == ["smollm2-135m"]
        assert (await client.ask("GET", "/v1/models/smollm2-135m")).json == reply.json["data"][0]
        for name in ("other", "org/other"):
            missing = await client.ask("GET", f"/v1/models/{name}")
            assert (missing.status, missing.error["code"]) == (404, "model_not_found")

    with_server(test)


def test_health_says_nothing_about_readiness() -> None:
    async def test(client: Client, service: FakeService) -> None:
        health = await client.ask("GET", "/health")
        assert (health.status, health.json) == (200, {"status": "ok", "version": __version__})
        ready = await client.ask("GET", "/ready")
        assert (ready.status, ready.headers["Retry-After"]) == (503, "3")
        assert ready.json == {"ready": False, "stage": "fetching shards 40 %"}
        service.ready = Readiness(True, "", 0)
        ready = await client.ask("GET", "/ready")
        assert (ready.status, ready.json) == (200, {"ready": True})

    with_server(test, ready=Readiness(False, "fetching shards 40 %", 3))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnknownModelError("no model 'x'"), 404, "model_not_found"),
        (NotReadyError("not yet", 4), 503, "not_ready"),
        (BusyError("later", 4), 429, "rate_limit_exceeded"),
        (InputError("cannot be"), 400, None),
        (ContextLengthError(9000, 8192), 400, "context_length_exceeded"),
        (MeshinferError("broken"), 500, None),
    ],
)
def test_what_the_service_refuses(error: MeshinferError, status: int, code: str | None, stream: bool) -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat(stream=stream)
        assert (reply.status, reply.error["code"], reply.error["message"]) == (status, code, str(error))
        assert reply.headers.get("Retry-After") == ("4" if isinstance(error, NotReadyError) else None)

    with_server(test, refuses_with=error)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_off_before_it_begins_has_its_status(stream: bool) -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat(stream=stream)
        assert (reply.status, reply.error["code"]) == (500, "request_lost")

    with_server(test, pieces=(), breaks_with=RequestLostError("the mesh fell apart"))


@pytest.mark.parametrize("pieces", [(), (Piece("Hel"),)])
@pytest.mark.parametrize("error", [None, asyncio.CancelledError()])
def test_half_an_answer_is_never_taken_for_a_whole_one(pieces: Any, error: BaseException | None) -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat()
        assert (reply.status, reply.error["code"]) == (500, "request_lost")

    with_server(test, pieces=pieces, breaks_with=error)


def test_what_nobody_foresaw_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat()
        assert reply.status == 500
        assert reply.error["type"] == "server_error"
        assert reply.headers["X-Request-Id"] in reply.error["message"]
        assert "secret" not in reply.error["message"]
        assert (await client.ask("GET", "/health")).status == 200

    with_server(test, breaks_with=ZeroDivisionError("secret"))
    assert "ZeroDivisionError: secret" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/nowhere", {}, 404),
        ("GET", "/v1", {}, 404),
        ("GET", "/%ff", {}, 404),
        ("GET", CHAT_PATH, {}, 405),
        ("POST", "/v1/models", {}, 405),
        ("DELETE", "/v1/models/smollm2-135m", {}, 405),
        ("OPTIONS", CHAT_PATH, {}, 405),
        ("POST", CHAT_PATH, {"data": b"no"}, 400),
        ("POST", CHAT_PATH, {"data": b""}, 400),
        ("POST", CHAT_PATH, {"json": []}, 400),
        ("POST", CHAT_PATH, {"json": {"messages": []}}, 400),
        ("POST", CHAT_PATH, {"data": b"no gzip", "headers": {"Content-Encoding": "gzip"}}, 400),
        ("POST", CHAT_PATH, {"data": gzip.compress(bytes(5 << 20)), "headers": {"Content-Encoding": "gzip"}}, 413),
        ("POST", CHAT_PATH, {"data": io.BytesIO(bytes((4 << 20) + 1))}, 413),
        ("POST", PLAIN_PATH, {"json": {"prompt": ["a", "b"]}}, 400),
        ("GET", "/health", {"headers": {"Host": "evil.example"}}, 403),
        ("GET", "/health", {"headers": {"Origin": "https://evil.example"}}, 403),
        ("GET", "/health", {"headers": {"Expect": "nonsense"}}, 417),
    ],
)
def test_every_error_is_openais_object(method: str, path: str, options: dict[str, Any], status: int) -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.ask(method, path, **options)
        assert reply.status == status
        assert len(reply.headers["X-Request-Id"]) == 24
        assert reply.headers["Server"] == "meshinfer"
        assert "Access-Control-Allow-Origin" not in reply.headers
        assert (status == 405) == ("Allow" in reply.headers)
        if status != 417:
            assert reply.error["type"] == "invalid_request_error"
            assert reply.error["message"]
        assert service.jobs == []

    with_server(test)


def test_a_field_at_fault_is_named() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reply = await client.chat(n=2)
        assert (reply.status, reply.error["param"]) == (400, "n")
        assert (await client.chat(temperature="hot")).error["param"] == "temperature"

    with_server(test)


def test_a_body_that_is_too_large_is_not_waited_for() -> None:
    async def test(client: Client, service: FakeService) -> None:
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999\r\n"
        for more in ("", "Expect: 100-continue\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
            writer.write(f"{head}{more}\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            writer.close()

    with_server(test)


def test_a_body_without_a_length_is_cut_off() -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield bytes(1 << 20)

    async def test(client: Client, service: FakeService) -> None:
        with contextlib.suppress(aiohttp.ClientError):  # where the answer came before all was sent
            assert (await client.ask("POST", CHAT_PATH, data=endless())).status == 413
        assert service.jobs == []

    with_server(test, limits=Limits(body_bytes=1 << 20))


def test_a_body_is_asked_for_when_it_is_wanted() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        head, _, body = raw_post(CHAT_PATH, CHAT, "Expect: 100-continue", "Connection: close").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        writer.write(head.replace(b"127.0.0.1", b"evil.example") + b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
        writer.close()

    with_server(test)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def test(client: Client, service: FakeService) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        writer.write(raw_post(CHAT_PATH, CHAT)[:-3])
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()

    with_server(test)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 2000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        raw_post(CHAT_PATH, b"zz\r\n", "Transfer-Encoding: chunked"),
    ],
)
def test_bad_http_is_refused_and_harms_nobody(data: bytes) -> None:
    async def test(client: Client, service: FakeService) -> None:
        assert (await client.raw(data)).startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert (await client.ask("GET", "/health")).status == 200
        assert service.jobs == []

    with_server(test)


def test_a_connection_that_asks_nothing_is_closed() -> None:
    async def test(client: Client, service: FakeService) -> None:
        assert await client.raw(b"GET /health HTTP/1.1\r\nHost: 127") == b""

    with_server(test, limits=Limits(idle_s=0.2))


def test_a_key_is_asked_for() -> None:
    async def test(client: Client, service: FakeService) -> None:
        for path in ("/v1/models", "/nowhere"):
            reply = await client.ask("GET", path)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert (await client.chat()).status == 401
        key = {"Authorization": "Bearer secret"}
        assert (await client.ask("GET", "/v1/models", headers=key)).status == 200
        assert (await client.ask("GET", "/health")).status == 200

    with_server(test, Guard(api_key="secret"))


async def _leave(request: web.Request) -> web.Response:
    return web.json_response({"left": True})


async def _break(request: web.Request) -> web.Response:
    raise InputError("nothing to leave")


def test_routes_of_the_agent_need_its_token_and_fail_like_the_others() -> None:
    async def test(client: Client, service: FakeService) -> None:
        token = {TOKEN_HEADER: "token"}
        for path in ("/mesh/leave", "/mesh/%6ceave", "/%6desh/leave", "/mesh/nodes/7"):
            assert (await client.ask("POST", path)).status == 401, path
            assert (await client.ask("POST", path, headers=token)).status == 200, path
        reply = await client.ask("POST", "/mesh/break", headers=token)
        assert (reply.status, reply.error["message"]) == (400, "nothing to leave")

    routes = [web.post("/mesh/leave", _leave), web.post("/mesh/nodes/{id}", _leave), web.post("/mesh/break", _break)]
    with_server(test, Guard(token="token"), extra_routes=routes)


def test_a_port_that_is_taken() -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(InputError) as caught:
                await serve(FakeService(), "127.0.0.1", port, Guard())
            assert str(caught.value) == f"port {port} on 127.0.0.1 is in use: choose another with --api HOST:PORT"

    asyncio.run(run())


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_here(host: str) -> None:
    with pytest.raises(InputError, match=f"cannot listen on port 0 of {host}"):
        asyncio.run(serve(FakeService(), host, 0, Guard(api_key="k")))


def test_an_open_api_without_a_key_does_not_start() -> None:
    with pytest.raises(InputError, match="needs an API key"):
        asyncio.run(serve(FakeService(), "0.0.0.0", 0, Guard()))


def test_closing_lets_answers_end() -> None:
    async def test(client: Client, service: FakeService) -> None:
        chat = asyncio.create_task(client.chat())
        await service.waiting.wait()
        closing = asyncio.create_task(client.server.close())
        await asyncio.sleep(0)
        service.released.set()
        assert (await chat).status == 200
        await closing

    with_server(test, pieces=(None, *HELLO), limits=Limits(close_s=20))


def test_closing_cancels_answers_that_do_not_end() -> None:
    async def test(client: Client, service: FakeService) -> None:
        chat = asyncio.create_task(client.chat())
        await service.waiting.wait()
        await client.server.close()
        assert service.open == 0
        with pytest.raises(aiohttp.ClientError):
            await chat
        with pytest.raises(aiohttp.ClientError):
            await client.ask("GET", "/health")

    with_server(test, pieces=(None, *HELLO))


def test_parallel_answers_stay_apart() -> None:
    async def test(client: Client, service: FakeService) -> None:
        replies = await asyncio.gather(*(client.chat(model=f"m{index}", stream=index % 2 == 0) for index in range(20)))
        for index, reply in enumerate(replies):
            answer = reply.json if index % 2 else reply.events[0]
            assert answer["model"] == f"m{index}"
            assert reply.headers["X-Request-Id"] in answer["id"]
        assert len({reply.headers["X-Request-Id"] for reply in replies}) == 20

    with_server(test)


def test_random_bodies_never_break_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def run(bodies: list[bytes]) -> None:
        server = await serve(FakeService(), "127.0.0.1", 0, Guard(), limits=FAST)
        try:
            async with aiohttp.ClientSession() as session:
                client = Client(server, session)
                for body in bodies:
                    for path in (CHAT_PATH, PLAIN_PATH):
                        reply = await client.ask("POST", path, data=body)
                        assert reply.status in (200, 400), body
        finally:
            await server.close()

    bodies: list[bytes] = [b'{"messages":[{"role":"user","content":"Hi"}],"stream":true}']

    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    @given(BODIES)
    def collect(body: bytes) -> None:
        bodies.append(body)

    collect()
    asyncio.run(run(bodies))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert json.loads(bodies[0])["stream"]
