"""Folders for half-made things, removed when their maker is done, fails, or was killed."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from meshinfer.config import Folders
from meshinfer.errors import NoSpaceError, SourceError
from meshinfer.shards.disk import free_bytes

_PREFIX = "source-"


@contextmanager
def work_folder(folders: Folders) -> Iterator[Path]:
    """An empty folder under `folders.work` that is gone after the block.

    It is locked while it is in use; folders that a killed process left are recognised by their free lock.
    """
    try:
        folders.work.mkdir(parents=True, exist_ok=True)
        _sweep(folders.work)
        path = folders.work / f"{_PREFIX}{uuid.uuid4().hex}"
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
        path.mkdir()
    except OSError as error:
        raise SourceError(f"cannot write to {folders.work}: {error.strerror or error}") from error
    try:
        yield path
    finally:
        _remove(path, lock)


def demand_space(folder: Path, needed_bytes: int) -> None:
    """Raise NoSpaceError where the disk of `folder` has less than `needed_bytes` free."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise NoSpaceError(str(folder), needed_bytes, free)


def _sweep(work: Path) -> None:
    for left in work.glob(f"{_PREFIX}*.lock"):
        lock = FileLock(left)
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        _remove(left.with_suffix(""), lock)


def _remove(path: Path, lock: FileLock) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.release()
    if not path.exists():
        Path(lock.lock_file).unlink(missing_ok=True)
