"""What one stage makes of one step."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from meshinfer.engine.sampling import Sampling, choose
from meshinfer.errors import InputError, StepError
from meshinfer.ring.convert import engine_sampling, stage_entries, token_bytes, tokens_of, wire_sampling
from meshinfer.ring.work import Job, StageWork
from meshinfer.types import SequenceId
from meshinfer.wire.frames import FrameError
from meshinfer.wire.messages import Drawn, RingStep, WireEntry, WireSampling
from tests.ring.fake import FakeStage, logits_of, stage_value

TOKENS = np.array([4, 5, 6, 9], np.int64)
SAMPLED = WireSampling(0.9, 0, 1.0, 11)
ENTRIES = (WireEntry(1, 0, 3, (2,), (0,)), WireEntry(2, 0, 1, (0,), (1,), SAMPLED))
STEP = RingStep(epoch=1, step=1, entries=ENTRIES)


def work(number: int, stages: int, block_tokens: int = 4, block_bytes: int = 64) -> tuple[FakeStage, StageWork]:
    stage = FakeStage(number, stages, 8, block_tokens, block_bytes)
    return stage, StageWork(stage, "f32", 4, tail=number == stages - 1)


def test_two_stages_draw_a_token_for_each_entry_that_wants_one() -> None:
    _, head = work(0, 2)
    _, tail = work(1, 2)
    hidden, payloads = head.run(Job(STEP, 0.0, tokens=TOKENS))
    assert isinstance(hidden, RingStep) and len(hidden.tensors) == 1 and len(hidden.spent) == 1
    drawn, nothing = tail.run(Job(hidden, 0.0, payload=memoryview(b"".join(payloads))))
    assert isinstance(drawn, Drawn) and nothing == () and len(drawn.spent) == 2
    first = [stage_value(0, [4, 5, 6][: n + 1]) for n in range(3)]
    greedy = choose(logits_of(stage_value(1, first)), Sampling(), 3)
    sampled = choose(logits_of(stage_value(1, [stage_value(0, [9])])), Sampling(0.9, 0, 1.0, 11), 1)
    assert drawn.tokens == ((1, greedy), (2, sampled))


def test_a_step_without_entries_only_releases() -> None:
    stage, head = work(0, 2)
    head.run(Job(STEP, 0.0, tokens=TOKENS))
    release = RingStep(epoch=1, step=2, entries=(), released=(1, 2, 3))
    passed, payloads = head.run(Job(release, 0.0, tokens=np.zeros(0, np.int64)))
    assert passed == release and payloads == () and stage.lengths.held == {} and stage.calls == 1
    _, tail = work(1, 2)
    assert tail.run(Job(release, 0.0))[0] == Drawn(epoch=1, step=2, tokens=())


def test_what_is_released_makes_room_for_what_the_same_step_brings() -> None:
    _, head = work(0, 2)
    head.run(Job(STEP, 0.0, tokens=TOKENS))
    again = RingStep(epoch=1, step=2, entries=(WireEntry(3, 0, 1, (0,), (0,)),), released=(1,))
    head.run(Job(again, 0.0, tokens=TOKENS[:1]))


def test_bytes_that_are_not_the_tensors_are_no_step() -> None:
    _, head = work(0, 2)
    _, tail = work(1, 2)
    hidden, payloads = head.run(Job(STEP, 0.0, tokens=TOKENS))
    data = b"".join(payloads)
    assert isinstance(hidden, RingStep)
    for wrong in (b"", data[:-4], data + b"0000"):
        with pytest.raises(FrameError):
            tail.run(Job(hidden, 0.0, payload=memoryview(wrong)))


def test_tensors_that_are_not_those_of_the_entries_are_no_step() -> None:
    _, head = work(0, 2)
    _, tail = work(1, 2)
    hidden, payloads = head.run(Job(STEP, 0.0, tokens=TOKENS))
    assert isinstance(hidden, RingStep)
    more = replace(hidden, entries=(*hidden.entries, WireEntry(3, 0, 5, (), (2, 3))))
    with pytest.raises(StepError, match="9 positions"):
        tail.run(Job(more, 0.0, payload=memoryview(b"".join(payloads))))
    with pytest.raises(StepError):
        tail.run(Job(replace(hidden, tensors=()), 0.0))


def test_a_chunk_that_came_without_the_one_before_is_refused() -> None:
    _, head = work(0, 2)
    late = RingStep(epoch=1, step=1, entries=(WireEntry(1, 3, 1, (0,), (0,)),))
    with pytest.raises(StepError):
        head.run(Job(late, 0.0, tokens=TOKENS[:1]))


def test_a_block_of_the_ring_is_several_of_a_stage_with_smaller_ones() -> None:
    (entry,) = stage_entries([WireEntry(9, 8, 2, (1,), (5, 2, 0))], factor=2)
    assert entry.blocks == (10, 11, 4, 5, 0, 1)
    assert (entry.sequence, entry.start, entry.count, entry.rows) == (SequenceId(9), 8, 2, (1,))


def test_a_stage_without_state_takes_blocks_as_they_are() -> None:
    stage, head = work(0, 2, block_tokens=1, block_bytes=0)
    stage.block_tokens, stage.memory = 4, np.full((8, 4), -1, np.int64)
    head.run(Job(STEP, 0.0, tokens=TOKENS))
    assert set(stage.owner) == {0, 1}


def test_tokens_and_samplings_travel_unchanged() -> None:
    assert tokens_of(token_bytes([0, 1, 2**31 - 1])).tolist() == [0, 1, 2**31 - 1]
    with pytest.raises(InputError):
        tokens_of(b"12345")
    sampling = Sampling(0.7, 40, 0.9, (1 << 64) - 1)
    assert engine_sampling(wire_sampling(sampling)) == sampling
    assert wire_sampling(Sampling()) is None and engine_sampling(None) == Sampling()
    with pytest.raises(InputError):
        engine_sampling(WireSampling(1.0, 0, 0.0, 1))
