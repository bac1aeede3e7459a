"""A node's part in one ring: runs its stage, and at the head also the scheduler.

All methods are called on the event loop; inference runs in one thread of its own. A runner belongs to one epoch:
what comes from another one is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import cast

import msgspec

from meshinfer.engine.step import Stage, Tokens
from meshinfer.errors import MeshinferError
from meshinfer.planning.plan import Plan, Pool
from meshinfer.ring.convert import engine_sampling, tokens_of, wire_entries
from meshinfer.ring.scheduler import Emission, Request, Scheduler, StepNumber
from meshinfer.ring.timing import StepTiming
from meshinfer.ring.work import TOKEN_TIMES, Job, Output, StageWork
from meshinfer.types import NodeId, SequenceId
from meshinfer.wire.codec import Codec
from meshinfer.wire.messages import Cancel, Drawn, Emit, RingStep, Spent, StepFailed, Submit

log = logging.getLogger(__name__)

KEPT_TIMINGS = 2048

Post = Callable[[NodeId, msgspec.Struct, Sequence[bytes]], bool]
"""Sends a message to a node, to this one too."""


class RingRunner:
    """`stage` is None on a node that carries no layers: then it only knows whom to submit to."""

    def __init__(self, plan: Plan, pool: Pool, me: NodeId, stage: Stage | None, post: Post) -> None:
        self.plan, self.pool, self._me, self._post = plan, pool, me, post
        ring = plan.ring
        self._work: StageWork | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._next = ring.after(me) if stage is not None else None
        self._before = next((s.node for s in ring.stages[:-1] if ring.after(s.node) == me), None)
        if stage is not None:
            codec = cast(Codec, plan.codec)
            self._work = StageWork(stage, codec, pool.block_tokens, tail=ring.tail == me)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self.scheduler = Scheduler(len(ring.stages), pool, plan.choice.sequences) if ring.head == me else None
        self._started: dict[int, tuple[float, float]] = {}
        self.timings: deque[StepTiming] = deque(maxlen=KEPT_TIMINGS)
        self.busy_at = 0.0
        """When the stage last had a step, in monotonic seconds."""
        self.gave_tokens = False
        """Whether tokens have come round, at the head."""
        self.failures = 0
        """Steps that failed here one after the other."""

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    def received(self, sender: NodeId, message: msgspec.Struct, payload: memoryview) -> None:
        """Handle a message of this ring; those of another epoch, or from where they cannot come, are ignored."""
        if self._closed or getattr(message, "epoch", None) != self.epoch:
            return
        match message:
            case RingStep() if sender == self._before:
                self._enqueue(Job(message, time.monotonic(), payload=payload))
            case Drawn() if sender == self.plan.ring.tail:
                self._complete(message)
            case StepFailed(step=step, reason=reason) if self.scheduler is not None and sender in self.plan.nodes:
                self._started.pop(step, None)
                self._emit(self.scheduler.fail(StepNumber(step), reason))
                self._start_steps()
            case Submit():
                self._submit(sender, message)
            case Cancel(number=number) if self.scheduler is not None:
                self.scheduler.cancel((sender, number))
                self._start_steps()

    def take_token_s(self) -> float | None:
        """What one token took in this node's stage lately; None until enough were measured since it was asked last."""
        times = self._work.token_times if self._work is not None else None
        if times is None or len(times) < TOKEN_TIMES:
            return None
        taken = list(times)
        times.clear()
        return median(taken)

    def stuck_s(self, now: float) -> float:
        """How long the oldest step has been under way, at the head."""
        return now - min((began for began, _ in self._started.values()), default=now)

    def abandon(self, node: NodeId) -> None:
        """A node is gone: forget what it asked for."""
        if self.scheduler is not None:
            for number in self._numbers_of(node):
                self.scheduler.cancel((node, number))
            self._start_steps()

    async def close(self) -> None:
        """Stop after the step that runs, if one does."""
        self._closed = True
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await asyncio.get_running_loop().run_in_executor(None, lambda: pool.shutdown(cancel_futures=True))

    # --- the stage ----------------------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> None:
        if self._pool is None or self._work is None:
            return
        self.busy_at = job.came_at
        loop, work = asyncio.get_running_loop(), self._work

        def run() -> None:
            try:
                done: Output = work.run(job)
            except MeshinferError as error:
                done = StepFailed(epoch=self.epoch, step=job.step.step, reason=str(error)[:500]), ()
            except Exception as error:
                log.exception("step %d", job.step.step)
                done = (
                    StepFailed(epoch=self.epoch, step=job.step.step, reason=f"{type(error).__name__}: {error}"[:500]),
                    (),
                )
            loop.call_soon_threadsafe(self._passed, done)

        self._pool.submit(run)

    def _passed(self, done: Output) -> None:
        if self._closed:
            return
        message, payloads = done
        self.failures = self.failures + 1 if isinstance(message, StepFailed) else 0
        target = self.plan.ring.head if isinstance(message, (Drawn, StepFailed)) else self._next
        if target is not None:
            self._post(target, message, payloads)

    # --- the head -----------------------------------------------------------------------------------------------

    def _submit(self, sender: NodeId, message: Submit) -> None:
        key = (sender, message.number)
        if self.scheduler is None:
            self._emit([Emission(key, finish="failed", reason="this node is not the head of the ring", retry=True)])
            return
        try:
            tokens: Tokens = tokens_of(message.tokens)
            sampling = engine_sampling(message.sampling)
        except MeshinferError as error:
            self._emit([Emission(key, finish="failed", reason=str(error))])
            return
        request = Request(key, tokens, sampling, message.max_tokens, frozenset(message.eos))
        self._emit(self.scheduler.submit(request))
        self._start_steps()

    def _start_steps(self) -> None:
        if self.scheduler is None or self._closed:
            return
        began = time.monotonic()
        while (step := self.scheduler.next_step()) is not None:
            entries = wire_entries(step.entries, step.samplings)
            message = RingStep(epoch=self.epoch, step=step.number, entries=entries, released=step.released)
            came = time.monotonic()
            self._started[step.number] = began, came - began
            self._enqueue(Job(message, came, tokens=step.tokens))
            began = time.monotonic()

    def _complete(self, message: Drawn) -> None:
        if self.scheduler is None:
            return
        began = time.monotonic()
        number = StepNumber(message.step)
        self.gave_tokens = self.gave_tokens or bool(message.tokens)
        drawn = {SequenceId(sequence): token for sequence, token in message.tokens}
        emissions = self.scheduler.complete(number, drawn)
        self._emit(emissions)
        self._start_steps()
        self._note(message, began)

    def _emit(self, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            origin, number = emission.key
            message = Emit(
                epoch=self.epoch,
                number=number,
                position=emission.position,
                tokens=emission.tokens,
                finish=emission.finish,
                reason=emission.reason[:500],
                retry=emission.retry,
            )
            self._post(origin, message, ())

    def _note(self, message: Drawn, came_at: float) -> None:
        started = self._started.pop(message.step, None)
        if started is None or not message.spent:
            return
        began, scheduling = started
        spent = Spent(*(sum(part) for part in zip(*(msgspec.structs.astuple(s) for s in message.spent), strict=True)))
        self.timings.append(
            StepTiming(
                came_at,
                came_at - began,
                scheduling,
                spent.waiting_s,
                spent.codec_s,
                spent.inference_s,
                tuple(stage.inference_s for stage in message.spent),
                len(message.tokens),
            )
        )

    def _numbers_of(self, node: NodeId) -> list[int]:
        assert self.scheduler is not None
        return [number for origin, number in self.scheduler.requests() if origin == node]
