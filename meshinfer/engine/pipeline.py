"""All stages of a model in one process: what a ring is without a network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from meshinfer.engine.blocks import BlockPool
from meshinfer.engine.stage import StageOptions, open_stage
from meshinfer.engine.step import Entry, Rows, Stage, Step, Tokens
from meshinfer.errors import InputError, KvBudgetError, StepError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import SequenceId


def even_cuts(manifest: Manifest, stages: int) -> list[tuple[int, int]]:
    """Ranges of shards with about the same bytes each; at most one stage a shard. Raises InputError."""
    sizes = [spec.size_bytes for spec in manifest.shards]
    if not 1 <= stages <= len(sizes):
        raise InputError(f"{manifest.name} has {len(sizes)} shards: 1 to {len(sizes)} stages, not {stages}")
    cuts, total = [0], sum(sizes)
    for stage in range(1, stages):
        lowest, highest = cuts[-1] + 1, len(sizes) - (stages - stage)
        target = total * stage / stages
        cuts.append(min(range(lowest, highest + 1), key=lambda cut: abs(sum(sizes[:cut]) - target)))
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))


class Pipeline:
    """Stages in order, and the pool their KV blocks come from."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        sizes = {stage.block_tokens for stage in stages if stage.block_bytes} or {stages[0].block_tokens}
        if len(sizes) > 1:
            raise StepError(f"stages with KV blocks of different sizes ({sizes} tokens) cannot share block tables")
        self.pool = BlockPool(min(stage.kv_blocks for stage in stages), sizes.pop())

    @property
    def rewinds(self) -> bool:
        return all(stage.rewinds for stage in self.stages)

    def require_capacity(self, tokens: int) -> None:
        """Raise KvBudgetError, saying what is needed, unless one sequence of `tokens` positions fits."""
        needed = self.pool.needed(tokens)
        if needed > self.pool.count:
            block_bytes = sum(stage.block_bytes for stage in self.stages)
            raise KvBudgetError(
                f"one sequence of {tokens} tokens needs {needed * block_bytes / 1e6:.1f} MB of KV cache, "
                f"the budget has room for {self.pool.count * self.pool.block_tokens} tokens"
            )

    def forward(self, entries: Sequence[Entry], tokens: Tokens) -> Rows:
        """Run entries through all stages and return the logits of their rows, [rows, vocabulary] f32.

        `tokens`: [total] i64. Block tables are filled in here. Raises KvBudgetError with nothing run, StepError,
        DeviceError.
        """
        if not entries or sum(entry.count for entry in entries) != len(tokens):
            raise StepError(
                f"{len(tokens)} tokens for {len(entries)} entries of {[e.count for e in entries]} positions"
            )
        tables = self.pool.resize_all({entry.sequence: entry.end for entry in entries})
        placed = tuple(dataclasses.replace(entry, blocks=tables[entry.sequence]) for entry in entries)
        outputs: tuple[Rows, ...] = ()
        for index, stage in enumerate(self.stages):
            step = Step(placed, tokens=tokens if index == 0 else None, hidden=outputs)
            outputs = stage.forward(step)
        return outputs[0]

    def release(self, sequence: SequenceId) -> None:
        """Forget a sequence in every stage and take its blocks back."""
        for stage in self.stages:
            stage.release(sequence)
        self.pool.release(sequence)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


@contextmanager
def open_pipeline(
    store: Store, manifest: Manifest, cuts: Sequence[tuple[int, int]], options: StageOptions
) -> Iterator[Pipeline]:
    """Open the stages of `cuts`, several at once, because OpenVINO compiles each on one core.

    The KV budget is shared among them by what a token costs in each. Raises what `open_stage` raises.
    """

    def open_one(cut: tuple[int, int]) -> Stage:
        part = sum(spec.kv_bytes_per_token for spec in manifest.range(*cut))
        share = options.kv_budget_bytes * part // (manifest.kv_bytes_per_token or 1)
        return open_stage(store, manifest, *cut, dataclasses.replace(options, kv_budget_bytes=share))

    opening: list[Future[Stage]] = []
    try:
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="open-stage") as pool:
            opening += [pool.submit(open_one, cut) for cut in cuts]
            try:
                stages = [stage.result() for stage in opening]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        yield Pipeline(stages)
    finally:
        for stage in opening:
            if not stage.cancelled() and stage.exception() is None:
                stage.result().close()
