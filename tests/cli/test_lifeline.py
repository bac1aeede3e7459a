"""The process of an agent ends, whatever its threads do."""

from __future__ import annotations

import subprocess
import sys

WORDS = "import threading, time; from meshinfer.cli.lifeline import end_within; end_within(0.1); "


def test_a_thread_that_cannot_be_stopped_does_not_keep_the_process() -> None:
    code = WORDS + "threading.Thread(target=time.sleep, args=(300,)).start()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
