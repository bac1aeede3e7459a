"""The stages of this node: fetched, compiled, checked and warmed up before they count as ready.

A stage that fits the next plan is kept. All that takes time runs in threads; `Stages` itself belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshinfer.agent.capacity import Capacity
from meshinfer.engine.calibrate import undisturbed
from meshinfer.engine.selfcheck import self_check
from meshinfer.engine.stage import StageOptions, open_stage
from meshinfer.engine.step import Entry, Stage, Step
from meshinfer.errors import KvBudgetError
from meshinfer.negotiation.plan import demand_of
from meshinfer.planning.cost import StagePlan
from meshinfer.planning.plan import Plan, Pool
from meshinfer.shards.manifest import FileRef, Manifest
from meshinfer.shards.store import Store
from meshinfer.types import SequenceId

log = logging.getLogger(__name__)

WARM_STEPS, TIMED_STEPS = 3, 9
_WARM = SequenceId((1 << 52) - 1)

FetchFiles = Callable[[Sequence[FileRef]], Awaitable[None]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StageKey:
    """What makes two stages the same."""

    fingerprint: str
    start: int
    stop: int
    options: StageOptions


@dataclass(slots=True)
class OpenStage:
    """A compiled stage; `size_bytes` is what weights and KV cache take."""

    key: StageKey
    stage: Stage
    size_bytes: int

    @property
    def pool(self) -> Pool:
        return Pool(self.stage.kv_blocks, self.stage.block_tokens)


class Stages:
    """The stage that serves and the one that is being prepared."""

    def __init__(
        self, store: Store, capacity: Capacity, fetch: FetchFiles, say: Say, stop_serving: Callable[[], Awaitable[None]]
    ) -> None:
        self._store, self._capacity, self._fetch, self._say = store, capacity, fetch, say
        self._stop_serving = stop_serving
        self.serving: OpenStage | None = None
        self._prepared: tuple[int, OpenStage] | None = None
        self._opening: asyncio.Future[Stage] | None = None
        self.token_s = 0.0
        """What one token took in the stage that was prepared last."""

    async def prepare(self, plan: Plan, part: StagePlan, manifest: Manifest) -> Pool:
        """Make this node's stage of a plan ready. Raises FetchError, SelfCheckError, and all of opening a stage."""
        await self.drop()
        specs = manifest.range(part.start, part.stop)
        choice = plan.choice
        demand = demand_of(choice, manifest)
        budget = sum(spec.kv_bytes_per_token for spec in specs) * demand.context_tokens * demand.sequences
        options = self._capacity.options(plan.kv, choice.precision, budget)
        key = StageKey(choice.fingerprint, part.start, part.stop, options)
        if self.serving is not None and self.serving.key == key:
            self._prepared = plan.epoch, self.serving
            return self.serving.pool
        await self._fetch(files_of(manifest, part))
        size = sum(spec.size_bytes for spec in specs) + budget
        if self.serving is not None and self.serving.size_bytes + size > self._capacity.memory_bytes():
            log.info(
                "two stages do not fit into the memory budget: the one that serves is closed before the next is made"
            )
            await self._stop_serving()
            await self.close()
        self._say("compiling")
        began = time.monotonic()
        if self._opening is not None:  # a thread that compiles cannot be stopped, and two would need twice the memory
            await asyncio.wait([self._opening])
        self._opening = asyncio.ensure_future(asyncio.to_thread(self._open, manifest, part, options))
        try:
            stage = await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            self._opening.add_done_callback(_close)
            raise
        self._opening = None
        opened = OpenStage(key, stage, size)
        self._prepared = plan.epoch, opened
        log.info("shards %d to %d are ready after %.1f s", part.start, part.stop - 1, time.monotonic() - began)
        return opened.pool

    def take(self, epoch: int) -> tuple[OpenStage | None, OpenStage | None]:
        """The stage prepared for this epoch becomes the serving one; and the one that is to be closed, if any."""
        old = self.serving
        ready = self._prepared[1] if self._prepared and self._prepared[0] == epoch else None
        self._prepared = None
        self.serving = ready
        return ready, old if old is not ready else None

    async def drop(self) -> None:
        """Let go of what was prepared and is not served."""
        if self._prepared is not None:
            _, opened = self._prepared
            self._prepared = None
            if opened is not self.serving:
                await asyncio.to_thread(opened.stage.close)

    async def close(self) -> None:
        """Let go of everything."""
        await self.drop()
        if self.serving is not None:
            serving, self.serving = self.serving, None
            await asyncio.to_thread(serving.stage.close)

    def _open(self, manifest: Manifest, part: StagePlan, options: StageOptions) -> Stage:
        stage = open_stage(self._store, manifest, part.start, part.stop, options)
        try:
            if stage.kv_blocks < 1:
                raise KvBudgetError(f"the KV cache of shards {part.start} to {part.stop - 1} has no room for one block")
            error = self_check(stage, self._store, manifest, part.start, part.stop, options.precision)
            log.info("self-check of shards %d to %d: off by %.2g", part.start, part.stop - 1, error)
            self.token_s = warm_up(stage, manifest, part)
        except BaseException:
            stage.close()
            raise
        return stage


def _close(opening: asyncio.Future[Stage]) -> None:
    """Let go of a stage that nobody wants any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def warm_up(stage: Stage, manifest: Manifest, part: StagePlan) -> float:
    """A few single tokens, of which the first ones compile kernels; the seconds that one takes."""
    tail = part.stop == len(manifest.shards)
    widths = [] if part.start == 0 else [tensor.shape[-1] for tensor in manifest.shards[part.start - 1].outputs]
    hidden = tuple(np.zeros((1, width), np.float32) for width in widths)
    took = []
    for start in range(WARM_STEPS + TIMED_STEPS):
        entry = Entry(_WARM, start, 1, (0,) if tail else (), (0,))
        tokens = np.zeros(1, np.int64) if part.start == 0 else None
        began = time.perf_counter()
        stage.forward(Step((entry,), tokens=tokens, hidden=hidden))
        took.append(time.perf_counter() - began)
    stage.release(_WARM)
    return undisturbed(took[WARM_STEPS:])


def files_of(manifest: Manifest, part: StagePlan) -> list[FileRef]:
    """The files of a stage, with the golden activations at its two ends."""
    refs = [ref for spec in manifest.range(part.start, part.stop) for ref in (spec.graph, spec.weights)]
    if manifest.golden:
        refs += [manifest.golden[index] for index in (part.start - 1, part.stop - 1) if index >= 0]
    return list({ref.sha256: ref for ref in refs}.values())
