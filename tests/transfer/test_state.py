"""Whatever sources do: in the end all files are right, or there is a reason."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.transfer.state import (
    BUSY_RANGE_BYTES,
    MAX_UNWRITTEN_BYTES,
    PATIENCE_S,
    RANGE_BYTES,
    STALLED_S,
    WINDOW,
    Ask,
    Check,
    Done,
    Instruction,
    Restart,
    Transfer,
    Wanted,
)
from meshinfer.types import NodeId, Sha256

A, B = NodeId("a"), NodeId("b")
X, Y = Sha256("x"), Sha256("y")


@dataclass
class Source:
    """A node, and what is wrong with it."""

    files: set[Sha256]
    corrupt: bool = False
    refuses: bool = False
    silent: bool = False
    short: bool = False
    busy: bool = False
    dies_at: float = float("inf")
    bytes_s: float = 20e6


@dataclass
class World:
    """A transfer, a disk that takes its time, and sources that answer in order."""

    sizes: dict[Sha256, int]
    sources: dict[NodeId, Source]
    have: dict[Sha256, int] = field(default_factory=dict)
    spoilt: set[Sha256] = field(default_factory=set)
    """Whose first bytes, from an earlier run, are wrong."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.now = 0.0
        wanted = [Wanted(sha, size, self.have.get(sha, 0)) for sha, size in self.sizes.items()]
        self.transfer = Transfer(wanted)
        self.disk: dict[Sha256, list[bool]] = {
            sha: [sha not in self.spoilt] * self.have.get(sha, 0) for sha in self.sizes
        }
        self.finished: dict[Sha256, bool] = {}
        self.result: str | None = None
        self.asked: list[Ask] = []
        self.open: dict[NodeId, set[int]] = defaultdict(set)
        self.corrupt_checks: Counter[Sha256] = Counter()
        self.restarts = 0
        self.largest_window = 0
        self.after_proof: list[Ask] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._disk: list[Callable[[], None]] = []
        self._free_at: dict[NodeId, float] = defaultdict(float)

    def run(self, most_s: float = 600.0) -> None:
        self.do([*self.transfer.sources(self.holders(), self.now), *self.transfer.begin(self.now)])
        self.later(1.0, self.tick)
        while self._queue and self.result is None and self.now < most_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def holders(self) -> dict[NodeId, set[Sha256]]:
        return {node: source.files for node, source in self.sources.items() if self.now < source.dies_at}

    def tick(self) -> None:
        self.do([*self.transfer.sources(self.holders(), self.now), *self.transfer.tick(self.now)])
        self.later(1.0, self.tick)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def do(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Ask():
                    self.ask(instruction)
                case Check(sha256):
                    self.to_disk(partial(self.check, sha256))
                case Restart(sha256):
                    self.restarts += 1
                    self.to_disk(self.disk[sha256].clear)
                case Done(reason):
                    assert self.result is None, "done twice"
                    self.result = reason

    def to_disk(self, action: Callable[[], None]) -> None:
        """One after the other, as `Fetch` does."""
        self._disk.append(action)
        if len(self._disk) == 1:
            self.later(float(self.random.uniform(0, 0.05)), self.next_of_disk)

    def next_of_disk(self) -> None:
        self._disk[0]()
        del self._disk[0]
        if self._disk:
            self.later(float(self.random.uniform(0, 0.05)), self.next_of_disk)

    def ask(self, ask: Ask) -> None:
        assert ask.sha256 not in self.finished
        assert ask.size > 0 and ask.offset + ask.size <= self.sizes[ask.sha256]
        assert ask.size <= (BUSY_RANGE_BYTES if ask.node in self.transfer._busy else RANGE_BYTES)
        if ask.node in self.transfer.bad:
            self.after_proof.append(ask)
        self.asked.append(ask)
        waiting = {number for number in self.open[ask.node] if number in self.transfer._asked}
        self.open[ask.node] = waiting | {ask.number}
        self.largest_window = max(self.largest_window, len(self.open[ask.node]))
        source = self.sources[ask.node]
        if source.silent:
            return
        size = ask.size - 1 if source.short else ask.size
        start = max(self.now, self._free_at[ask.node])
        self._free_at[ask.node] = end = start + size / source.bytes_s + float(self.random.uniform(0.0001, 0.01))
        self.later(end - self.now, lambda: self.answer(ask, size))

    def answer(self, ask: Ask, size: int) -> None:
        source = self.sources[ask.node]
        self.open[ask.node].discard(ask.number)
        if self.now >= source.dies_at:
            return
        if source.refuses or ask.sha256 not in source.files:
            self.do(self.transfer.refused(ask.number, self.now))
            return
        where, instructions = self.transfer.came(ask.number, size, source.busy, self.now)
        if where is not None:
            assert where == (ask.sha256, ask.offset)
            good = not source.corrupt
            self.to_disk(lambda: self.write(where[0], where[1], size, good))
        self.do(instructions)

    def write(self, sha256: Sha256, offset: int, size: int, good: bool) -> None:
        assert sha256 not in self.finished, "a write after the file was taken"
        part = self.disk[sha256]
        assert offset <= len(part), "a hole"
        part[offset : offset + size] = [good] * size
        self.do(self.transfer.wrote(sha256, offset + size, self.now))

    def check(self, sha256: Sha256) -> None:
        good = len(self.disk[sha256]) == self.sizes[sha256] and all(self.disk[sha256])
        if good:
            self.finished[sha256] = True
        else:
            self.corrupt_checks[sha256] += 1
            self.disk[sha256].clear()
        self.do(self.transfer.checked(sha256, good, self.now))


LENGTHS = st.sampled_from([1, 1000, RANGE_BYTES, RANGE_BYTES + 1, 3 * RANGE_BYTES, 6 * RANGE_BYTES + 5])
sizes = st.dictionaries(st.sampled_from([X, Y, Sha256("z")]), LENGTHS, min_size=1)
behaviours = st.builds(
    Source,
    st.sets(st.sampled_from([X, Y, Sha256("z")])),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
    st.sampled_from([float("inf"), float("inf"), 0.05, 1.0]),
)


@given(sizes, st.dictionaries(st.sampled_from([A, B, NodeId("c")]), behaviours), st.data(), st.integers(0, 1 << 16))
@settings(max_examples=60)
def test_all_files_are_right_in_the_end_or_there_is_a_reason(
    sizes: dict[Sha256, int], sources: dict[NodeId, Source], data: st.DataObject, seed: int
) -> None:
    have = {sha: data.draw(st.integers(0, size), label="have") for sha, size in sizes.items()}
    spoilt = data.draw(st.sets(st.sampled_from(sorted(sizes))), label="spoilt")
    world = World(sizes, sources, have, spoilt, seed)
    world.run()
    assert world.result is not None, "it never ends"
    assert (world.result == "") == (world.finished.keys() == sizes.keys())
    assert not world.after_proof and world.largest_window <= WINDOW
    assert world.transfer.bad.keys() <= {node for node, source in sources.items() if source.corrupt}
    sound = {
        sha
        for sha in sizes
        for source in sources.values()
        if sha in source.files
        and not (source.corrupt or source.refuses or source.silent or source.short)
        and source.dies_at == float("inf")
    }
    if sound == sizes.keys():
        assert world.result == "", "a good source has every file"
    if (
        not any(s.corrupt or s.refuses or s.silent or s.short or s.dies_at < 10 for s in sources.values())
        and not spoilt
    ):
        asked: Counter[Sha256] = Counter()
        for ask in world.asked:
            asked[ask.sha256] += ask.size
        assert all(asked[sha] <= sizes[sha] - have[sha] for sha in sizes)


def test_two_sources_share_the_work() -> None:
    files = {Sha256(f"f{n}"): 2_000_000 for n in range(6)}
    world = World(files, {A: Source(set(files)), B: Source(set(files))})
    world.run()
    given_by = Counter[NodeId]()
    for ask in world.asked:
        given_by[ask.node] += ask.size
    assert world.result == "" and sum(given_by.values()) == 12_000_000
    assert min(given_by.values()) >= 4_000_000 and world.largest_window == WINDOW


def test_a_busy_source_is_asked_for_little_at_once() -> None:
    world = World({X: 2_000_000}, {A: Source({X}, busy=True)})
    world.run()
    assert world.result == ""
    assert {ask.size for ask in world.asked[WINDOW:-1]} == {BUSY_RANGE_BYTES}


def test_a_source_that_gives_wrong_bytes_is_avoided_from_then_on() -> None:
    files = {Sha256(f"f{n}"): 500_000 for n in range(4)}
    world = World(files, {A: Source(set(files), corrupt=True), B: Source(set(files), bytes_s=1e6)})
    world.run()
    assert world.result == "" and set(world.transfer.bad) == {A} and "wrong bytes" in world.transfer.bad[A]
    assert not world.after_proof


def test_bytes_of_an_earlier_run_are_nobodys_fault() -> None:
    world = World({X: 500_000}, {A: Source({X})}, have={X: 300_000}, spoilt={X})
    world.run()
    assert world.result == "" and not world.transfer.bad and world.restarts == 1


def test_no_more_is_asked_for_than_the_disk_keeps_up_with() -> None:
    size = 4 * MAX_UNWRITTEN_BYTES
    transfer = Transfer([Wanted(X, size)])
    asks = deque(i for i in [*transfer.sources({A: None}, 0.0), *transfer.begin(0.0)] if isinstance(i, Ask))
    came = 0
    while asks:
        ask = asks.popleft()
        came += ask.size
        _, more = transfer.came(ask.number, ask.size, False, 0.0)
        asks.extend(i for i in more if isinstance(i, Ask))
    assert MAX_UNWRITTEN_BYTES < came <= MAX_UNWRITTEN_BYTES + (WINDOW + 1) * RANGE_BYTES
    assert transfer.tick(2 * STALLED_S) == [] and transfer.tick(4 * STALLED_S) == []
    assert any(isinstance(i, Ask) for i in transfer.wrote(X, came, 5 * STALLED_S))


def test_what_is_there_already_is_only_checked() -> None:
    world = World({X: 5000}, {}, have={X: 5000})
    world.run()
    assert world.result == "" and not world.asked


def test_a_slow_source_is_not_a_stalled_one() -> None:
    """Its ranges come one after the other: the last of a window waits for all the others."""
    slow = WINDOW * RANGE_BYTES / (2 * STALLED_S)
    world = World({X: 8 * RANGE_BYTES}, {A: Source({X}, bytes_s=slow)})
    world.run()
    assert world.result == "" and len(world.asked) == 8


def test_a_source_that_falls_silent_is_left_for_another_one() -> None:
    world = World({X: 2_000_000}, {A: Source({X}, silent=True), B: Source({X})})
    world.run()
    assert world.result == "" and STALLED_S < world.now < STALLED_S + 5
    files = {Sha256(f"f{n}"): 900_000 for n in range(8)}
    world = World(files, {A: Source(set(files), silent=True), B: Source(set(files))})
    world.run()
    assert world.result == "" and world.now < STALLED_S + 5  # not so long for each file


def test_a_file_that_is_nowhere_is_waited_for_a_little() -> None:
    world = World({X: 5000}, {A: Source(set())})
    world.later(PATIENCE_S / 2, lambda: world.sources.update({B: Source({X})}))
    world.run()
    assert world.result == ""
    world = World({X: 5000}, {A: Source(set())})
    world.run()
    assert world.result is not None and X in world.result and PATIENCE_S <= world.now < PATIENCE_S + 3


def test_nothing_is_asked_twice_where_a_source_leaves_while_its_bytes_are_being_written() -> None:
    transfer = Transfer([Wanted(X, 3 * RANGE_BYTES)])
    first = [i for i in transfer.sources({A: None, B: None}, 0.0) if isinstance(i, Ask)]
    assert [ask.offset for ask in first] == [0, RANGE_BYTES, 2 * RANGE_BYTES]
    for ask in first[:2]:
        where, _ = transfer.came(ask.number, ask.size, False, 1.0)
        assert where == (X, ask.offset)
    again = [i for i in transfer.sources({B: None}, 2.0) if isinstance(i, Ask)]
    assert [(ask.node, ask.offset) for ask in again] == [(B, 2 * RANGE_BYTES)]


def test_ranges_out_of_order_are_not_taken() -> None:
    transfer = Transfer([Wanted(X, 2 * RANGE_BYTES)])
    first = [i for i in transfer.sources({A: None}, 0.0) if isinstance(i, Ask)]
    where, instructions = transfer.came(first[1].number, RANGE_BYTES, False, 1.0)
    assert where is None and not instructions
