"""Which sequences run in which step: first come, first served, and every stage kept busy.

Up to `max_sequences` run at once, the others wait. As many steps are in flight as there are stages, and the running
sequences are spread over them, so that while one stage works for some users the next one works for others. A prompt
goes in by chunks; it need not wait for one chunk to come round before the next one starts. KV blocks for all that a
request may become are set aside when it starts, so that a running one never lacks any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NewType

import numpy as np

from meshinfer.engine.blocks import BlockPool
from meshinfer.engine.sampling import Sampling
from meshinfer.engine.step import Entry, Tokens
from meshinfer.planning.plan import Pool
from meshinfer.types import NodeId, SequenceId

RequestKey = tuple[NodeId, int]
"""The origin of a request, and its number there."""

StepNumber = NewType("StepNumber", int)

CHUNK_TOKENS = 256
"""Of a prompt in one step: users who read along wait no longer than that takes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an origin asks for: up to `max_tokens` tokens after `tokens` [n] i64, none after one of `eos`."""

    key: RequestKey
    tokens: Tokens
    sampling: Sampling
    max_tokens: int
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step to start: entries with their samplings, tokens [total] i64, and the sequences that stages may forget."""

    number: StepNumber
    entries: tuple[Entry, ...]
    samplings: tuple[Sampling, ...]
    tokens: Tokens
    released: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class Emission:
    """News for the origin of a request."""

    key: RequestKey
    tokens: tuple[int, ...] = ()
    position: int = 0
    """How many tokens of this request were emitted before."""
    finish: Literal["", "stop", "length", "failed"] = ""
    reason: str = ""
    retry: bool = False


@dataclass(slots=True)
class _Running:
    request: Request
    sequence: SequenceId
    pending: Tokens
    """Known tokens that are in no step yet."""
    start: int = 0
    """Positions that have been put into steps."""
    left: int = 0
    in_flight: int = 0
    over: bool = False


@dataclass(slots=True)
class Scheduler:
    """Sequences of one ring. `stages`: how many; `pool`: KV blocks that all of them have."""

    stages: int
    pool: Pool
    max_sequences: int
    chunk_tokens: int = CHUNK_TOKENS
    _blocks: BlockPool = field(init=False)
    _waiting: deque[Request] = field(init=False, default_factory=deque)
    _running: dict[SequenceId, _Running] = field(init=False, default_factory=dict)
    _steps: dict[StepNumber, NextStep] = field(init=False, default_factory=dict)
    _released: list[SequenceId] = field(init=False, default_factory=list)
    _last_sequence: int = field(init=False, default=0)
    _last_step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._blocks = BlockPool(self.pool.blocks, self.pool.block_tokens)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def steps_in_flight(self) -> int:
        return len(self._steps)

    @property
    def free_blocks(self) -> int:
        return self._blocks.free

    def requests(self) -> list[RequestKey]:
        """The requests that wait or run."""
        return [request.key for request in self._waiting] + [r.request.key for r in self._running.values()]

    def submit(self, request: Request) -> list[Emission]:
        """Queue a request; one that can never run is refused at once."""
        total = len(request.tokens) + request.max_tokens
        if self._blocks.needed(total) > self._blocks.count:
            most = self._blocks.count * self._blocks.block_tokens
            why = f"the request may take {total} tokens, the mesh keeps room for {most}: ask for fewer with max_tokens"
            return [Emission(request.key, finish="failed", reason=why)]
        if len(request.tokens) == 0 or request.max_tokens < 1:
            return [Emission(request.key, finish="failed", reason="a request without tokens")]
        self._waiting.append(request)
        return []

    def cancel(self, key: RequestKey) -> None:
        """Forget a request, whatever it is doing; unknown ones are ignored."""
        self._waiting = deque(request for request in self._waiting if request.key != key)
        for running in list(self._running.values()):
            if running.request.key == key:
                self._end(running)

    def next_step(self) -> NextStep | None:
        """The next step to start now, if any."""
        if len(self._steps) >= self.stages:
            return None
        self._admit()
        chosen = self._choose()
        if not chosen and not self._released:
            return None
        number = self._last_step = self._last_step + 1
        entries, samplings, tokens = [], [], []
        for running, count in chosen:
            chunk, running.pending = running.pending[:count], running.pending[count:]
            last = len(running.pending) == 0
            rows = (count - 1,) if last else ()
            table = self._blocks.table(running.sequence)[: self._blocks.needed(running.start + count)]
            entries.append(Entry(running.sequence, running.start, count, rows, table))
            samplings.append(running.request.sampling)
            tokens.append(chunk)
            running.start += count
            running.in_flight += 1
            self._running[running.sequence] = self._running.pop(running.sequence)  # to the end of the line
        released, self._released = tuple(self._released), []
        joined = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
        step = NextStep(StepNumber(number), tuple(entries), tuple(samplings), joined, released)
        self._steps[step.number] = step
        return step

    def complete(self, step: StepNumber, drawn: Mapping[SequenceId, int]) -> list[Emission]:
        """A step has come round with the tokens that were chosen; unknown steps are ignored."""
        emissions = []
        for running in self._returned(step):
            token = drawn.get(running.sequence)
            if running.over or token is None:
                continue
            key, position = running.request.key, running.request.max_tokens - running.left
            running.left -= 1
            ended = token in running.request.eos
            if ended or running.left == 0:
                tokens = () if ended else (token,)
                emissions.append(Emission(key, tokens, position, "stop" if ended else "length"))
                self._end(running)
            else:
                running.pending = np.array([token], np.int64)
                emissions.append(Emission(key, (token,), position))
        return emissions

    def fail(self, step: StepNumber, reason: str) -> list[Emission]:
        """A stage could not run a step: its requests end, and their origins may try again."""
        if step in self._steps:  # the stages after that one have not heard whom they may forget
            self._released.extend(self._steps[step].released)
        emissions = []
        for running in self._returned(step):
            if not running.over:
                emissions.append(Emission(running.request.key, finish="failed", reason=reason, retry=True))
                self._end(running)
        return emissions

    def _returned(self, step: StepNumber) -> list[_Running]:
        """The sequences of a step that is over; those that ended meanwhile are forgotten when nothing runs any more."""
        over = self._steps.pop(step, None)
        back = [self._running[entry.sequence] for entry in over.entries] if over else []
        for running in back:
            running.in_flight -= 1
            if running.over and not running.in_flight:
                self._forget(running)
        return back

    def _end(self, running: _Running) -> None:
        running.over = True
        running.pending = running.pending[:0]
        if not running.in_flight:
            self._forget(running)

    def _forget(self, running: _Running) -> None:
        if self._running.pop(running.sequence, None) is not None:
            self._blocks.release(running.sequence)
            self._released.append(running.sequence)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_sequences:
            total = len(self._waiting[0].tokens) + self._waiting[0].max_tokens
            if self._blocks.needed(total) > self._blocks.free:
                return
            request = self._waiting.popleft()
            self._last_sequence += 1
            sequence = SequenceId(self._last_sequence)
            self._blocks.resize(sequence, total)
            self._running[sequence] = _Running(request, sequence, request.tokens, left=request.max_tokens)

    def _choose(self) -> list[tuple[_Running, int]]:
        """Sequences for one step, their share of those that run, with how many tokens of each."""
        share = -(-len(self._running) // self.stages)
        chosen: list[tuple[_Running, int]] = []
        room = self.chunk_tokens
        for running in self._running.values():
            count = min(len(running.pending), room)
            if count and len(chosen) < share:
                chosen.append((running, count))
                room -= count
        return chosen
