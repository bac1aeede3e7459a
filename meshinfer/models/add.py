"""Add a model: from a source to a verified shard set in the store."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from meshinfer import __version__
from meshinfer.engine.devices import resolve
from meshinfer.engine.golden import record
from meshinfer.errors import InputError, SourceError
from meshinfer.files.disk import converted, require_space
from meshinfer.files.progress import Progress, silent
from meshinfer.models.check import check_files
from meshinfer.models.verify import verify_new
from meshinfer.shards.manifest import FileRef, Manifest
from meshinfer.shards.store import Store, model_name
from meshinfer.shards.write import write_shards
from meshinfer.sources.aliases import ALIASES
from meshinfer.sources.convert import prepare
from meshinfer.sources.folder import ModelFolder
from meshinfer.sources.source import IR_GRAPH, IR_WEIGHTS, HubSource, Source, decide, look
from meshinfer.text.template import ChatTemplate
from meshinfer.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

_SPARE_BYTES = 64 << 20
_COPIES_WHILE_OVERLAPPING = 6
"""Times a model's size that verifying it and recording its golden activations at once may take."""


def default_name(source: str, found: Source) -> str:
    """What a model is called where the user gives no name: the last part of its source, in the store's letters."""
    path = found.repo if isinstance(found, HubSource) else source
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1].lower().removesuffix(".gguf")
    return model_name(re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:64] or "model")


def add_model(
    store: Store,
    source: str,
    *,
    name: str | None = None,
    bits: int | None = None,
    progress: Progress = silent,
    on_wait: Callable[[], None] | None = None,
) -> Manifest:
    """Fetch, convert, cut, verify and save a model; one that is there already, and whole, is returned as it is.

    Raises InputError and its kinds, VerificationError; nothing is left half-written.
    """
    seen = look(source)
    found = decide(source, seen, ALIASES)  # a source that cannot be one is refused before anything is written
    chosen = default_name(source, found) if name is None else model_name(name)
    canonical = source if seen.kind == "nothing" else str(seen.path)
    with store.adding(chosen, on_wait) as work:
        if chosen in store.names():
            existing = store.load(chosen)
            if existing.source == canonical and bits is not None and existing.bits is None:
                raise InputError(
                    f"{source} already is {existing.precision}: bits applies to Hugging Face checkpoints only"
                )
            if existing.source != canonical or bits not in (None, existing.bits):
                raise InputError(
                    f"'{chosen}' is here already, made from {existing.source}: "
                    f"remove it (meshinfer model rm {chosen}) or give this one another --name"
                )
            if _is_whole(store, existing, progress):
                return existing
            store.remove(chosen)
        with prepare(canonical, store.folders, bits=bits, progress=progress) as model:
            manifest = build(store, model, chosen, work, progress)
        store.save(manifest)
        return manifest


def _is_whole(store: Store, manifest: Manifest, progress: Progress) -> bool:
    try:
        check_files(store, manifest, progress)
    except InputError as error:
        log.warning("%s: making it anew", error)
        return False
    return True


def build(store: Store, model: ModelFolder, name: str, work: Path, progress: Progress) -> Manifest:
    """Cut and verify a prepared model; call inside `store.adding`.

    Raises SourceError for a tokenizer or template that cannot be used, CutError, VerificationError, NoSpaceError.
    """
    try:
        json.dumps([model.source, model.chat_template, model.generation], allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise SourceError(f"what {model.source!r} says of itself cannot be kept: {error}") from error
    tokenizer = load_tokenizer({path.name: path for path in model.tokenizer_files}, store.folders)
    ChatTemplate(model.chat_template, tokenizer.special_tokens)
    weights = (model.folder / IR_WEIGHTS).stat().st_size
    require_space(store.folders.blobs, 2 * weights + _SPARE_BYTES)
    shards = write_shards(store, model.folder / IR_GRAPH, work, progress)
    manifest = Manifest(
        name=name,
        source=model.source,
        revision=model.revision,
        precision=model.precision,
        context_tokens=model.context_tokens,
        shards=shards,
        tokenizer=tuple(store.add_file(path, path.name, move=False) for path in model.tokenizer_files),
        chat_template=model.chat_template,
        generation=model.generation,
        verification=(),
        bits=model.bits,
        versions={"meshinfer": __version__, "openvino": version("openvino")},
    )
    with ThreadPoolExecutor(1) as pool:
        roomy = manifest.size_bytes * _COPIES_WHILE_OVERLAPPING <= resolve("cpu").free_memory_bytes
        recording = pool.submit(record, store, manifest) if roomy else None
        verification = verify_new(store, manifest, model.folder / IR_GRAPH, progress)
        activations = recording.result() if recording else record(store, manifest)
    golden = _keep_golden(store, activations, work)
    return dataclasses.replace(manifest, verification=verification, golden=golden)


def _keep_golden(store: Store, activations: Sequence[bytes], work: Path) -> tuple[FileRef, ...]:
    refs = []
    for index, content in enumerate(activations):
        path = work / f"golden{index:03d}.f32"
        with converted(work, len(content)):
            path.write_bytes(content)
        refs.append(store.add_file(path, path.name))
    return tuple(refs)
