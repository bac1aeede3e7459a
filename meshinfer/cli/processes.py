"""The processes of agents, as commands see them."""

from __future__ import annotations

import time

from meshinfer.agent.runtime import NoAgentError, read_runtime
from meshinfer.config import Folders

POLL_S = 0.1


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody asked for its exit code does not."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def wait_until_gone(folders: Folders, pid: int, seconds: float) -> bool:
    """Wait until the agent of a home is gone, with its file and its process; whether it went in time."""
    deadline = time.monotonic() + seconds
    while (there := _said(folders, pid) or alive(pid)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return not there


def _said(folders: Folders, pid: int) -> bool:
    try:
        return read_runtime(folders).pid == pid
    except NoAgentError:
        return False
