"""A clean stop however it is asked for: Ctrl-C, SIGTERM, and on Windows Ctrl-Break or a closed console."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CONSOLE_WAIT_S = 4.0
"""Windows ends a process five seconds after its console was closed."""
_CLOSING_EVENTS = (2, 5, 6)
"""CTRL_CLOSE_EVENT, CTRL_LOGOFF_EVENT, CTRL_SHUTDOWN_EVENT."""


@contextmanager
def on_stop(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the running loop when the process is asked to end, for as long as the block lasts."""
    loop = asyncio.get_running_loop()

    def handler(*_: Any) -> None:
        loop.call_soon_threadsafe(stop)

    names = [name for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), handler) for name in names}
    ended = threading.Event()
    console = _watch_console(handler, ended)
    try:
        yield
    finally:
        ended.set()
        for name, old in before.items():
            signal.signal(getattr(signal, name), old)
        del console


def _watch_console(handler: Callable[[], None], ended: threading.Event) -> Any:
    """On Windows, hear of a console that is closed; what is returned has to be kept."""
    if os.name != "nt":
        return None
    import ctypes

    as_callback = getattr(ctypes, "WINFUNCTYPE")(ctypes.c_int, ctypes.c_uint)  # noqa: B009 - Windows alone has it

    def closing(event: int) -> int:
        if event not in _CLOSING_EVENTS:
            return 0
        handler()
        ended.wait(CONSOLE_WAIT_S)
        return 1

    kept = as_callback(closing)
    getattr(ctypes, "windll").kernel32.SetConsoleCtrlHandler(kept, 1)  # noqa: B009
    return kept
