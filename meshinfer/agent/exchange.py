"""Manifests and files of the chosen model, given to other nodes and had from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from meshinfer.agent.models import Models
from meshinfer.shards.manifest import FileRef, Manifest
from meshinfer.transfer.fetch import Fetch
from meshinfer.transfer.give import Giver
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import ManifestIs, Range, Report, Want, WantManifest

log = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
MAX_TASKS = 64
"""Manifests that are read or written at once; who gets no answer asks again."""

FileMessage = Want | Range | WantManifest | ManifestIs


class Post(Protocol):
    """Sends to a node; False where it has no link."""

    def __call__(self, node: NodeId, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> bool: ...


class Exchange:
    """`received` gets every message about files; `give` runs for as long as the agent does."""

    def __init__(
        self,
        models: Models,
        post: Post,
        post_bulk: Post,
        busy: Callable[[], bool],
        others: Callable[[], Mapping[NodeId, Report | None]],
    ) -> None:
        """`others`: the other nodes, with their reports where those have come."""
        self._models, self._post, self._others = models, post, others
        self._giver = Giver(models.store, post_bulk, busy)
        self._fetch: Fetch | None = None
        self._fetching = asyncio.Lock()
        self._fetched_bytes = 0
        self._manifests: dict[str, asyncio.Future[Manifest]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.done, self.total = 0, 0
        """Bytes of the files that are being fetched; both 0 where none are."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes of files that came over links since the start."""
        return self._fetched_bytes + (self._fetch.fetched_bytes if self._fetch else 0)

    @property
    def given_bytes(self) -> int:
        return self._giver.given_bytes

    async def give(self) -> None:
        """Give files until cancelled."""
        await self._giver.run()

    def received(self, sender: NodeId, message: FileMessage, payload: memoryview) -> None:
        """Answer, or take what was asked for."""
        match message:
            case Want():
                self._giver.asked(sender, message)
            case Range() if self._fetch is not None:
                self._fetch.received(message, payload)
            case WantManifest() if len(self._tasks) < MAX_TASKS:
                self._spawn(self._give_manifest(sender, message), "give a manifest")
            case ManifestIs(fingerprint=fingerprint) if fingerprint in self._manifests and len(self._tasks) < MAX_TASKS:
                self._spawn(self._take_manifest(message), "take a manifest")

    async def manifest(self, fingerprint: Sha256) -> Manifest:
        """The manifest of a model, from here or from any node that has it, however long that takes."""
        found = await asyncio.to_thread(self._models.local, fingerprint)
        if found is not None:
            return found
        future = self._manifests.setdefault(fingerprint, asyncio.get_running_loop().create_future())
        try:
            while True:
                for node in self._others():
                    self._post(node, WantManifest(fingerprint=fingerprint))
                done, _ = await asyncio.wait([future], timeout=ASK_AGAIN_S)
                if done:
                    return future.result()
        finally:
            self._manifests.pop(fingerprint, None)

    async def fetch(self, refs: Sequence[FileRef]) -> None:
        """Have files of the chosen model here. Raises FetchError, NoSpaceError, InputError."""
        async with self._fetching:
            self._fetch = Fetch(self._models.store, refs, self._post, self._holders, self._progress)
            try:
                await self._fetch.run()
            finally:
                self._fetched_bytes += self._fetch.fetched_bytes
                self._fetch = None
                self.done = self.total = 0
                await asyncio.to_thread(self._models.look)

    async def _give_manifest(self, node: NodeId, message: WantManifest) -> None:
        manifest = await asyncio.to_thread(self._models.local, message.fingerprint)
        text = manifest.to_json().encode() if manifest else b""
        self._post(node, ManifestIs(fingerprint=message.fingerprint, text=text))

    async def _take_manifest(self, message: ManifestIs) -> None:
        found = await asyncio.to_thread(self._models.accept, message)
        future = self._manifests.get(message.fingerprint)
        if found is not None and future is not None and not future.done():
            future.set_result(found)

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Do what touches the disk beside the event loop."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("cannot %s: %s", what, error)

        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _holders(self) -> Mapping[NodeId, frozenset[Sha256]]:
        """Which files of the chosen model the other nodes have."""
        return {
            node: self._models.files_of(report.shards)
            for node, report in self._others().items()
            if report is not None and report.fingerprint == self._models.fingerprint
        }

    def _progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total
