"""SHA-256 of files, for names, checks and revisions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from meshinfer.errors import SourceError
from meshinfer.shards.progress import Progress, silent
from meshinfer.types import Sha256

CHUNK_BYTES = 4 << 20


def sha256_file(path: Path, progress: Progress = silent) -> Sha256:
    """The SHA-256 of a file's bytes. Raises SourceError where it cannot be read."""
    digest, done = hashlib.sha256(), 0
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress("hash", done, total)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    return Sha256(digest.hexdigest())


def sha256_files(paths: Iterable[Path], progress: Progress = silent) -> Sha256:
    """One SHA-256 for several files: of their names and hashes, whatever their order and folder."""
    lines = sorted(f"{path.name} {sha256_file(path, progress)}\n" for path in paths)
    return Sha256(hashlib.sha256("".join(lines).encode()).hexdigest())
