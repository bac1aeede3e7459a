"""Check a stored model: its files, and its output against the unsplit model made anew from its source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshinfer.engine.pipeline import even_cuts
from meshinfer.errors import VerificationError
from meshinfer.files.progress import Progress, silent
from meshinfer.models.verify import compare, reference
from meshinfer.shards.manifest import Manifest, Verification
from meshinfer.shards.store import Store
from meshinfer.sources.convert import prepare
from meshinfer.sources.source import IR_GRAPH
from meshinfer.types import KvBackend


def usable_backend(manifest: Manifest, wanted: KvBackend | None = None) -> KvBackend:
    """The KV back end to use. Raises VerificationError where the one wanted does not reproduce the model."""
    usable = manifest.kv_backends
    if wanted is None:
        return usable[0]
    if wanted not in usable:
        raise VerificationError(
            f"the {wanted} back end does not reproduce {manifest.name}; it runs with: {', '.join(usable)}"
        )
    return wanted


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
    with prepare(manifest.source, store.folders, bits=manifest.bits, progress=progress) as model:
        if model.revision != manifest.revision:
            raise VerificationError(
                f"{manifest.source} has changed since {manifest.name} was added: "
                f"revision {manifest.revision[:12]} then, {model.revision[:12]} now"
            )
        yield model.folder / IR_GRAPH


def verify_model(
    store: Store, name: str, stages: int, kv: KvBackend | None, progress: Progress = silent
) -> Verification:
    """Check files, then compare `stages` composed stages with the unsplit model in exact mode."""
    manifest = store.load(name)
    even_cuts(manifest, stages)  # refused now, not after a minute of hashing
    check_files(store, manifest, progress)
    chosen = kv or usable_backend(manifest)
    with unsplit_graph(store, manifest, progress) as graph:
        progress("verify", 0, 2)
        expected = reference(graph)
        progress("verify", 1, 2)
        result = compare(store, manifest, expected, stages, chosen)
        progress("verify", 2, 2)
    return result
