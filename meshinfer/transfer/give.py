"""Gives other nodes the bytes of shards that they ask for, one range after the other for each of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from meshinfer.errors import MeshinferError
from meshinfer.files import disk
from meshinfer.shards.manifest import FileRef
from meshinfer.shards.store import Store
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import Range, Want

log = logging.getLogger(__name__)

MAX_WAITING = 32
"""Ranges that one node may have asked for and not got."""
BUSY_BYTES_S = 16e6
"""What all nodes together get while the ring here works for somebody."""

Post = Callable[[NodeId, msgspec.Struct, Sequence[bytes]], bool]


class Giver:
    """`asked` for every `Want`; `run` gives."""

    def __init__(self, store: Store, post: Post, busy: Callable[[], bool]) -> None:
        self._store, self._post, self._busy = store, post, busy
        self._wants: asyncio.Queue[tuple[NodeId, Want]] = asyncio.Queue()
        self._waiting: dict[NodeId, int] = {}
        self.given_bytes = 0

    def asked(self, node: NodeId, want: Want) -> None:
        """Queue a range for a node."""
        if self._waiting.get(node, 0) >= MAX_WAITING:
            self._post(node, Range(number=want.number, reason="too many ranges asked for at once"), ())
            return
        self._waiting[node] = self._waiting.get(node, 0) + 1
        self._wants.put_nowait((node, want))

    async def run(self) -> None:
        """Give until cancelled."""
        while True:
            node, want = await self._wants.get()
            self._waiting[node] -= 1
            if not self._waiting[node]:
                del self._waiting[node]
            busy = self._busy()
            try:
                data = await asyncio.to_thread(self._read, want)
            except MeshinferError as error:
                log.debug("cannot give %s: %s", want.sha256[:12], error)
                self._post(node, Range(number=want.number, reason=str(error)[:400]), ())
                continue
            self.given_bytes += len(data)
            self._post(node, Range(number=want.number, busy=busy), (data,))
            if busy:
                await asyncio.sleep(len(data) / BUSY_BYTES_S)

    def _read(self, want: Want) -> bytes:
        path = self._store.path(FileRef("shard", Sha256(want.sha256), 0))
        with disk.converted(path.parent), path.open("rb") as file:
            file.seek(want.offset)
            data = file.read(want.size)
        if len(data) != want.size:
            raise MeshinferError(f"{want.sha256[:12]} has no {want.size} bytes at {want.offset} here")
        return data
