"""What the HTTP API asks of the node behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from meshinfer.engine.sampling import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Job:
    """One request, checked: either `messages` (a chat) or `prompt` (text or token ids) is there.

    `model` None is for the service to choose; `max_tokens` None is what the context has room for.
    """

    model: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    prompt: str | tuple[int, ...] | None
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer; the last piece, and only the last, has a finish reason."""

    text: str
    finish_reason: FinishReason | None = None


class Answer(Protocol):
    """The pieces of one answer. The other fields hold from the first piece on and grow with the answer.

    Iterating raises RequestLostError, or another MeshinferError, where the answer cannot be finished.
    """

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def trace(self) -> tuple[str, ...]:
        """`name:start-stop` of every node that works on it."""
        ...

    def __aiter__(self) -> AsyncIterator[Piece]: ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be asked for; `created` is in seconds since 1970."""

    id: str
    created: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether an answer could begin now; if not, what the mesh is doing and when to ask again."""

    ready: bool
    stage: str
    retry_after_s: int


class Service(Protocol):
    """A node, as the HTTP API sees it."""

    def models(self) -> tuple[ModelCard, ...]: ...

    def readiness(self) -> Readiness: ...

    def answer(self, job: Job) -> AbstractAsyncContextManager[Answer]:
        """One answer; leaving the context ends the work on it everywhere.

        Entering raises UnknownModelError, NotReadyError, BusyError, ContextLengthError and other InputErrors.
        """
        ...
