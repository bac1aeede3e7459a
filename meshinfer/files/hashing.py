"""Hashes of files, for names, checks and revisions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from meshinfer.errors import SourceError
from meshinfer.files.disk import CHUNK_BYTES
from meshinfer.files.progress import Progress, silent
from meshinfer.types import Sha256


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def digest_file(path: Path, digest: Digest, progress: Progress = silent) -> str:
    """Feed a file's bytes to `digest`; the result in hex. Raises SourceError where it cannot be read."""
    done = 0
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress("hash", done, total)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def sha256_file(path: Path, progress: Progress = silent) -> Sha256:
    """The SHA-256 of a file's bytes. Raises SourceError where it cannot be read."""
    return Sha256(digest_file(path, hashlib.sha256(), progress))


def sha256_files(paths: Iterable[Path], progress: Progress = silent) -> Sha256:
    """One SHA-256 for several files: of their names and hashes, whatever their order and folder."""
    lines = sorted(f"{path.name} {sha256_file(path, progress)}\n" for path in paths)
    return Sha256(hashlib.sha256("".join(lines).encode()).hexdigest())
