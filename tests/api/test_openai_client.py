"""OpenAI's own client against the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from meshinfer.api.guard import Guard
from meshinfer.api.service import Piece
from meshinfer.errors import BusyError, ContextLengthError, NotReadyError, RequestLostError, UnknownModelError
from tests.api.fake import Client, FakeService, with_server

HI: Any = [{"role": "user", "content": "Hi"}]


def with_client(
    test: Callable[[openai.AsyncOpenAI], Awaitable[None]], guard: Guard | None = None, **service: Any
) -> None:
    async def run(client: Client, _: FakeService) -> None:
        async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="secret", max_retries=0) as talker:
            await test(talker)

    with_server(run, guard, **service)


def test_chats_and_completions() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(model="smollm2-135m", messages=HI, seed=3)
        assert chat.choices[0].message.content == "Hello"
        assert chat.usage is not None and chat.usage.total_tokens == 6
        plain = await client.completions.create(model="smollm2-135m", prompt="Hi")
        assert plain.choices[0].text == "Hello"
        assert [model.id async for model in client.models.list()] == ["smollm2-135m"]
        assert (await client.models.retrieve("smollm2-135m")).created == 1_700_000_000

    with_client(test, Guard(api_key="secret"))


def test_streams() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
        plain = await client.completions.create(model="smollm2-135m", prompt="Hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in plain]) == "Hello"

    with_client(test)


def test_a_stream_that_breaks_off() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model="smollm2-135m", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="fell apart"):
            [chunk async for chunk in stream]

    with_client(test, pieces=(Piece("Hel"),), breaks_with=RequestLostError("the mesh fell apart"))


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (UnknownModelError("no model 'x'"), openai.NotFoundError, "model_not_found"),
        (BusyError("later"), openai.RateLimitError, "rate_limit_exceeded"),
        (ContextLengthError(9000, 8192), openai.BadRequestError, "context_length_exceeded"),
        (NotReadyError("not yet"), openai.InternalServerError, "not_ready"),
        (RequestLostError("lost"), openai.InternalServerError, "request_lost"),
    ],
)
def test_errors(error: Exception, kind: type[openai.APIStatusError], code: str) -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model="x", messages=HI)
        assert caught.value.code == code
        assert caught.value.request_id

    with_client(test, refuses_with=error)


def test_a_wrong_key_and_a_wrong_field() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="x", messages=HI, n=2)
        assert caught.value.param == "n"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()

    with_client(test, Guard(api_key="secret"))
