"""The baseline of `bench ring`: `python -m meshinfer.bench.unsplit GRAPH PRECISION CORE`, a process on one core.

For each line `PROMPT DECODE` on stdin it feeds a prompt of so many tokens to the unsplit model, decodes so many more,
and prints the tokens/s of those.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from meshinfer.bench.stage import WARM_STEPS, PlainLoop
from meshinfer.types import Precision


def main(graph: Path, precision: Precision, core: int) -> None:
    """Answer until stdin ends."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    loop = PlainLoop(graph, precision, 1)
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, decode = (int(word) for word in line.split())
        loop.start([np.arange(100, 100 + prompt, dtype=np.int64)], prompt + decode + WARM_STEPS)
        loop.decode(WARM_STEPS)
        print(decode / loop.decode(decode), flush=True)
        loop.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "exact" if sys.argv[2] == "exact" else "fast", int(sys.argv[3]))
