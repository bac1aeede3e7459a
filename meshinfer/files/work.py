"""Folders for half-made things, removed when their maker is done, fails, or was killed."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock, Timeout

from meshinfer.config import Folders
from meshinfer.errors import InputError
from meshinfer.files import disk

WorkKind = Literal["source", "adding", "tokenizer"]
"""What a folder is for: making an IR from a source, adding a model to the store, unpacking a tokenizer."""

LOCK_TIMEOUT_S = 120.0


@contextmanager
def work_folder(folders: Folders, kind: WorkKind = "source") -> Iterator[Path]:
    """An empty folder under `folders.work` that is gone after the block.

    It is locked while it is in use; folders that a killed process left are recognised by their free lock.
    Raises InputError and NoSpaceError where it cannot be made.
    """
    with disk.converted(folders.work):
        for folder in (folders.work, folders.locks):
            folder.mkdir(parents=True, exist_ok=True)
        sweep(folders)
        path = folders.work / f"{kind}-{secrets.token_hex(8)}"
        with _all_held(folders):
            path.mkdir()
            lock = _lock_of(folders, path)
            lock.acquire()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        with _all_held(folders):
            _let_go(lock, path)


def living(folders: Folders, kind: WorkKind) -> list[Path]:
    """The folders of this kind whose makers are at work; call `sweep` first."""
    return list(folders.work.glob(f"{kind}-*"))


def sweep(folders: Folders) -> None:
    """Delete the folders that killed processes left: nobody holds their lock."""
    with _all_held(folders):
        for path in [path for kind in get_args(WorkKind) for path in living(folders, kind)]:
            lock = _lock_of(folders, path)
            try:
                lock.acquire(timeout=0)
            except (Timeout, OSError):
                continue
            shutil.rmtree(path, ignore_errors=True)
            _let_go(lock, path)


@contextmanager
def held_briefly(path: Path) -> Iterator[None]:
    """Hold a lock that is only ever held for moments. Raises InputError where somebody keeps it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        raise InputError(f"another process holds {path}: is one stopped?") from None
    try:
        yield
    finally:
        lock.release()


def _all_held(folders: Folders) -> AbstractContextManager[None]:
    """While it is held no folder's lock is made, tried or deleted, so a free lock means a dead maker."""
    return held_briefly(folders.locks / "work.lock")


def _lock_of(folders: Folders, path: Path) -> FileLock:
    return FileLock(folders.locks / f"{path.name}.work.lock", thread_local=False)


def _let_go(lock: FileLock, path: Path) -> None:
    lock.release()
    if not path.exists():
        Path(lock.lock_file).unlink(missing_ok=True)
