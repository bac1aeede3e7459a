"""How a long job says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""`progress(phase, done, total)`: of "download" and "hash" in bytes, of others in steps; a total of 0 is unknown."""


def silent(phase: str, done: int, total: int) -> None:
    """Progress for those who do not look."""
