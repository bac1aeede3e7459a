"""Ctrl-C for child processes."""

from __future__ import annotations

import signal


def hear_control_c() -> None:
    """Run in a child before it starts (`preexec_fn`): shells let what they run in the background ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
