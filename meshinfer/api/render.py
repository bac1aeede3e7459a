"""Answers of OpenAI's API: whole, and as events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from meshinfer.api.problems import Problem
from meshinfer.api.service import Answer, FinishReason, ModelCard, Readiness

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""A comment, which clients skip: the connection is alive, no token has come yet."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took."""

    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, answer: Answer) -> Usage:
        return cls(answer.prompt_tokens, answer.completion_tokens)

    @property
    def object(self) -> Mapping[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Form:
    """How one answer is written; `created` is in seconds since 1970."""

    kind: Literal["chat", "text"]
    request_id: str
    created: int
    model: str
    include_usage: bool = False

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> bytes:
        """An answer that is not streamed."""
        message = {"role": "assistant", "content": text, "refusal": None}
        content: Mapping[str, Any] = {"message": message} if self.kind == "chat" else {"text": text}
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return msgspec.json.encode(self._object(name, [self._choice(content, finish_reason)], usage))

    def opening(self) -> bytes:
        """What comes before the first text."""
        return self._event({"role": "assistant", "content": ""}) if self.kind == "chat" else b""

    def text(self, text: str) -> bytes:
        """Some text."""
        return self._event({"content": text}) if self.kind == "chat" else self._event({"text": text})

    def closing(self, finish_reason: FinishReason, usage: Usage) -> bytes:
        """What comes after the last text."""
        end = self._event({} if self.kind == "chat" else {"text": ""}, finish_reason)
        total = event(self._object(self._chunk, [], usage)) if self.include_usage else b""
        return end + total + DONE

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _event(self, said: Mapping[str, str], finish_reason: FinishReason | None = None) -> bytes:
        content = {"delta": said} if self.kind == "chat" else said
        chunk = self._object(self._chunk, [self._choice(content, finish_reason)], None)
        return event(chunk | {"usage": None} if self.include_usage else chunk)

    def _choice(self, content: Mapping[str, Any], finish_reason: FinishReason | None) -> Mapping[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _object(self, name: str, choices: Sequence[Mapping[str, Any]], usage: Usage | None) -> dict[str, Any]:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        found: dict[str, Any] = {
            "id": f"{prefix}-{self.request_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return found if usage is None else found | {"usage": usage.object}


def event(content: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def failure(problem: Problem) -> bytes:
    """The last event of a stream that cannot go on; `[DONE]` does not follow, as it is not done."""
    return event(problem.object)


def model(card: ModelCard) -> Mapping[str, Any]:
    """One model; `context_length` is in tokens."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "meshinfer",
        "context_length": card.context_tokens,
    }


def models(cards: Sequence[ModelCard]) -> Mapping[str, Any]:
    """All models."""
    return {"object": "list", "data": [model(card) for card in cards]}


def readiness(state: Readiness) -> tuple[int, Mapping[str, Any], Mapping[str, str]]:
    """Status, object and headers of what `/ready` says."""
    if state.ready:
        return 200, {"ready": True}, {}
    return 503, {"ready": False, "stage": state.stage}, {"Retry-After": str(state.retry_after_s)}


def trace_header(trace: Sequence[str]) -> Mapping[str, str]:
    """The header that names the nodes; what a header cannot carry is percent-encoded."""
    return {"X-Meshinfer-Trace": ", ".join(quote(node, safe=":-") for node in trace)} if trace else {}
