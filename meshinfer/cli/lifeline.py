"""How the process of an agent ends: also with the one that started it, whose pipe is its stdin, and not too late."""

from __future__ import annotations

import os
import signal
import sys
import threading

CLOSE_S = 20.0
"""How long a clean end may take before the process is ended."""


def end_with_stdin() -> None:
    """From now on the end of stdin is a Ctrl-C, which a shell may have told its background jobs to ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def end_within(seconds: float) -> None:
    """End this process even if a thread is still at work then: a download or a compilation cannot be stopped."""

    def end() -> None:
        threading.Event().wait(seconds)
        os._exit(0)

    threading.Thread(target=end, name="end", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1 << 12):
        pass
    signal.raise_signal(signal.SIGINT)
    threading.Event().wait(CLOSE_S)
    os._exit(1)
