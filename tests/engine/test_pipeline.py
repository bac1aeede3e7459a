"""Stages of one model in one process: where it is cut, what its cache holds, what happens when one cannot open."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.config import Folders
from meshinfer.engine import pipeline as under_test
from meshinfer.engine.devices import resolve
from meshinfer.engine.pipeline import Pipeline, even_cuts, open_pipeline
from meshinfer.engine.stage import StageOptions
from meshinfer.engine.step import Entry, Rows, Step
from meshinfer.errors import InputError, KvBudgetError, StepError
from meshinfer.shards.manifest import FileRef, Manifest, ShardSpec
from meshinfer.shards.store import Store
from meshinfer.types import SequenceId, Sha256

A, B = SequenceId(1), SequenceId(2)


def of_sizes(sizes: list[int], kv_bytes: int = 8) -> Manifest:
    """A manifest with one shard of each size, of which no file exists."""

    def shard(index: int, size: int) -> ShardSpec:
        kind = "embedding" if index == 0 else "head" if index == len(sizes) - 1 else "layer"
        graph, weights = FileRef("g.xml", Sha256("0" * 64), 0), FileRef("w.bin", Sha256(f"{index:064x}"), size)
        return ShardSpec(index, kind, graph, weights, (), (), kv_bytes if kind == "layer" else 0)

    shards = tuple(shard(index, size) for index, size in enumerate(sizes))
    return Manifest("m", "", "", "int4", 2048, shards, (), None, {}, ())


@dataclass
class AddsOne:
    """A stage whose every row is one more than what came in."""

    kv_blocks: int = 8
    block_bytes: int = 1000
    block_tokens: int = 4
    rewinds: bool = True
    closed: bool = False
    steps: list[Step] = field(default_factory=list)
    released: list[SequenceId] = field(default_factory=list)

    def forward(self, step: Step) -> tuple[Rows, ...]:
        self.steps.append(step)
        came_in = step.tokens.astype(np.float32)[:, None] if step.tokens is not None else step.hidden[0]
        return (came_in + 1,)

    def release(self, sequence: SequenceId) -> None:
        self.released.append(sequence)

    def close(self) -> None:
        self.closed = True


@given(sizes=st.lists(st.integers(0, 1000), min_size=3, max_size=40), data=st.data())
def test_every_shard_is_in_one_stage(sizes: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(sizes)))
    cuts = even_cuts(of_sizes(sizes), stages)
    assert len(cuts) == stages and cuts[0][0] == 0 and cuts[-1][1] == len(sizes)
    assert all(start < stop for start, stop in cuts)
    assert all(left[1] == right[0] for left, right in zip(cuts, cuts[1:], strict=False))


def test_stages_carry_about_the_same_bytes() -> None:
    assert even_cuts(of_sizes([10] * 12), 3) == [(0, 4), (4, 8), (8, 12)]
    assert even_cuts(of_sizes([100, 10, 10, 10, 10, 100]), 2) == [(0, 3), (3, 6)]
    assert even_cuts(of_sizes([1000, 1, 1, 1]), 3) == [(0, 1), (1, 2), (2, 4)]


@pytest.mark.parametrize("stages", [-1, 0, 5])
def test_more_stages_than_shards_are_refused(stages: int) -> None:
    with pytest.raises(InputError, match=f"m has 4 shards: 1 to 4 stages, not {stages}"):
        even_cuts(of_sizes([1] * 4), stages)


def test_a_step_goes_through_all_stages_with_the_same_blocks() -> None:
    stages = [AddsOne(), AddsOne(), AddsOne()]
    pipeline = Pipeline(stages)
    rows = pipeline.forward([Entry(A, 0, 5, (4,)), Entry(B, 0, 2, (1,))], np.arange(7))
    assert rows[:, 0].tolist() == [3, 4, 5, 6, 7, 8, 9]
    tables = [[entry.blocks for entry in stage.steps[0].entries] for stage in stages]
    assert tables[0] == tables[1] == tables[2]
    assert [len(table) for table in tables[0]] == [2, 1] and pipeline.pool.free == 5
    assert stages[0].steps[0].tokens is not None and stages[1].steps[0].tokens is None
    pipeline.release(A)
    assert pipeline.pool.free == 7 and [stage.released for stage in stages] == [[A]] * 3


def test_blocks_of_different_sizes_cannot_be_shared() -> None:
    with pytest.raises(StepError, match="different sizes"):
        Pipeline([AddsOne(block_tokens=16), AddsOne(block_tokens=32)])
    assert Pipeline([AddsOne(block_tokens=16), AddsOne(block_tokens=32, block_bytes=0)]).pool.block_tokens == 16


@pytest.mark.parametrize("counts", [[], [3], [1, 1, 1]])
def test_tokens_and_entries_have_to_agree(counts: list[int]) -> None:
    stage = AddsOne()
    entries = [Entry(SequenceId(n), 0, count) for n, count in enumerate(counts)]
    with pytest.raises(StepError, match="2 tokens for .* entries of"):
        Pipeline([stage]).forward(entries, np.zeros(2, np.int64))
    assert stage.steps == []


def test_the_smallest_cache_counts() -> None:
    pipeline = Pipeline([AddsOne(kv_blocks=8), AddsOne(kv_blocks=2, block_bytes=500_000), AddsOne(kv_blocks=1 << 40)])
    pipeline.require_capacity(8)
    with pytest.raises(KvBudgetError, match=r"one sequence of 9 tokens needs 1\.5 MB .*, the budget has room for 8 "):
        pipeline.require_capacity(9)


def test_what_does_not_fit_runs_nowhere() -> None:
    stages = [AddsOne(kv_blocks=2), AddsOne(kv_blocks=2)]
    pipeline = Pipeline(stages)
    pipeline.forward([Entry(A, 0, 4)], np.zeros(4, np.int64))
    with pytest.raises(KvBudgetError):
        pipeline.forward([Entry(A, 4, 1), Entry(B, 0, 1)], np.zeros(2, np.int64))
    assert [len(stage.steps) for stage in stages] == [1, 1] and pipeline.pool.free == 1


def test_no_stage_stays_open_when_one_cannot_open(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    opened: list[AddsOne] = []

    def open_stage(_: Store, __: Manifest, start: int, ___: int, ____: StageOptions) -> AddsOne:
        if start == 2:
            raise InputError("broken")
        opened.append(AddsOne())
        return opened[-1]

    monkeypatch.setattr(under_test, "open_stage", open_stage)
    manifest = of_sizes([1] * 6)
    with (
        pytest.raises(InputError, match="broken"),
        open_pipeline(store, manifest, even_cuts(manifest, 3), StageOptions(resolve("cpu"))),
    ):
        pytest.fail("it did open")
    assert opened and all(stage.closed for stage in opened)


def test_the_budget_is_shared_by_what_a_token_costs(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    budgets: dict[int, int] = {}

    def open_stage(_: Store, __: Manifest, start: int, ___: int, options: StageOptions) -> AddsOne:
        budgets[start] = options.kv_budget_bytes
        return AddsOne()

    monkeypatch.setattr(under_test, "open_stage", open_stage)
    manifest = of_sizes([1] * 6)
    options = StageOptions(resolve("cpu"), kv_budget_bytes=1000)
    with open_pipeline(store, manifest, [(0, 1), (1, 4), (4, 6)], options):
        assert budgets == {0: 0, 1: 750, 4: 250}


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(Folders(tmp_path_factory.mktemp("home")))
