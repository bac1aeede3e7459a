"""Check a stored model: its files, and its output against the unsplit model made anew from its source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshinfer.engine.pipeline import even_cuts
from meshinfer.errors import InputError, SourceError, VerificationError
from meshinfer.files.progress import Progress, silent
from meshinfer.models.verify import compare, reference
from meshinfer.shards.manifest import Manifest, Verification
from meshinfer.shards.store import Store
from meshinfer.sources.aliases import ALIASES
from meshinfer.sources.convert import prepare
from meshinfer.sources.source import IR_GRAPH, HubSource, decide, look
from meshinfer.types import KvBackend


def usable_backend(manifest: Manifest, wanted: KvBackend | None = None) -> KvBackend:
    """The KV back end to use. Raises InputError where the one wanted does not reproduce the model."""
    usable = manifest.kv_backends
    if not usable:
        raise InputError(f"{manifest.name} was never verified: remove it and add it again")
    if wanted is not None and wanted not in usable:
        raise InputError(
            f"{manifest.name} does not run with {wanted} KV, which computes something else; use {usable[0]}"
        )
    return wanted or usable[0]


def check_files(store: Store, manifest: Manifest, progress: Progress = silent) -> None:
    """Hash every file of a model. Raises CorruptFileError naming the file and both hashes."""
    total, done = sum(ref.size_bytes for ref in manifest.files), 0
    for ref in manifest.files:
        progress("hash", done, total)
        store.check(ref)
        done += ref.size_bytes
    progress("hash", total, total)


@contextmanager
def unsplit_graph(store: Store, manifest: Manifest, progress: Progress = silent) -> Iterator[Path]:
    """The IR the shards were cut from, made again from the model's source for as long as the block lasts.

    Raises SourceError where the source is gone, VerificationError where it is another model by now.
    """
    with prepare(_pinned(manifest), store.folders, bits=manifest.bits, progress=progress) as model:
        if model.revision != manifest.revision:
            raise VerificationError(
                f"{manifest.source} has changed since {manifest.name} was added: "
                f"revision {manifest.revision[:12]} then, {model.revision[:12]} now"
            )
        yield model.folder / IR_GRAPH


def _pinned(manifest: Manifest) -> str:
    """The source of a model, at the commit it had where it is a repository."""
    found = decide(manifest.source, look(manifest.source), ALIASES)
    return f"{found.repo}@{manifest.revision}" if isinstance(found, HubSource) else manifest.source


def verify_model(
    store: Store, name: str, stages: int, kv: KvBackend | None, progress: Progress = silent
) -> Verification:
    """Check files, then compare `stages` composed stages with the unsplit model in exact mode."""
    manifest = store.load(name)
    even_cuts(manifest, stages)  # refused now, not after a minute of hashing
    check_files(store, manifest, progress)
    chosen = kv or usable_backend(manifest)
    with ExitStack() as stack:
        try:
            graph = stack.enter_context(unsplit_graph(store, manifest, progress))
        except SourceError as error:
            raise SourceError(
                f"the files of {name} are whole, but to compare them takes their source: {error}"
            ) from error
        progress("verify", 0, 2)
        expected = reference(graph)
        progress("verify", 1, 2)
        result = compare(store, manifest, expected, stages, chosen)
        progress("verify", 2, 2)
    return result
