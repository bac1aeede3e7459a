"""Stages of a real model: what they refuse, and what they give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from meshinfer.config import Folders
from meshinfer.engine.devices import resolve
from meshinfer.engine.pipeline import Pipeline
from meshinfer.engine.stage import StageOptions, open_stage
from meshinfer.engine.step import Entry, Stage, Step
from meshinfer.errors import CorruptFileError, KvBudgetError, RangeError, StepError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, SequenceId
from tests.cli.calls import flip_byte

A, B = SequenceId(1), SequenceId(2)
BACK_ENDS: tuple[KvBackend, ...] = ("paged", "stateful")


def options(kv: KvBackend, budget_bytes: int = 1 << 20) -> StageOptions:
    return StageOptions(resolve("cpu"), kv, "exact", budget_bytes)


def loaded(home: Folders) -> tuple[Store, Manifest]:
    store = Store(home)
    return store, store.load("tiny")


@pytest.fixture(params=BACK_ENDS)
def stage(request: pytest.FixtureRequest, tiny_home: Folders) -> Iterator[Stage]:
    """The whole tiny model as one stage."""
    store, manifest = loaded(tiny_home)
    opened = open_stage(store, manifest, 0, len(manifest.shards), options(request.param))
    yield opened
    opened.close()


def tokens(entry: Entry, *more: Entry) -> Step:
    """A step of arbitrary tokens."""
    entries = (entry, *more)
    return Step(entries, tokens=np.arange(sum(e.count for e in entries), dtype=np.int64) + 5)


@pytest.mark.parametrize("bounds", [(0, 0), (2, 1), (-1, 2), (0, 5), (4, 5)])
def test_a_range_outside_the_model_is_refused(tiny_home: Folders, bounds: tuple[int, int]) -> None:
    store, manifest = loaded(tiny_home)
    with pytest.raises(RangeError, match=rf"shards {bounds[0]}\.\.{bounds[1]} are not in tiny: it has 0\.\.4"):
        open_stage(store, manifest, *bounds, options("paged"))


@pytest.mark.parametrize("kv", BACK_ENDS)
def test_a_budget_below_a_block_holds_no_sequence(tiny_home: Folders, kv: KvBackend) -> None:
    store, manifest = loaded(tiny_home)
    small = open_stage(store, manifest, 0, 4, options(kv, 100))
    assert small.kv_blocks == 0 and small.block_bytes > 100
    pipeline = Pipeline([small])
    with pytest.raises(KvBudgetError, match="the budget has room for 0 tokens"):
        pipeline.require_capacity(1)
    with pytest.raises(KvBudgetError, match="1 more KV blocks of 32 tokens needed, 0 of 0 free"):
        pipeline.forward([Entry(A, 0, 1, (0,))], np.zeros(1, np.int64))
    pipeline.close()


@pytest.mark.parametrize("kv", BACK_ENDS)
@pytest.mark.parametrize("bounds", [(0, 1), (3, 4)], ids=["embedding", "head"])
def test_a_stage_without_layers_needs_no_budget(tiny_home: Folders, kv: KvBackend, bounds: tuple[int, int]) -> None:
    store, manifest = loaded(tiny_home)
    alone = open_stage(store, manifest, *bounds, options(kv, 0))
    assert alone.block_bytes == 0 and alone.kv_blocks > 1 << 30
    alone.close()


def test_a_refused_step_changes_nothing(stage: Stage) -> None:
    blocks = (0, 1)
    first = stage.forward(tokens(Entry(A, 0, 6, (5,), blocks)))[0].copy()
    for wrong in (Entry(A, 7, 1, (0,), blocks), Entry(B, 1, 1, (0,), (2,)), Entry(A, 6, 1, (1,), blocks)):
        with pytest.raises(StepError):
            stage.forward(tokens(wrong))
    with pytest.raises(StepError, match="is in the step twice"):
        stage.forward(tokens(Entry(A, 6, 1, (0,), blocks), Entry(A, 7, 1, (0,), blocks)))
    more = Entry(A, 6, 3, (2,), blocks)
    after = stage.forward(tokens(more))[0].copy()
    stage.release(A)
    assert np.array_equal(stage.forward(tokens(Entry(A, 0, 6, (5,), blocks)))[0], first)
    assert np.array_equal(stage.forward(tokens(more))[0], after)


def test_a_table_shorter_than_the_sequence_is_refused(tiny_home: Folders) -> None:
    store, manifest = loaded(tiny_home)
    paged = open_stage(store, manifest, 0, 4, options("paged"))
    with pytest.raises(KvBudgetError, match="33 positions need 2 KV blocks, the sequence has 1"):
        paged.forward(tokens(Entry(A, 0, 33, (32,), (0,))))
    paged.close()


@pytest.mark.parametrize("wrong", [-1, 1 << 20, 1 << 40])
def test_a_block_that_the_stage_does_not_have_is_refused(tiny_home: Folders, wrong: int) -> None:
    store, manifest = loaded(tiny_home)
    paged = open_stage(store, manifest, 0, 4, options("paged"))
    with pytest.raises(StepError, match="KV block"):
        paged.forward(tokens(Entry(A, 0, 6, (5,), (wrong,))))
    paged.close()


def test_what_was_forgotten_can_be_begun_again(stage: Stage) -> None:
    step = tokens(Entry(A, 0, 6, (5,), (0, 1)))
    first = stage.forward(step)[0].copy()
    stage.release(A)
    stage.release(B)
    with pytest.raises(StepError, match="has 0 positions and cannot start at 6"):
        stage.forward(tokens(Entry(A, 6, 1, (0,), (0, 1))))
    assert np.array_equal(stage.forward(step)[0], first)


@pytest.mark.parametrize("part", ["graph", "weights"])
def test_a_damaged_file_is_named_with_its_hash(
    tiny_home: Folders, copy_home: Callable[[Folders], Folders], part: str
) -> None:
    store, manifest = loaded(copy_home(tiny_home))
    ref = getattr(manifest.shards[2], part)
    flip_byte(store.path(ref))
    with pytest.raises(CorruptFileError) as caught:
        open_stage(store, manifest, 1, 4, options("paged"))
    assert caught.value.expected == ref.sha256 and ref.name in str(caught.value)
    open_stage(store, manifest, 0, 2, options("paged")).close()
