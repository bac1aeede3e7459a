"""The origin of requests: from messages to tokens, to the ring, and back to text.

It keeps the prompt and every token that was emitted, so that the ring's state is only a cache: when a plan takes the
place of another one, what is still to come is asked of the new head.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from meshinfer.api.service import Answer, FinishReason, Job, ModelCard, Piece, Readiness
from meshinfer.engine.generate import answer_room
from meshinfer.errors import (
    BusyError,
    InputError,
    MeshinferError,
    NotReadyError,
    RequestLostError,
    UnknownModelError,
)
from meshinfer.planning.plan import Choice, Plan
from meshinfer.ring.convert import token_bytes, wire_sampling
from meshinfer.shards.manifest import Manifest
from meshinfer.text.detokenizer import Detokenizer
from meshinfer.text.stops import StopStrings
from meshinfer.text.template import ChatTemplate
from meshinfer.text.tokenizer import Tokenizer
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import Cancel, Emit, Submit, WireSampling

log = logging.getLogger(__name__)

MAX_OPEN = 256
"""Requests that one node may have in the mesh at once."""
MAX_TRIES = 4
HOLD_S, HOLD_POLL_S = 10.0, 0.05
"""How long a new request waits while the ring is changed."""
RETRY_PAUSE_S = 0.2
LOST_AFTER_S = 120.0
"""How long a request waits for a ring before it is given up."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The chosen model at this node: what text is made of."""

    choice: Choice
    manifest: Manifest
    tokenizer: Tokenizer
    template: ChatTemplate

    @property
    def context_tokens(self) -> int:
        return min(self.manifest.context_tokens, self.choice.context_tokens)

    def encode(self, job: Job) -> list[int]:
        """The tokens of a request. Raises InputError."""
        if job.messages is not None:
            text = self.template.render(job.messages)
            return self.tokenizer.encode(text, add_special=not self.template.has_template)
        if isinstance(job.prompt, str):
            return self.tokenizer.encode(job.prompt, add_special=True)
        tokens = list(job.prompt or ())
        if any(not 0 <= token < self.tokenizer.vocab_size for token in tokens):
            raise InputError(f"prompt: tokens of this model are 0 to {self.tokenizer.vocab_size - 1}")
        return tokens

    @property
    def eos(self) -> tuple[int, ...]:
        return tuple({*self.manifest.generation.get("eos_token_id", ()), *self.tokenizer.eos_ids})


@dataclass(slots=True)
class _Request:
    number: int
    prompt: list[int]
    sampling: WireSampling | None
    room: int
    eos: tuple[int, ...]
    fingerprint: Sha256 | None = None
    """Of the model whose tokens these are; None where any model will do."""
    emitted: list[int] = field(default_factory=list)
    news: asyncio.Queue[tuple[tuple[int, ...], FinishReason | MeshinferError | None]] = field(
        default_factory=asyncio.Queue
    )
    epoch: int = 0
    base: int = 0
    """How many tokens there were when it was submitted last."""
    tries: int = 0


