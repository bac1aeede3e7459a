"""Does what a transfer decides: asks over links, writes parts, compares hashes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from meshinfer.errors import CorruptFileError, InputError, MeshinferError
from meshinfer.files import disk
from meshinfer.shards.manifest import FileRef
from meshinfer.shards.store import Store
from meshinfer.transfer.state import Ask, Check, Done, Instruction, Restart, Transfer, Wanted
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import Range, Want

log = logging.getLogger(__name__)

TICK_S = 1.0
_SPARE_BYTES = 16 << 20

Holders = Callable[[], Mapping[NodeId, Collection[Sha256] | None]]
Progress = Callable[[int, int], None]
Post = Callable[[NodeId, msgspec.Struct], bool]


class FetchError(MeshinferError):
    """Files that no node could give; trying again later may help."""


class Fetch:
    """One fetching of files into the store; `run` it once, and hand it every `Range` that comes."""

    def __init__(self, store: Store, refs: Sequence[FileRef], post: Post, holders: Holders, progress: Progress) -> None:
        self._store, self._post, self._holders, self._progress = store, post, holders, progress
        self._refs = {ref.sha256: ref for ref in refs}
        self._jobs: asyncio.Queue[Callable[[], list[Instruction]]] = asyncio.Queue()
        self._writes: asyncio.Queue[tuple[Sha256, int, bytes] | Check | Restart] = asyncio.Queue()
        self._transfer = Transfer(())
        self._result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def fetched_bytes(self) -> int:
        return self._transfer.fetched_bytes

    async def run(self) -> None:
        """Fetch what is missing. Raises FetchError, NoSpaceError, InputError."""
        wanted = await asyncio.to_thread(self._missing)
        if not wanted:
            return
        needed = sum(file.size_bytes - file.have_bytes for file in wanted)
        disk.require_space(self._store.folders.home, needed + _SPARE_BYTES)
        self._transfer = Transfer(wanted, secrets.randbits(48) + 1)
        log.info("fetching %d files, %.1f MB", len(wanted), needed / 1e6)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(), name="write shards")
            ticking = tasks.create_task(self._tick(), name="fetch tick")
            self._do(
                [*self._transfer.sources(self._holders(), time.monotonic()), *self._transfer.begin(time.monotonic())]
            )
            await asyncio.wait([self._result])  # an error in here would come out as a group of errors
            writing.cancel()
            ticking.cancel()
        reason = self._result.result()
        for node, why in self._transfer.bad.items():
            log.warning("source %s is avoided: it %s", node[:8], why)
        if reason:
            raise FetchError(reason)

    def received(self, message: Range, payload: memoryview) -> None:
        """Bytes that were asked for, or word that there are none."""
        now = time.monotonic()
        if message.reason:
            log.debug("a source cannot give a range: %s", message.reason)
            self._do(self._transfer.refused(message.number, now))
            return
        where, instructions = self._transfer.came(message.number, len(payload), message.busy, now)
        if where is not None:
            self._writes.put_nowait((*where, bytes(payload)))
        self._do(instructions)

    def _missing(self) -> list[Wanted]:
        found = []
        for sha256, ref in self._refs.items():
            if not self._store.has(ref):
                part = self._store.part_path(ref)
                if ref.size_bytes == 0:
                    part.touch()
                have = min(part.stat().st_size, ref.size_bytes) if part.exists() else 0
                found.append(Wanted(sha256, ref.size_bytes, have))
        return found

    def _do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Ask(node, number, sha256, offset, size):
                    self._post(node, Want(number=number, sha256=sha256, offset=offset, size=size))
                case Check() | Restart():
                    self._writes.put_nowait(instruction)
                case Done(reason):
                    if not self._result.done():
                        self._result.set_result(reason)
        self._progress(self._transfer.done_bytes, self._transfer.total_bytes)

    async def _write(self) -> None:
        """Everything that touches the disk, one after the other, off the event loop."""
        try:
            while True:
                match await self._writes.get():
                    case Check(sha256):
                        good = await asyncio.to_thread(self._check, self._refs[sha256])
                        self._do(self._transfer.checked(sha256, good, time.monotonic()))
                    case Restart(sha256):
                        await asyncio.to_thread(self._restart, self._refs[sha256])
                    case (sha256, offset, data):
                        await asyncio.to_thread(_write_at, self._store.part_path(self._refs[sha256]), offset, data)
                        self._do(self._transfer.wrote(sha256, offset + len(data), time.monotonic()))
        except MeshinferError as error:
            if not self._result.done():
                self._result.set_exception(error)

    def _check(self, ref: FileRef) -> bool:
        try:
            self._store.take_part(ref)
        except CorruptFileError as error:
            log.warning("%s", error)
            return False
        return True

    def _restart(self, ref: FileRef) -> None:
        part = self._store.part_path(ref)
        with disk.converted(part.parent):
            part.unlink(missing_ok=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._do([*self._transfer.sources(self._holders(), now), *self._transfer.tick(now)])


def _write_at(path: Path, offset: int, data: bytes) -> None:
    """Write bytes of a part at their place. Raises NoSpaceError, InputError."""
    with disk.converted(path.parent, len(data)), path.open("r+b" if path.exists() else "xb") as part:
        if part.seek(0, 2) < offset:
            raise InputError(f"{path} is shorter than it was: another process changes it")
        part.seek(offset)
        part.write(data)
