"""The model of the mesh, at this node: chosen by a user, its manifest and tokenizer fetched, and what of it is here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from meshinfer.agent.origin import ServedModel
from meshinfer.errors import InputError, MeshinferError, SourceError
from meshinfer.files import disk
from meshinfer.files.progress import Progress
from meshinfer.models.add import add_model
from meshinfer.planning.plan import Choice, Plan
from meshinfer.shards.manifest import FileRef, Manifest, from_json
from meshinfer.shards.store import Store
from meshinfer.text.template import ChatTemplate
from meshinfer.text.tokenizer import load_tokenizer
from meshinfer.types import Sha256
from meshinfer.wire.messages import ManifestIs

log = logging.getLogger(__name__)

_CHOICE, _PLAN = "choice.json", "plan.json"

Named = tuple[tuple[str, str], ...]


class Models:
    """What this node has of models. Methods that read files are quick, but for `find` and `serve`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifest: Manifest | None = None
        """Of the chosen model."""
        self.fingerprint = Sha256("")
        """Of the chosen model; empty until its manifest is here."""
        self.shards: tuple[int, ...] = ()
        """Which of its shards are here, whole."""
        self.named: Named = ()
        """(name, fingerprint) of the models that are here whole."""

    def remembered(self) -> Choice | None:
        """The choice of the mesh when this node last ran."""
        path = self.store.folders.mesh / _CHOICE
        try:
            return msgspec.json.decode(path.read_bytes(), type=Choice)
        except (OSError, msgspec.MsgspecError):
            return None

    def remember(self, choice: Choice) -> None:
        """Keep a choice for the next start. Raises NoSpaceError, InputError."""
        folder = self.store.folders.mesh
        with disk.converted(folder):
            folder.mkdir(parents=True, exist_ok=True)
            disk.write_atomic(folder / _CHOICE, msgspec.json.encode(choice).decode())

    def last_plan(self) -> Plan | None:
        """The plan that held when this node last ran."""
        try:
            return msgspec.json.decode((self.store.folders.mesh / _PLAN).read_bytes(), type=Plan)
        except (OSError, msgspec.MsgspecError):
            return None

    def remember_plan(self, plan: Plan) -> None:
        """Keep a plan for the next start. Raises NoSpaceError, InputError."""
        with disk.converted(self.store.folders.mesh):
            disk.write_atomic(self.store.folders.mesh / _PLAN, msgspec.json.encode(plan).decode())

    def look_for_models(self) -> None:
        """See again which models are here whole."""
        found = []
        for name in self.store.names():
            try:
                found.append((name, self.store.load(name).fingerprint()))
            except MeshinferError as error:
                log.warning("%s", error)
        self.named = tuple(found)

    def find(self, name: str, progress: Progress) -> Manifest:
        """A model by its name here, or made from its source. Raises all that adding a model does."""
        try:
            return self.store.load(name)
        except InputError:
            manifest = add_model(Store(self.store.folders), name, progress=progress)
            self.look_for_models()
            return manifest

    def local(self, fingerprint: str) -> Manifest | None:
        """The manifest of a model, if it is here."""
        if fingerprint in self.store.mesh_fingerprints():
            try:
                return self.store.load_mesh(Sha256(fingerprint))
            except SourceError as error:
                log.warning("%s", error)
        for name, known in self.named:
            if known == fingerprint:
                manifest = self.store.load(name)
                self.store.save_mesh(manifest)
                return manifest
        return None

    def accept(self, message: ManifestIs) -> Manifest | None:
        """A manifest from another node, if it has it. Raises SourceError for another one, NoSpaceError, InputError."""
        if not message.text:
            return None
        manifest = from_json(message.text)
        if manifest.fingerprint() != message.fingerprint:
            raise SourceError("a manifest that is not the one asked for")
        self.store.save_mesh(manifest)
        return manifest

    async def serve(
        self, choice: Choice, manifest: Manifest, fetch: Callable[[Sequence[FileRef]], Awaitable[None]]
    ) -> ServedModel:
        """The chosen model as an origin needs it. Raises FetchError, SourceError, CorruptFileError."""
        await fetch(manifest.tokenizer)

        def load() -> ServedModel:
            files = {ref.name: self.store.path(ref) for ref in manifest.tokenizer}
            tokenizer = load_tokenizer(files, self.store.folders)
            return ServedModel(
                choice, manifest, tokenizer, ChatTemplate(manifest.chat_template, tokenizer.special_tokens)
            )

        return await asyncio.to_thread(load)

    def know(self, manifest: Manifest, fingerprint: Sha256) -> None:
        """The manifest of the chosen model is here."""
        self.manifest, self.fingerprint = manifest, fingerprint
        self.look()

    def look(self) -> None:
        """See again which shards are here."""
        if self.manifest is not None:
            self.shards = tuple(
                shard.index
                for shard in self.manifest.shards
                if self.store.has(shard.graph) and self.store.has(shard.weights)
            )

    def files_of(self, shards: Sequence[int]) -> frozenset[Sha256]:
        """The files of the chosen model that a node has which has these shards."""
        if self.manifest is None:
            return frozenset()
        manifest = self.manifest
        held = [s for s in shards if 0 <= s < len(manifest.shards)]
        refs = [ref for s in held for ref in (manifest.shards[s].graph, manifest.shards[s].weights)]
        return frozenset(ref.sha256 for ref in (*refs, *manifest.tokenizer, *manifest.golden))
