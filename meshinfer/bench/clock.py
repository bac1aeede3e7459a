"""Wall time of a step that is done again and again."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(step: Callable[[], object], times: int) -> float:
    """How long `times` calls of `step` take, in seconds."""
    started = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - started
