"""Files fetched from other stores, with everything that may be wrong with them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from meshinfer.config import Folders
from meshinfer.errors import NoSpaceError
from meshinfer.shards.manifest import FileRef
from meshinfer.shards.store import Store
from meshinfer.transfer import give, state
from meshinfer.transfer.fetch import Fetch, FetchError
from meshinfer.transfer.give import MAX_WAITING, Giver
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.frames import pack, unpack
from meshinfer.wire.messages import AnyMessage, Range, Want

ME, A, B = NodeId("me"), NodeId("a"), NodeId("b")


def run(story: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await story

    asyncio.run(limited())


def some_file(number: int, size: int) -> tuple[FileRef, bytes]:
    data = np.random.default_rng(number).bytes(size)
    return FileRef(f"f{number}.bin", Sha256(hashlib.sha256(data).hexdigest()), size), data


def store_with(folder: Path, files: Sequence[tuple[FileRef, bytes]]) -> Store:
    store = Store(Folders(folder))
    store.folders.blobs.mkdir(parents=True, exist_ok=True)
    for ref, data in files:
        store.path(ref).write_bytes(data)
    return store


class Office:
    """A node that fetches, and givers with stores of their own."""

    def __init__(self, mine: Store, busy: bool = False) -> None:
        self.mine, self.busy = mine, busy
        self.givers: dict[NodeId, Giver] = {}
        self.held: dict[NodeId, Collection[Sha256] | None] = {}
        self.wants: list[tuple[NodeId, Want]] = []
        self.progress: list[tuple[int, int]] = []
        self.fetch: Fetch | None = None
        self.deaf: set[NodeId] = set()

    def add(self, node: NodeId, store: Store, held: Collection[Sha256] | None = None) -> None:
        def post(target: NodeId, message: msgspec.Struct, payloads: Sequence[bytes]) -> bool:
            frame = pack(message, payloads)
            asyncio.get_running_loop().call_soon(self._arrive, frame)
            return True

        self.givers[node] = Giver(store, post, lambda: self.busy)
        self.held[node] = held

    def _arrive(self, frame: bytes) -> None:
        message, payload = unpack(frame, AnyMessage)
        assert isinstance(message, Range) and self.fetch is not None
        self.fetch.received(message, payload)

    def ask(self, node: NodeId, message: msgspec.Struct) -> bool:
        assert isinstance(message, Want)
        self.wants.append((node, message))
        if node not in self.deaf:
            asyncio.get_running_loop().call_soon(self.givers[node].asked, ME, message)
        return True

    def holders(self) -> Mapping[NodeId, Collection[Sha256] | None]:
        return self.held

    async def get(self, refs: Sequence[FileRef]) -> None:
        tasks = [asyncio.create_task(giver.run()) for giver in self.givers.values()]
        try:
            self.fetch = Fetch(self.mine, refs, self.ask, self.holders, lambda d, t: self.progress.append((d, t)))
            await self.fetch.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def right(store: Store, files: Sequence[tuple[FileRef, bytes]]) -> bool:
    return all(store.has(ref) and store.path(ref).read_bytes() == data for ref, data in files)


FILES = [some_file(number, size) for number, size in enumerate([1, 300_000, 1_000_001, 262_144])]
REFS = [ref for ref, _ in FILES]


def test_files_come_from_two_sources_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        office = Office(store_with(tmp_path / "mine", []))
        office.add(A, store_with(tmp_path / "a", FILES))
        office.add(B, store_with(tmp_path / "b", FILES))
        await office.get(REFS)
        assert right(office.mine, FILES) and {node for node, _ in office.wants} == {A, B}
        assert office.fetch is not None and office.fetch.fetched_bytes == sum(ref.size_bytes for ref in REFS)
        done = [part for part, _ in office.progress]
        assert done == sorted(done) and office.progress[-1][0] == office.progress[-1][1]
        assert sum(giver.given_bytes for giver in office.givers.values()) == office.fetch.fetched_bytes

    run(story())


def test_what_is_there_already_is_not_fetched(tmp_path: Path) -> None:
    async def story() -> None:
        office = Office(store_with(tmp_path / "mine", FILES))
        office.add(A, store_with(tmp_path / "a", FILES))
        await office.get(REFS)
        assert not office.wants

    run(story())


def test_a_fetch_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    async def story() -> None:
        mine = store_with(tmp_path / "mine", [])
        ref, data = FILES[2]
        mine.part_path(ref).write_bytes(data[:700_000])
        office = Office(mine)
        office.add(A, store_with(tmp_path / "a", FILES))
        await office.get([ref])
        assert right(mine, [FILES[2]])
        assert sum(want.size for _, want in office.wants) == 300_001
        assert min(want.offset for _, want in office.wants) == 700_000

    run(story())


def test_a_part_with_wrong_bytes_is_begun_again(tmp_path: Path) -> None:
    async def story() -> None:
        mine = store_with(tmp_path / "mine", [])
        for ref, size in zip(REFS[1:3], (100_000, 2_000_000), strict=True):
            mine.part_path(ref).write_bytes(bytes(size))
        office = Office(mine)
        office.add(A, store_with(tmp_path / "a", FILES))
        await office.get(REFS)
        assert right(mine, FILES)

    run(story())


def test_a_source_with_wrong_bytes_is_left_for_a_good_one(tmp_path: Path) -> None:
    async def story() -> None:
        office = Office(store_with(tmp_path / "mine", []))
        office.add(A, store_with(tmp_path / "a", [(ref, bytes(len(data))) for ref, data in FILES]))
        office.add(B, store_with(tmp_path / "b", FILES))
        await office.get(REFS)
        assert right(office.mine, FILES)

    run(story())


def test_with_a_bad_source_alone_there_is_a_reason_and_nothing_is_kept(tmp_path: Path) -> None:
    async def story() -> None:
        office = Office(store_with(tmp_path / "mine", []))
        office.add(A, store_with(tmp_path / "a", [(ref, bytes(len(data))) for ref, data in FILES]))
        with pytest.raises(FetchError, match="wrong bytes"):
            await office.get(REFS)
        assert not any(office.mine.has(ref) for ref in REFS)

    run(story())


def test_a_file_that_nobody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PATIENCE_S", 0.05)

    async def story() -> None:
        office = Office(store_with(tmp_path / "mine", []))
        office.add(A, store_with(tmp_path / "a", FILES[:2]))  # it says that it may have all
        with pytest.raises(FetchError, match=REFS[2].sha256[:12]):
            await office.get(REFS[:3])
        assert right(office.mine, FILES[:2])

    run(story())


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    async def story() -> None:
        office = Office(store_with(small_disk(1), []))
        office.add(A, store_with(tmp_path / "a", FILES))
        with pytest.raises(NoSpaceError):
            await office.get(REFS)
        assert not office.wants

    run(story())


def test_a_disk_that_fills_up_meanwhile_is_said_too(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    async def story() -> None:
        folder = small_disk(24)
        ref, data = some_file(9, 6 << 20)
        office = Office(store_with(folder, []))
        office.add(A, store_with(tmp_path / "a", [(ref, data)]))
        asked = office.ask

        def ask(node: NodeId, message: msgspec.Struct) -> bool:
            if len(office.wants) == 3:
                with (folder / "somebody elses").open("wb") as file:
                    file.write(bytes(22 << 20))
            return asked(node, message)

        office.ask = ask  # type: ignore[method-assign]
        with pytest.raises(NoSpaceError):
            await office.get([ref])

    run(story())


class Answers:
    """What a giver says, and to whom."""

    def __init__(self, store: Store) -> None:
        self.giver = Giver(store, self._post, lambda: False)
        self.all: list[tuple[NodeId, Range]] = []

    def _post(self, node: NodeId, message: msgspec.Struct, payloads: Sequence[bytes]) -> bool:
        assert isinstance(message, Range)
        self.all.append((node, message))
        return True

    def ask(self, node: NodeId, number: int, sha256: str = REFS[1].sha256, offset: int = 0) -> None:
        self.giver.asked(node, Want(number=number, sha256=Sha256(sha256), offset=offset, size=10))

    async def until(self, count: int) -> None:
        task = asyncio.create_task(self.giver.run())
        for _ in range(5000):
            if len(self.all) >= count:
                break
            await asyncio.sleep(0.001)
        task.cancel()
        assert len(self.all) == count


def test_a_giver_takes_only_so_many_wishes_of_one_node(tmp_path: Path) -> None:
    async def story() -> None:
        answers = Answers(store_with(tmp_path / "a", FILES))
        for number in range(MAX_WAITING + 3):
            answers.ask(ME, number)
        answers.ask(B, 99)
        assert [message.number for _, message in answers.all] == list(range(MAX_WAITING, MAX_WAITING + 3))
        assert all(message.reason for _, message in answers.all)
        await answers.until(MAX_WAITING + 4)
        assert sum(not message.reason for _, message in answers.all) == MAX_WAITING + 1
        answers.ask(ME, 200)
        assert len(answers.all) == MAX_WAITING + 4  # there is room again

    run(story())


def test_a_giver_says_why_it_cannot_give(tmp_path: Path) -> None:
    async def story() -> None:
        answers = Answers(store_with(tmp_path / "a", FILES))
        answers.ask(ME, 1, "0" * 64)
        answers.ask(ME, 2, offset=299_999)
        answers.ask(ME, 3, offset=1 << 50)
        await answers.until(3)
        assert all(message.reason for _, message in answers.all) and answers.giver.given_bytes == 0

    run(story())


def test_a_busy_giver_gives_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        office = Office(store_with(tmp_path / "mine", []), busy=True)
        office.add(A, store_with(tmp_path / "a", FILES))
        began = asyncio.get_running_loop().time()
        await office.get(REFS)
        assert asyncio.get_running_loop().time() - began > 0.1
        assert right(office.mine, FILES)

    monkeypatch.setattr(give, "BUSY_BYTES_S", 10e6)
    run(story())
