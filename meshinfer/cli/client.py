"""How commands talk to the agent of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from meshinfer.agent.runtime import Runtime, read_runtime
from meshinfer.config import Folders
from meshinfer.errors import InputError, MeshinferError, NotReadyError, RequestLostError

_TIMEOUT = httpx.Timeout(10.0, read=150.0)


class TooLongError(InputError):
    """A conversation that the model's context does not hold."""


class Answer:
    """The text of one answer as it comes; from its end on `tokens` and the times hold."""

    def __init__(self, lines: Iterator[str], asked_at: float) -> None:
        self._lines, self._asked_at = lines, asked_at
        self.tokens = 0
        self.first_s = self.rest_s = 0.0
        """Until the first text came, and from then on."""

    @property
    def tokens_per_s(self) -> float:
        """After the first token."""
        return (self.tokens - 1) / self.rest_s if self.tokens > 1 and self.rest_s > 0 else 0.0

    def __iter__(self) -> Iterator[str]:
        for event in _events(self._lines):
            for choice in event.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    self.first_s = self.first_s or time.monotonic() - self._asked_at
                    yield text
            if usage := event.get("usage"):
                self.tokens = usage["completion_tokens"]
                self.rest_s = time.monotonic() - self._asked_at - self.first_s

    def __str__(self) -> str:
        count = f"{self.tokens} token" if self.tokens == 1 else f"{self.tokens} tokens"
        return f"{count}, the first after {self.first_s:.2f} s, then {self.tokens_per_s:.1f} tokens/s"


class Client:
    """An agent's API. Every method raises MeshinferError with what the agent says."""

    def __init__(self, api: str, token: str | None = None, api_key: str | None = None) -> None:
        headers = {}
        if token:
            headers["X-Meshinfer-Token"] = token
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self.api = api
        limits = httpx.Limits(max_keepalive_connections=0)  # nothing is left open for somebody to close
        self._http = httpx.Client(base_url=api, headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False)

    @classmethod
    def of(cls, folders: Folders) -> Client:
        """Of the agent that runs with a home. Raises NoAgentError."""
        runtime: Runtime = read_runtime(folders)
        return cls(runtime.api, runtime.token, runtime.api_key)

    def status(self) -> dict[str, Any]:
        """See `agent.admin.status_of`."""
        return dict(self._call("GET", "/mesh/status"))

    def use(self, model: str) -> dict[str, Any]:
        """Choose the model of the mesh."""
        return dict(self._call("POST", "/mesh/use", {"model": model}))

    def down(self) -> None:
        """Stop the agent."""
        self._call("POST", "/mesh/down")

    @contextmanager
    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[Answer]:
        """An answer as it comes; leaving ends the work on it everywhere. `options` are fields of OpenAI's request."""
        asked_at = time.monotonic()
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"messages": list(messages), **streaming, **options}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _error(response)
                yield Answer(response.iter_lines(), asked_at)
        except httpx.TransportError as error:
            raise RequestLostError(f"the agent at {self.api} does not answer: {error}") from error

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise InputError(
                f"the agent at {self.api} does not answer ({error}): is it running? meshinfer up"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise _error(response)
        return response.json()


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises RequestLostError where it ends before its end."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestLostError(event["error"]["message"])
        yield event
    raise RequestLostError("the answer broke off")


def _error(response: httpx.Response) -> MeshinferError:
    try:
        error = response.json()["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = f"the agent answers with status {response.status_code}", None
    if code == "context_length_exceeded":
        return TooLongError(message)
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return NotReadyError(message)
    return InputError(message) if response.status_code < 500 else MeshinferError(message)
