"""Whatever users ask for and whatever fails: no block is lost, and every request ends once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshinfer.engine.sampling import Sampling
from meshinfer.planning.plan import Pool
from meshinfer.ring.scheduler import Emission, NextStep, Request, RequestKey, Scheduler, StepNumber
from meshinfer.types import NodeId, SequenceId

ORIGIN = NodeId("origin")
EOS = 7


def request(number: int, tokens: int = 3, max_tokens: int = 4) -> Request:
    first = 1000 * number
    return Request((ORIGIN, number), np.arange(first, first + tokens), Sampling(), max_tokens, frozenset({EOS}))


def steps(scheduler: Scheduler) -> list[NextStep]:
    """All steps that may start now."""
    started = []
    while (step := scheduler.next_step()) is not None:
        started.append(step)
    return started


def drawn(step: NextStep, token: int = 1) -> dict[SequenceId, int]:
    return {entry.sequence: token for entry in step.entries if entry.rows}


class Machine(RuleBasedStateMachine):
    """Follows every sequence through the steps: what is fed, in which order, with which blocks."""

    @initialize(
        stages=st.integers(1, 4), blocks=st.integers(2, 12), most=st.integers(1, 5), chunk=st.sampled_from([1, 4, 64])
    )
    def begin(self, stages: int, blocks: int, most: int, chunk: int) -> None:
        self.stages, self.pool, self.most, self.chunk = stages, Pool(blocks, 4), most, chunk
        self.scheduler = Scheduler(stages, self.pool, most, chunk)
        self.asked: dict[RequestKey, Request] = {}
        self.cancelled: set[RequestKey] = set()
        self.emitted: dict[RequestKey, list[int]] = defaultdict(list)
        self.ended: dict[RequestKey, str] = {}
        self.flying: dict[StepNumber, NextStep] = {}
        self.fed: dict[SequenceId, list[int]] = defaultdict(list)
        self.key_of: dict[SequenceId, RequestKey] = {}
        self.in_steps: dict[SequenceId, int] = defaultdict(int)
        self.released: dict[SequenceId, int] = defaultdict(int)
        self.again: set[SequenceId] = set()
        """Whose release was in a step that failed: some stages may not have heard of it."""
        self.number = 0
        self.lived: set[SequenceId] = set()

    @rule(tokens=st.integers(0, 30), most=st.integers(0, 20))
    def submit(self, tokens: int, most: int) -> None:
        self.number += 1
        wanted = request(self.number, tokens, most)
        self.asked[wanted.key] = wanted
        self.take(self.scheduler.submit(wanted))
        fits = -(-(tokens + most) // 4) <= self.pool.blocks
        refused = not fits or tokens == 0 or most == 0
        assert (wanted.key in self.ended) == refused

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = (ORIGIN, data.draw(st.integers(1, max(1, self.number)), label="number"))
        self.scheduler.cancel(key)
        if key not in self.ended and key in self.asked:
            self.cancelled.add(key)
            self.ended[key] = "cancelled"

    @rule()
    def start(self) -> None:
        for step in steps(self.scheduler):
            self.check_step(step)

    @precondition(lambda self: self.flying)
    @rule(token=st.sampled_from([1, 2, EOS]))
    def complete(self, token: int) -> None:
        step = self.flying.pop(min(self.flying))
        self.returned(step)
        chosen = drawn(step, token)
        emissions = self.scheduler.complete(step.number, chosen)
        self.take(emissions)
        wanted = {self.key_of[sequence] for sequence in chosen} - self.cancelled
        assert {emission.key for emission in emissions} <= wanted

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        step = self.flying.pop(data.draw(st.sampled_from(sorted(self.flying)), label="step"))
        self.returned(step)
        self.again.update(step.released)
        emissions = self.scheduler.fail(step.number, "out of memory")
        assert all(emission.retry and emission.finish == "failed" for emission in emissions)
        self.take(emissions)
        for entry in step.entries:
            assert self.key_of[entry.sequence] in self.ended

    @rule()
    def something_unknown_comes_back(self) -> None:
        assert self.scheduler.complete(StepNumber(10**6), {}) == []
        assert self.scheduler.fail(StepNumber(10**6), "") == []
        self.scheduler.cancel((NodeId("nobody"), 1))

    def returned(self, step: NextStep) -> None:
        for entry in step.entries:
            self.in_steps[entry.sequence] -= 1

    def take(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            assert emission.key not in self.ended, "news of a request that has ended"
            self.emitted[emission.key] += emission.tokens
            if emission.finish:
                self.ended[emission.key] = emission.finish
                asked = self.asked[emission.key]
                if emission.finish == "length":
                    assert len(self.emitted[emission.key]) == asked.max_tokens
                if emission.finish == "failed" and not emission.retry and asked.max_tokens and len(asked.tokens):
                    assert str(len(asked.tokens) + asked.max_tokens) in emission.reason
                    assert str(self.pool.blocks * self.pool.block_tokens) in emission.reason

    def check_step(self, step: NextStep) -> None:
        self.flying[step.number] = step
        assert step.entries or step.released
        assert len(step.tokens) == sum(entry.count for entry in step.entries) <= self.chunk
        for sequence in step.released:
            assert self.in_steps[sequence] == 0, "released while a step has it"
            assert not self.released[sequence] or sequence in self.again
            self.again.discard(sequence)
            self.released[sequence] += 1
            self.lived.discard(sequence)
        at = 0
        for entry, sampling in zip(step.entries, step.samplings, strict=True):
            chunk = step.tokens[at : at + entry.count].tolist()
            at += entry.count
            if entry.sequence not in self.key_of:
                key = (ORIGIN, int(chunk[0]) // 1000)
                earlier = [k for k in self.asked if k not in self.ended and k not in self.key_of.values() and k < key]
                assert not earlier, "not first come, first served"
                self.key_of[entry.sequence] = key
            key = self.key_of[entry.sequence]
            assert key not in self.ended and not self.released[entry.sequence]
            known = [*self.asked[key].tokens.tolist(), *self.emitted[key]]
            assert entry.start == len(self.fed[entry.sequence])
            self.fed[entry.sequence] += chunk
            assert self.fed[entry.sequence] == known[: entry.start + entry.count]
            assert entry.rows == ((entry.count - 1,) if entry.start + entry.count == len(known) else ())
            assert len(entry.blocks) == -(-(entry.start + entry.count) // 4)
            assert sampling == self.asked[key].sampling
            self.in_steps[entry.sequence] += 1
            self.lived.add(entry.sequence)

    @invariant()
    def blocks_are_neither_lost_nor_shared(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler._blocks
        tables = [block for table in pool._tables.values() for block in table]
        assert len(tables) == len(set(tables)) and len(tables) + pool.free == pool.count
        assert not set(tables) - set(range(pool.count))
        assert set(pool._tables) == set(self.scheduler._running)

    @invariant()
    def no_more_steps_than_stages_and_no_more_sequences_than_wanted(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.scheduler.steps_in_flight == len(self.flying) <= self.stages
            assert self.scheduler.running <= self.most

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            self.start()
            if not self.flying:
                break
            self.complete(1)
        assert self.ended.keys() == self.asked.keys(), "a request that never ends"
        assert self.scheduler.free_blocks == self.pool.blocks and not self.scheduler.requests()
        assert set(self.key_of) == {sequence for sequence, times in self.released.items() if times}
        assert not self.again and not self.lived


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_two_users_keep_two_stages_busy() -> None:
    scheduler = Scheduler(2, Pool(100, 16), 8)
    for number in (1, 2):
        scheduler.submit(request(number, 5, 50))
    first = steps(scheduler)
    assert [len(step.entries) for step in first] == [1, 1]
    for _ in range(10):
        scheduler.complete(first[0].number, drawn(first[0]))
        first = [*first[1:], *steps(scheduler)]
        assert scheduler.steps_in_flight == 2 and len({e.sequence for step in first for e in step.entries}) == 2


def test_a_long_prompt_fills_the_stages_chunk_after_chunk() -> None:
    scheduler = Scheduler(3, Pool(100, 16), 8, chunk_tokens=10)
    scheduler.submit(request(1, 35, 5))
    assert [(s.entries[0].start, s.entries[0].count) for s in steps(scheduler)] == [(0, 10), (10, 10), (20, 10)]


def rounds_until_each_has_a_token(scheduler: Scheduler, readers: set[RequestKey], flying: list[NextStep]) -> int:
    waiting, rounds = set(readers), 0
    while waiting:
        flying += steps(scheduler)
        step = flying.pop(0)
        waiting -= {emission.key for emission in scheduler.complete(step.number, drawn(step))}
        rounds += 1
        assert rounds < 50
    return rounds


def test_long_prompts_do_not_starve_those_who_read_along() -> None:
    for stages in (1, 2, 4):
        scheduler = Scheduler(stages, Pool(10000, 16), 16, chunk_tokens=64)
        readers = {(ORIGIN, number) for number in range(1, 5)}
        for number in range(1, 5):
            scheduler.submit(request(number, 4, 1000))
        flying: list[NextStep] = []
        rounds_until_each_has_a_token(scheduler, readers, flying)
        for number in range(5, 9):
            scheduler.submit(request(number, 5000, 10))
        rounds_until_each_has_a_token(scheduler, readers, flying)
        for _ in range(20):
            assert rounds_until_each_has_a_token(scheduler, readers, flying) <= 6 * stages


def test_who_comes_first_is_served_first_even_if_a_smaller_one_would_fit() -> None:
    scheduler = Scheduler(1, Pool(4, 4), 8)
    assert [scheduler.submit(request(n, *size)) for n, size in [(1, (8, 4)), (2, (8, 4)), (3, (1, 1))]] == [[]] * 3
    step = scheduler.next_step()
    assert step is not None and scheduler.running == 1 and scheduler.waiting == 2


def test_what_never_fits_is_refused_with_numbers() -> None:
    scheduler = Scheduler(1, Pool(4, 16), 8)
    (emission,) = scheduler.submit(request(1, 60, 5))
    assert emission.finish == "failed" and not emission.retry
    assert "65" in emission.reason and "64" in emission.reason


def test_a_cancelled_request_frees_its_blocks_with_the_next_step() -> None:
    scheduler = Scheduler(2, Pool(8, 4), 8)
    scheduler.submit(request(1, 8, 8))
    (step,) = steps(scheduler)
    scheduler.cancel((ORIGIN, 1))
    assert steps(scheduler) == [] and scheduler.free_blocks == 4  # a stage may be writing to them
    assert scheduler.complete(step.number, drawn(step)) == []
    (release,) = steps(scheduler)
    assert release.released == (step.entries[0].sequence,) and not release.entries
    assert scheduler.free_blocks == 8


def test_stages_behind_one_that_failed_hear_of_releases_too() -> None:
    scheduler = Scheduler(2, Pool(8, 4), 8)
    scheduler.submit(request(1, 4, 1))
    (step,) = steps(scheduler)
    scheduler.complete(step.number, drawn(step))
    (release,) = steps(scheduler)
    scheduler.fail(release.number, "broken")
    (again,) = steps(scheduler)
    assert again.released == release.released
