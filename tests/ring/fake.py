"""A model small enough to know by heart, and a ring of nodes in one process.

What a stage gives for a position depends on all positions before it, which it finds in its KV blocks alone. So any
mix-up of sequences, order, positions or blocks changes what the model says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from meshinfer.engine.sampling import Sampling, choose
from meshinfer.engine.step import Lengths, Rows, Step
from meshinfer.errors import DeviceError
from meshinfer.planning.cost import StagePlan
from meshinfer.planning.plan import Choice, Plan, Pool, RingPlan
from meshinfer.ring.runner import RingRunner
from meshinfer.types import NodeId, SequenceId, Sha256
from meshinfer.wire.frames import pack, unpack
from meshinfer.wire.messages import AnyMessage, RingStep

PRIME = 4093
VOCABULARY = 29


def stage_value(stage: int, history: Sequence[int]) -> int:
    """What a stage gives for the last of these positions."""
    value = stage + 1
    for seen in history:
        value = (value * 31 + seen + 7 * stage) % PRIME
    return value


def logits_of(value: int) -> Rows:
    """[vocabulary] f32, all of them different."""
    places = np.arange(VOCABULARY, dtype=np.int64)
    return ((value * 131 + places * 977) % PRIME / 500).astype(np.float32)


def reference(stages: int, tokens: Sequence[int], sampling: Sampling, most: int, eos: frozenset[int]) -> list[int]:
    """What one process would answer."""
    known = list(tokens)
    while len(known) - len(tokens) < most:
        values = known
        for stage in range(stages):
            values = [stage_value(stage, values[: place + 1]) for place in range(len(values))]
        token = choose(logits_of(values[-1]), sampling, len(known))
        if token in eos:
            break
        known.append(token)
    return known[len(tokens) :]


class FakeStage:
    """See `engine.step.Stage`. `failing`: numbers of the calls that fail."""

    rewinds = True

    def __init__(self, number: int, stages: int, blocks: int, block_tokens: int, block_bytes: int = 64) -> None:
        self.number, self.tail, self.head = number, number == stages - 1, number == 0
        self.kv_blocks, self.block_tokens, self.block_bytes = blocks, block_tokens, block_bytes
        self.lengths = Lengths()
        self.memory = np.full((blocks, block_tokens), -1, np.int64)
        self.owner: dict[int, SequenceId] = {}
        self.calls, self.failing, self.widest = 0, set[int](), 0
        self.closed = False

    def forward(self, step: Step) -> tuple[Rows, ...]:
        self.calls += 1
        if self.calls in self.failing:
            raise DeviceError("the device is gone")
        self.lengths.check(step.entries)
        self.widest = max(self.widest, len(step.entries))
        source = step.tokens if self.head else step.hidden[0][:, 0]
        assert source is not None and len(source) == step.total
        given = []
        for entry, span in zip(step.entries, step.spans, strict=True):
            for block in entry.blocks:
                owner = self.owner.setdefault(block, entry.sequence)
                assert owner == entry.sequence, f"block {block} of {owner} is given to {entry.sequence}"
            for position, value in zip(range(entry.start, entry.end), source[span], strict=True):
                block, place = divmod(position, self.block_tokens)
                self.memory[entry.blocks[block], place] = int(value)
                slots = [divmod(seen, self.block_tokens) for seen in range(position + 1)]
                given.append(stage_value(self.number, [int(self.memory[entry.blocks[b], p]) for b, p in slots]))
        self.lengths.advance(step.entries)
        if self.tail:
            return (np.array([logits_of(given[row]) for row in step.rows], np.float32).reshape(-1, VOCABULARY),)
        return (np.array([[value, value / 2] for value in given], np.float32),)

    def release(self, sequence: SequenceId) -> None:
        self.lengths.forget(sequence)
        for block in [block for block, owner in self.owner.items() if owner == sequence]:
            del self.owner[block]
            self.memory[block] = -1

    def close(self) -> None:
        self.closed = True


def plan_for(stages: int, sequences: int = 4, codec: str = "f32", epoch: int = 5) -> Plan:
    nodes = [NodeId(f"pc-{number}") for number in range(stages)]
    choice = Choice("fake", Sha256("0" * 64), "exact", 256, sequences, 1, nodes[0])
    ring = RingPlan(tuple(StagePlan(node, number, number + 1) for number, node in enumerate(nodes)))
    return Plan(epoch, nodes[0], choice, "paged", codec, (ring,))


class Network:
    """Carries frames between nodes: each pair keeps its order, and every message is packed and unpacked."""

    def __init__(self, seed: int, most_delay_s: float = 0.002) -> None:
        self.random, self.most_delay_s = np.random.default_rng(seed), most_delay_s
        self.runners: dict[NodeId, RingRunner] = {}
        self.origins: dict[NodeId, asyncio.Queue[msgspec.Struct]] = {}
        self.sent: list[tuple[NodeId, NodeId, msgspec.Struct]] = []
        self.wrong: list[BaseException] = []
        self._last: dict[tuple[NodeId, NodeId], float] = {}

    def post(self, source: NodeId, target: NodeId, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> bool:
        loop = asyncio.get_running_loop()
        frame = pack(message, payloads)
        self.sent.append((source, target, message))
        earliest = self._last.get((source, target), 0.0) + 1e-6
        at = max(loop.time() + float(self.random.uniform(0, self.most_delay_s)), earliest)
        self._last[source, target] = at
        loop.call_at(at, self._arrive, source, target, frame)
        return True

    def _arrive(self, source: NodeId, target: NodeId, frame: bytes) -> None:
        try:
            message, payload = unpack(frame, AnyMessage)
            if target in self.origins:
                self.origins[target].put_nowait(message)
            else:
                self.runners[target].received(source, message, payload)
        except BaseException as error:
            self.wrong.append(error)
            raise


class Ring:
    """`async with`: a ring of fake stages. `block_tokens`: of each stage; the ring's are the largest of them."""

    def __init__(
        self,
        stages: int,
        seed: int = 0,
        blocks: int = 40,
        block_tokens: Sequence[int] = (4,),
        sequences: int = 4,
        codec: str = "f32",
    ) -> None:
        self.plan = plan_for(stages, sequences, codec)
        self.network = Network(seed)
        sizes = [block_tokens[number % len(block_tokens)] for number in range(stages)]
        self.pool = Pool(blocks, max(sizes))
        self.stages = [
            FakeStage(number, stages, blocks * self.pool.block_tokens // size, size)
            for number, size in enumerate(sizes)
        ]

    async def __aenter__(self) -> Ring:
        for stage, part in zip(self.stages, self.plan.ring.stages, strict=True):
            node = part.node

            def post(target: NodeId, message: msgspec.Struct, payloads: Sequence[bytes], node: NodeId = node) -> bool:
                return self.network.post(node, target, message, payloads)

            self.network.runners[node] = RingRunner(self.plan, self.pool, node, stage, post)
        return self

    async def __aexit__(self, *args: object) -> None:
        for runner in self.network.runners.values():
            await runner.close()
        assert not self.network.wrong

    @property
    def head(self) -> RingRunner:
        return self.network.runners[self.plan.ring.head]

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        scheduler = self.head.scheduler
        assert scheduler is not None
        for _ in range(10_000):
            if not scheduler.steps_in_flight and not scheduler.requests():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("steps are still under way")

    def check_nothing_is_left(self) -> None:
        """Every sequence is forgotten on every stage, every block is free."""
        scheduler = self.head.scheduler
        assert scheduler is not None and scheduler.free_blocks == self.pool.blocks
        for stage in self.stages:
            assert stage.lengths.held == {} and stage.owner == {}

    def check_order(self) -> None:
        """Steps came to each stage one after the other."""
        for source, target in pairwise([*(part.node for part in self.plan.ring.stages)]):
            sent = [m for a, b, m in self.network.sent if (a, b) == (source, target)]
            numbers = [message.step for message in sent if isinstance(message, RingStep)]
            assert numbers == sorted(set(numbers))
