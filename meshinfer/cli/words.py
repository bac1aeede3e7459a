"""Numbers for people."""

from __future__ import annotations


def plural(count: int, what: str) -> str:
    """A number with its noun: 1 stage, 2 stages."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def size(count: int) -> str:
    """A number of bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
