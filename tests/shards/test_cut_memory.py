"""Cutting takes the memory of one layer, not of the model, which stays mapped from its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openvino as ov
import pytest

from tests.shards.decoder import Decoder

LAYERS, HIDDEN = 16, 640
OVERHEAD_MB = 30
"""Graphs, shape inference and the library itself, whatever the weights weigh."""

CUT = """
import sys, threading
from pathlib import Path
import openvino as ov
from meshinfer.config import Folders
from meshinfer.files.progress import silent
from meshinfer.shards.store import Store
from meshinfer.shards.write import write_shards

def anonymous_mb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1e3

peak, done = 0.0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_mb())

ov.Core().get_versions("CPU")
before = anonymous_mb()
watcher = threading.Thread(target=watch)
watcher.start()
store = Store(Folders(Path(sys.argv[2])))
with store.adding("model") as work:
    shards = write_shards(store, Path(sys.argv[1]), work, silent)
done.set()
watcher.join()
print(len(shards), max(shard.weights.size_bytes for shard in shards) / 1e6, peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
def test_cutting_needs_the_memory_of_a_layer(tmp_path: Path) -> None:
    path = tmp_path / "openvino_model.xml"
    ov.save_model(Decoder(layers=LAYERS, hidden=HIDDEN, beam_idx=True).build(), path, compress_to_fp16=False)
    model_mb = path.with_suffix(".bin").stat().st_size / 1e6
    command = [sys.executable, "-c", CUT, str(path), str(tmp_path / "home")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shards, layer_mb, peak_mb = (float(part) for part in done.stdout.split())
    assert shards == LAYERS + 2 and model_mb > LAYERS * layer_mb
    assert peak_mb < layer_mb + OVERHEAD_MB < model_mb / 2
