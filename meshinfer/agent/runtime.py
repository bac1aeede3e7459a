"""How commands find the agent of a home: a file that says where its API is, readable by the user alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from meshinfer.config import Folders
from meshinfer.errors import InputError
from meshinfer.files import disk

_FILE = "agent.json"


class NoAgentError(InputError):
    """No agent runs with this home."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A running agent: `api` is its URL, `token` opens the paths that only its user may use."""

    pid: int
    api: str
    port: int
    name: str
    token: str
    api_key: str | None = None


@contextmanager
def only_agent(folders: Folders) -> Iterator[None]:
    """Hold a home for one agent. Raises InputError where another one has it."""
    with disk.converted(folders.home):
        folders.locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folders.locks / "agent.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InputError(f"an agent runs with {folders.home} already: see meshinfer status") from None
    try:
        yield
    finally:
        (folders.home / _FILE).unlink(missing_ok=True)
        lock.release()


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(32)


def write_runtime(folders: Folders, runtime: Runtime) -> None:
    """Say where this process's agent is."""
    with disk.converted(folders.home):
        disk.write_atomic(_path(folders), json.dumps(asdict(runtime)), mode=0o600)


def read_runtime(folders: Folders) -> Runtime:
    """The agent of a home. Raises NoAgentError."""
    try:
        runtime = msgspec.json.decode(_path(folders).read_bytes(), type=Runtime)
    except (OSError, msgspec.MsgspecError):
        raise NoAgentError(f"no agent runs with {folders.home}: start one with meshinfer up") from None
    return runtime


def api_url(host: str, port: int) -> str:
    """The URL of an API as this machine reaches it."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - that is where it listens, not where it is called
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _path(folders: Folders) -> Path:
    return folders.home / _FILE
