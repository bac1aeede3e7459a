"""What one stage does with one step: decode, infer, then encode for the next stage or choose tokens."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import msgspec

from meshinfer.engine.sampling import choose
from meshinfer.engine.step import Rows, Stage, Step, Tokens
from meshinfer.errors import StepError
from meshinfer.ring.convert import engine_sampling, stage_entries
from meshinfer.types import SequenceId
from meshinfer.wire.codec import Codec
from meshinfer.wire.frames import decode_all, encode_all
from meshinfer.wire.messages import Drawn, RingStep, Spent

TOKEN_TIMES = 64

Output = tuple[msgspec.Struct, tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class Job:
    """One step for one stage. `tokens` for the first stage, `payload` for the others; `came_at`: monotonic seconds."""

    step: RingStep
    came_at: float
    tokens: Tokens | None = None
    payload: memoryview = memoryview(b"")


class StageWork:
    """A stage in its place in the ring. `run` is called in the one thread that the stage has."""

    def __init__(self, stage: Stage, codec: Codec, block_tokens: int, *, tail: bool) -> None:
        """`block_tokens`: of the ring's blocks, a multiple of the stage's own."""
        self._stage, self._codec, self._tail = stage, codec, tail
        self.token_times: deque[float] = deque(maxlen=TOKEN_TIMES)
        """Inference of the last steps that had one token."""
        self._factor = block_tokens // stage.block_tokens if stage.block_bytes else 1

    def run(self, job: Job) -> Output:
        """The message for the next stage, or for the head. Raises FrameError, StepError, KvBudgetError, DeviceError."""
        began = time.perf_counter()
        waiting = time.monotonic() - job.came_at
        step = job.step
        for sequence in step.released:
            self._stage.release(SequenceId(sequence))
        if not step.entries:
            return self._empty(step)
        hidden = decode_all(step, job.payload) if job.tokens is None else ()
        entries = stage_entries(step.entries, self._factor)
        asked = Step(entries, tokens=job.tokens, hidden=hidden)
        if job.tokens is None and (not hidden or any(len(rows) != asked.total for rows in hidden)):
            raise StepError(f"a step of {asked.total} positions with tensors of {[len(rows) for rows in hidden]} rows")
        decoded = time.perf_counter()
        outputs = self._stage.forward(asked)
        inferred = time.perf_counter()
        if len(entries) == 1 and entries[0].count == 1:
            self.token_times.append(inferred - decoded)
        if self._tail:
            drawn = self._draw(step, outputs[0])
            spent = Spent(waiting, decoded - began + time.perf_counter() - inferred, inferred - decoded)
            return Drawn(epoch=step.epoch, step=step.step, tokens=drawn, spent=(*step.spent, spent)), ()
        headers, payloads = encode_all(outputs, self._codec)
        spent = Spent(waiting, decoded - began + time.perf_counter() - inferred, inferred - decoded)
        return msgspec.structs.replace(step, tensors=headers, spent=(*step.spent, spent)), payloads

    def _empty(self, step: RingStep) -> Output:
        if self._tail:
            return Drawn(epoch=step.epoch, step=step.step, tokens=()), ()
        return step, ()

    def _draw(self, step: RingStep, logits: Rows) -> tuple[tuple[int, int], ...]:
        wanted = [entry for entry in step.entries for _ in entry.rows]
        return tuple(
            (entry.sequence, choose(row, engine_sampling(entry.sampling), entry.start + entry.count))
            for entry, row in zip(wanted, logits, strict=True)
        )
