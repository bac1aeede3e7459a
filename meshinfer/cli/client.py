"""How commands talk to the agent of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from meshinfer.agent.runtime import Runtime, read_runtime
from meshinfer.config import Folders
from meshinfer.errors import InputError, MeshinferError, NotReadyError, RequestLostError

_TIMEOUT = httpx.Timeout(10.0, read=150.0)


class Client:
    """An agent's API. Every method raises MeshinferError with what the agent says."""

    def __init__(self, api: str, token: str | None = None, api_key: str | None = None) -> None:
        headers = {}
        if token:
            headers["X-Meshinfer-Token"] = token
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self.api = api
        self._http = httpx.Client(base_url=api, headers=headers, timeout=_TIMEOUT, trust_env=False)

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

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[str]:
        """The pieces of an answer as they come; `options` are fields of OpenAI's request."""
        body = {"messages": list(messages), "stream": True, **options}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _error(response)
                yield from _pieces(response.iter_lines())
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


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text in the events of a stream."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestLostError(event["error"]["message"])
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise RequestLostError("the answer broke off")


def _error(response: httpx.Response) -> MeshinferError:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the agent answers with status {response.status_code}"
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return NotReadyError(message)
    return InputError(message) if response.status_code < 500 else MeshinferError(message)
