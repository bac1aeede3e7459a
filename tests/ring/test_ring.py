"""A ring answers as one process would, whoever asks, cancels or fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from meshinfer.engine.sampling import Sampling
from meshinfer.ring.convert import token_bytes, wire_sampling
from meshinfer.types import NodeId
from meshinfer.wire.messages import Cancel, Drawn, Emit, RingStep, StepFailed, Submit
from tests.ring.fake import VOCABULARY, Ring, reference

EPOCH = 5
EOS = frozenset({3})


class Origin:
    """A node that asks; it asks again where it is told that it may."""

    def __init__(self, ring: Ring, name: str) -> None:
        self.ring, self.id = ring, NodeId(name)
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        ring.network.origins[self.id] = self.news
        self.answers: dict[int, list[int]] = {}
        self.finished: dict[int, Emit] = {}
        self.retries = 0
        self._asked: dict[int, Submit] = {}
        self._tokens: dict[int, list[int]] = {}

    def submit(self, number: int, tokens: list[int], sampling: Sampling, most: int) -> None:
        self._tokens[number], self.answers[number] = tokens, []
        self._asked[number] = Submit(
            epoch=EPOCH,
            number=number,
            tokens=token_bytes(tokens),
            sampling=wire_sampling(sampling),
            max_tokens=most,
            eos=tuple(EOS),
        )
        self.ring.network.post(self.id, self.ring.plan.ring.head, self._asked[number])

    def cancel(self, number: int) -> None:
        self.ring.network.post(self.id, self.ring.plan.ring.head, Cancel(epoch=EPOCH, number=number))

    async def take(self) -> Emit:
        """The next news; a request that may be tried again is submitted with what it has."""
        async with asyncio.timeout(20):
            emit = await self.news.get()
        assert isinstance(emit, Emit) and emit.number not in self.finished, "news after the end"
        self.answers[emit.number].extend(emit.tokens)
        if emit.finish == "failed" and emit.retry:
            self.retries += 1
            asked, so_far = self._asked[emit.number], self.answers[emit.number]
            again = Submit(
                epoch=EPOCH,
                number=emit.number,
                tokens=token_bytes([*self._tokens[emit.number], *so_far]),
                sampling=asked.sampling,
                max_tokens=asked.max_tokens - len(so_far),
                eos=asked.eos,
            )
            self.ring.network.post(self.id, self.ring.plan.ring.head, again)
        elif emit.finish:
            self.finished[emit.number] = emit
        return emit

    async def all_of(self, numbers: set[int]) -> None:
        while not numbers <= self.finished.keys():
            await self.take()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def some_requests(seed: int, count: int) -> dict[int, tuple[list[int], Sampling, int]]:
    random = np.random.default_rng(seed)
    return {
        number: (
            random.integers(0, VOCABULARY, int(random.integers(1, 24))).tolist(),
            Sampling(float(random.choice([0.0, 0.8])), 0, 0.95, int(random.integers(1 << 40))),
            int(random.integers(1, 24)),
        )
        for number in range(1, count + 1)
    }


@pytest.mark.parametrize("codec", ["f32", "f32+lz4"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_ring_answers_as_one_process_would(stages: int, codec: str) -> None:
    async def story() -> None:
        async with Ring(stages, seed=stages, codec=codec) as ring:
            origins = [Origin(ring, "laptop"), Origin(ring, "desk")]
            asked = [some_requests(10 * stages + place, 8) for place in range(2)]
            for number in range(1, 9):
                for origin, requests in zip(origins, asked, strict=True):
                    origin.submit(number, *requests[number])
                await asyncio.sleep(0)
            for origin, requests in zip(origins, asked, strict=True):
                await origin.all_of(set(requests))
                for number, (tokens, sampling, most) in requests.items():
                    expected = reference(stages, tokens, sampling, most, EOS)
                    assert origin.answers[number] == expected
                    assert origin.finished[number].finish == ("length" if len(expected) == most else "stop")
            await ring.idle()
            ring.check_nothing_is_left()
            ring.check_order()
            assert max(stage.widest for stage in ring.stages) > 1 or stages >= 4

    run(story())


def test_prompts_longer_than_a_chunk_go_in_by_parts() -> None:
    async def story() -> None:
        async with Ring(3, blocks=60) as ring:
            scheduler = ring.head.scheduler
            assert scheduler is not None
            scheduler.chunk_tokens = 5
            origin = Origin(ring, "laptop")
            requests = {n: ([*range(n, n + 20), *range(3 * n)], s, m) for n, (_, s, m) in some_requests(3, 5).items()}
            for number, asked in requests.items():
                origin.submit(number, *asked)
            await origin.all_of(set(requests))
            for number, (tokens, sampling, most) in requests.items():
                assert origin.answers[number] == reference(3, tokens, sampling, most, EOS)
            await ring.idle()
            ring.check_nothing_is_left()

    run(story())


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4, 2), (2, 8)])
def test_stages_with_smaller_blocks_than_the_ring(sizes: tuple[int, ...]) -> None:
    async def story() -> None:
        async with Ring(len(sizes), blocks=20, block_tokens=sizes) as ring:
            origin = Origin(ring, "laptop")
            requests = some_requests(7, 6)
            for number, asked in requests.items():
                origin.submit(number, *asked)
            await origin.all_of(set(requests))
            for number, (tokens, sampling, most) in requests.items():
                assert origin.answers[number] == reference(len(sizes), tokens, sampling, most, EOS)
            await ring.idle()
            ring.check_nothing_is_left()

    run(story())


@pytest.mark.parametrize("seed", range(3))
def test_who_cancels_gets_nothing_more_and_disturbs_nobody(seed: int) -> None:
    async def story() -> None:
        random = np.random.default_rng(seed)
        async with Ring(3, seed) as ring:
            origin = Origin(ring, "laptop")
            requests = some_requests(seed, 10)
            gone: set[int] = set()
            for number, asked in requests.items():
                origin.submit(number, *asked)
                if number % 3 == 0:
                    while random.integers(4) and not {number} <= origin.finished.keys():
                        await origin.take()
                    origin.cancel(number)
                    gone.add(number)
            await origin.all_of(set(requests) - gone)
            for number, (tokens, sampling, most) in requests.items():
                expected = reference(3, tokens, sampling, most, EOS)
                assert origin.answers[number] == expected[: len(origin.answers[number])]
                assert number in gone or origin.answers[number] == expected
            await ring.idle()
            ring.check_nothing_is_left()

    run(story())


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_requests_of_a_step_that_failed_may_be_tried_again_and_the_others_go_on(broken: int) -> None:
    async def story() -> None:
        async with Ring(3, seed=broken) as ring:
            ring.stages[broken].failing = {3, 4, 9, 20}
            origin = Origin(ring, "laptop")
            requests = some_requests(5, 8)
            for number, asked in requests.items():
                origin.submit(number, *asked)
            await origin.all_of(set(requests))
            assert origin.retries >= 2
            for number, (tokens, sampling, most) in requests.items():
                assert origin.answers[number] == reference(3, tokens, sampling, most, EOS)
            await ring.idle()
            ring.check_nothing_is_left()
            failed = [message for _, _, message in ring.network.sent if isinstance(message, StepFailed)]
            assert failed and all("the device is gone" in m.reason or "cannot start" in m.reason for m in failed)

    run(story())


def test_one_that_leaves_takes_its_requests_along_and_nobody_elses() -> None:
    async def story() -> None:
        async with Ring(2) as ring:
            stays, leaves = Origin(ring, "desk"), Origin(ring, "laptop")
            leaves.submit(1, [1, 2], Sampling(), 50)
            stays.submit(1, [1, 2], Sampling(seed=1), 10)
            await leaves.take()
            ring.head.abandon(leaves.id)
            await stays.all_of({1})
            assert stays.answers[1] == reference(2, [1, 2], Sampling(), 10, EOS)
            await ring.idle()
            ring.check_nothing_is_left()

    run(story())


def test_what_cannot_be_asked_for_is_refused_with_the_reason() -> None:
    async def story() -> None:
        async with Ring(2, blocks=4) as ring:
            origin = Origin(ring, "laptop")
            origin.submit(1, [1] * 10, Sampling(), 7)
            origin.submit(2, [], Sampling(), 7)
            bad = Submit(epoch=EPOCH, number=3, tokens=b"123", sampling=None, max_tokens=1)
            origin.answers[3] = []
            ring.network.post(origin.id, ring.plan.ring.head, bad)
            await origin.all_of({1, 2, 3})
            reasons = [origin.finished[number].reason for number in (1, 2, 3)]
            assert "17" in reasons[0] and "16" in reasons[0]
            assert "3 bytes are no tokens" in reasons[2]
            assert not any(emit.retry for emit in origin.finished.values())
            origin.ring.network.post(
                origin.id,
                NodeId("pc-1"),
                msg := Submit(epoch=EPOCH, number=4, tokens=token_bytes([1]), sampling=None, max_tokens=1),
            )
            origin.answers[4], origin._tokens[4], origin._asked[4] = [], [1], msg
            await origin.all_of({4})  # "not the head": tried again at the head
            assert origin.retries == 1 and len(origin.answers[4]) == 1

    run(story())


def test_frames_that_make_no_sense_fail_their_step_alone() -> None:
    async def story() -> None:
        async with Ring(2) as ring:
            tail = ring.network.runners[NodeId("pc-1")]
            tail.received(NodeId("pc-0"), RingStep(epoch=EPOCH, step=900, entries=()), memoryview(b""))
            tail.received(NodeId("pc-0"), RingStep(epoch=EPOCH, step=901, entries=(), released=(7,)), memoryview(b"xx"))
            ring.head.received(NodeId("pc-1"), Drawn(epoch=EPOCH, step=999, tokens=((1, 1),)), memoryview(b""))
            ring.head.received(NodeId("pc-1"), StepFailed(epoch=EPOCH, step=999, reason=""), memoryview(b""))
            origin = Origin(ring, "laptop")
            origin.submit(1, [5], Sampling(), 4)
            await origin.all_of({1})
            assert origin.answers[1] == reference(2, [5], Sampling(), 4, EOS)

    run(story())


def test_what_a_node_sends_that_is_not_its_own_to_send_is_ignored() -> None:
    async def story() -> None:
        async with Ring(3) as ring:
            runners = ring.network.runners
            origin = Origin(ring, "laptop")
            origin.submit(1, [5], Sampling(), 8)
            while 1 not in origin.finished:
                for step in range(1, 20):
                    for sender in map(NodeId, ("laptop", "pc-0", "pc-1")):
                        ring.head.received(sender, Drawn(epoch=EPOCH, step=step, tokens=((1, 1),)), memoryview(b""))
                    failed = StepFailed(epoch=EPOCH, step=step, reason="")
                    ring.head.received(NodeId("laptop"), failed, memoryview(b""))
                    forget = RingStep(epoch=EPOCH, step=step, entries=(), released=(1,))
                    for sender, target in (("laptop", "pc-1"), ("pc-0", "pc-2"), ("pc-2", "pc-0"), ("pc-1", "pc-1")):
                        runners[NodeId(target)].received(NodeId(sender), forget, memoryview(b""))
                await origin.take()
            assert origin.retries == 0 and origin.answers[1] == reference(3, [5], Sampling(), 8, EOS)

    run(story())


def test_the_time_of_steps_is_accounted_for() -> None:
    async def story() -> None:
        async with Ring(3) as ring:
            origin = Origin(ring, "laptop")
            origin.submit(1, [5], Sampling(), 6)
            await origin.all_of({1})
            await ring.idle()
            timings = list(ring.head.timings)
            assert 1 <= len(timings) <= 6 and ring.head.stuck_s(1e9) == 0.0
            for timing in timings:
                parts = timing.scheduling_s + timing.waiting_s + timing.codec_s + timing.inference_s + timing.network_s
                assert timing.hops == 3 and 0 < timing.inference_s < timing.total_s
                assert parts == pytest.approx(timing.total_s, abs=2e-3)

    run(story())


def test_nothing_is_sent_after_the_end() -> None:
    async def story() -> None:
        ring = Ring(2)
        async with ring:
            origin = Origin(ring, "laptop")
            origin.submit(1, [5], Sampling(), 50)
            await origin.take()
        before = len(ring.network.sent)
        await asyncio.sleep(0.02)
        assert len(ring.network.sent) == before

    run(story())