class Origin:
    """Requests that entered the mesh at this node; a `api.service.Service`."""

    def __init__(
        self,
        me: NodeId,
        post: Callable[[NodeId, Any], bool],
        readiness: Callable[[], Readiness],
        name_of: Callable[[NodeId], str],
    ) -> None:
        self._me, self._post, self._readiness, self._name_of = me, post, readiness, name_of
        self._requests: dict[int, _Request] = {}
        self._held = 0
        """Requests that wait for the ring to be changed."""
        self._numbers = itertools.count(1)
        self._plan: Plan | None = None
        self.model: ServedModel | None = None
        self.answered = 0

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    # --- the service of the API ---------------------------------------------------------------------------------

    def models(self) -> tuple[ModelCard, ...]:
        """See `Service.models`."""
        if self.model is None:
            return ()
        return (ModelCard(self.model.choice.name, 0, self.model.context_tokens),)

    def readiness(self) -> Readiness:
        """See `Service.readiness`."""
        return self._readiness()

    def answer(self, job: Job) -> AbstractAsyncContextManager[Answer]:
        """See `Service.answer`."""
        return self._answer(job)

    @asynccontextmanager
    async def _answer(self, job: Job) -> AsyncIterator[Answer]:
        if len(self._requests) + self._held >= MAX_OPEN:
            raise BusyError(f"{MAX_OPEN} requests are open at this node already", 5)
        self._held += 1
        try:
            state = await self._ready_soon()
        finally:
            self._held -= 1
        served = self.model
        if served is not None and job.model is not None and job.model != served.choice.name:
            raise UnknownModelError(f"the mesh serves '{served.choice.name}', not '{job.model}'")
        if served is None or self._plan is None or not state.ready:
            raise NotReadyError(f"the mesh is not ready: {state.stage}", state.retry_after_s)
        prompt = await asyncio.to_thread(served.encode, job)
        room = answer_room(len(prompt), served.context_tokens, job.max_tokens or served.context_tokens)
        sampling, model = wire_sampling(job.sampling), served.choice.fingerprint
        request = _Request(next(self._numbers), prompt, sampling, room, served.eos, model)
        self._requests[request.number] = request
        try:
            self._submit(request)
            yield _RingAnswer(self, request, served.tokenizer, job.stop)
        finally:
            if self._requests.pop(request.number, None) is not None and self._plan is not None:
                self._post(self._plan.ring.head, Cancel(epoch=request.epoch, number=request.number))
            self.answered += 1

    async def _ready_soon(self) -> Readiness:
        """Readiness, after a while where one ring takes the place of another; at once where there was none yet."""
        for _ in range(round(HOLD_S / HOLD_POLL_S)):
            state = self._readiness()
            if state.ready or self._plan is None:
                return state
            await asyncio.sleep(HOLD_POLL_S)
        return self._readiness()

    async def probe(self, token: int) -> None:
        """Have one token from the ring. Raises RequestLostError, TimeoutError."""
        request = _Request(next(self._numbers), [token], None, 1, ())
        self._requests[request.number] = request
        try:
            self._submit(request)
            async with asyncio.timeout(30):
                _, end = await request.news.get()
            if isinstance(end, MeshinferError):
                raise end
        finally:
            self._requests.pop(request.number, None)

    # --- the ring -----------------------------------------------------------------------------------------------

    def serve(self, plan: Plan) -> None:
        """A plan holds: ask its head for what is still to come of every request."""
        self._plan = plan
        for request in list(self._requests.values()):
            self._submit(request)

    def received(self, sender: NodeId, message: Emit) -> None:
        """Tokens for a request, from the head it was submitted to last; others have nothing to say."""
        request = self._requests.get(message.number)
        head = self._plan.ring.head if self._plan is not None else None
        if request is None or message.epoch != request.epoch or sender != head:
            return
        if message.finish == "failed":
            self._failed(request, message)
            return
        if message.position != len(request.emitted) - request.base:
            request.tries += 1
            if request.tries >= MAX_TRIES:
                self._lose(request, RequestLostError("tokens were lost on their way, again and again"))
                return
            log.warning("tokens of request %d were lost on their way: asking for them again", request.number)
            self._renew(request)
            return
        request.emitted.extend(message.tokens)
        request.tries = 0
        finish: FinishReason | None = "stop" if message.finish == "stop" else "length" if message.finish else None
        if finish is not None:
            self._requests.pop(request.number)
        request.news.put_nowait((message.tokens, finish))

    def head_is_back(self, node: NodeId) -> None:
        """There is a new link to a node: if it is the head, news may have been lost with the old one."""
        if self._plan is not None and node == self._plan.ring.head:
            for request in list(self._requests.values()):
                self._renew(request)

    def trace(self) -> tuple[str, ...]:
        """Which nodes run which shards."""
        if self._plan is None:
            return ()
        return tuple(f"{self._name_of(s.node)}:{s.start}-{s.stop - 1}" for s in self._plan.ring.stages)

    def _renew(self, request: _Request) -> None:
        """Submit what is still to come, as another request: the head may be at work on the old one."""
        if self._plan is None:
            return
        self._post(self._plan.ring.head, Cancel(epoch=request.epoch, number=request.number))
        del self._requests[request.number]
        request.number = next(self._numbers)
        self._requests[request.number] = request
        self._submit(request)

    def _submit(self, request: _Request) -> None:
        assert self._plan is not None
        if request.fingerprint not in (None, self._plan.choice.fingerprint):
            name = self._plan.choice.name
            self._lose(request, RequestLostError(f"the mesh serves another model now: {name}; ask again"))
            return
        left = request.room - len(request.emitted)
        request.epoch, request.base = self._plan.epoch, len(request.emitted)
        message = Submit(
            epoch=request.epoch,
            number=request.number,
            tokens=token_bytes([*request.prompt, *request.emitted]),
            sampling=request.sampling,
            max_tokens=left,
            eos=request.eos,
        )
        self._post(self._plan.ring.head, message)

    def _failed(self, request: _Request, message: Emit) -> None:
        request.tries += 1
        if message.retry and request.tries < MAX_TRIES:
            log.warning("request %d: %s; trying again", request.number, message.reason)
            request.epoch = 0

            def again() -> None:
                if request.number in self._requests and request.epoch == 0:
                    self._submit(request)

            asyncio.get_running_loop().call_later(RETRY_PAUSE_S * request.tries, again)
            return
        error: MeshinferError = RequestLostError(message.reason) if message.retry else InputError(message.reason)
        self._lose(request, error)

    def _lose(self, request: _Request, error: MeshinferError) -> None:
        self._requests.pop(request.number, None)
        request.news.put_nowait(((), error))


class _RingAnswer:
    """The text of one request as it comes."""

    def __init__(self, origin: Origin, request: _Request, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._origin, self._request = origin, request
        self._text, self._stops = Detokenizer(tokenizer), StopStrings(stop)
        self.prompt_tokens, self.completion_tokens = len(request.prompt), 0

    @property
    def trace(self) -> tuple[str, ...]:
        return self._origin.trace()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            try:
                async with asyncio.timeout(LOST_AFTER_S):
                    tokens, end = await self._request.news.get()
            except TimeoutError:
                if self._origin.readiness().ready:  # others were first: it waits in line
                    continue
                raise RequestLostError(f"no token came for {LOST_AFTER_S:.0f} s: the mesh has no ring") from None
            if isinstance(end, MeshinferError):
                raise end
            self.completion_tokens += len(tokens)
            text, hit = self._stops.push(self._text.push(tokens))
            if hit:
                yield Piece(text, "stop")
                return
            if end is not None:
                rest, hit = self._stops.push(self._text.flush())
                yield Piece(text + rest + ("" if hit else self._stops.flush()), "stop" if hit else end)
                return
            if text:
                yield Piece(text)
