"""Writing files so that they are whole or absent; what the operating system says becomes one of our errors here."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from meshinfer.errors import InputError, NoSpaceError
from meshinfer.types import Sha256

CHUNK_BYTES = 1 << 20
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_REPLACE_TRIES = 20
_REPLACE_PAUSE_S = 0.05


@contextmanager
def converted(folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError met while writing `needed_bytes` under `folder` into NoSpaceError or InputError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(str(folder), needed_bytes, free_bytes(folder)) from error
        where = error.filename or folder
        raise InputError(f"cannot read or write {where}: {error.strerror or error}") from error


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that holds `folder`, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise NoSpaceError where the disk of `folder`, which need not exist yet, has less than `needed_bytes` free."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise NoSpaceError(str(folder), needed_bytes, free)


def copy_hashed(reading: IO[bytes], target: Path) -> Sha256:
    """Copy a stream to the new file `target`, through to the disk; the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with target.open("xb") as writing:
        while chunk := reading.read(CHUNK_BYTES):
            digest.update(chunk)
            writing.write(chunk)
        _flush(writing)
    return Sha256(digest.hexdigest())


def write_atomic(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file that a reader finds either as it was or as it is now; `mode` is its permissions, at most."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(text.encode())
            _flush(stream)
        replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def replace(source: Path, target: Path) -> None:
    """`os.replace` that reaches the disk and outlasts a virus scanner or a reader on Windows."""
    for remaining in reversed(range(_REPLACE_TRIES)):
        try:
            os.replace(source, target)
            break
        except PermissionError:
            if os.name != "nt" or not remaining:
                raise
            time.sleep(_REPLACE_PAUSE_S)
    sync_folder(target.parent)


def sync_file(path: Path) -> None:
    """Write a file's bytes through to the disk."""
    flags = os.O_RDWR if os.name == "nt" else os.O_RDONLY  # Windows flushes only what may be written
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last; Windows has no such call and needs none."""
    if os.name != "nt":
        sync_file(folder)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
