"""What this node can carry: its memory budget, its device, and how fast that is."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

import msgspec
import psutil

from meshinfer.config import Folders
from meshinfer.engine.calibrate import calibrate, probe_rate
from meshinfer.engine.devices import Device, resolve
from meshinfer.engine.stage import StageOptions
from meshinfer.errors import DeviceError, MeshinferError
from meshinfer.files import disk
from meshinfer.planning.cost import StagePlan
from meshinfer.settings import Settings
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, Precision

log = logging.getLogger(__name__)

WAVER = 1.25
"""By which factor a stage may be faster or slower than measured before that counts."""
_ROUND_BYTES = 256 << 20
_LEAST_RESERVE_BYTES = 1 << 30
_RESERVED_PART = 8


class Capacity:
    """`measure` once, `calibrate` for each model: both take seconds and belong in a thread."""

    def __init__(self, settings: Settings) -> None:
        """Raises DeviceError where the device that was asked for is missing."""
        self._settings = settings
        self.device: Device = resolve(settings.device)
        self.threads = settings.threads or usable_cores()
        self.probe_bytes_s = 0.0
        self.layer_s, self.head_s = 0.0, 0.0
        self.fingerprint = ""

    def measure(self, folders: Folders) -> None:
        """Compare this device with those of other nodes; what was found once is kept."""
        path = folders.probes
        key = f"{self.device.full_name} {self.threads} openvino-{version('openvino')}"
        try:
            known = msgspec.json.decode(path.read_bytes(), type=dict[str, Annotated[float, msgspec.Meta(gt=0)]])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            known = {}
        if key not in known:
            known[key] = probe_rate(self.device, self.threads)
            with suppress(OSError):  # without the file it is measured again next time
                folders.home.mkdir(parents=True, exist_ok=True)
                disk.write_atomic(path, msgspec.json.encode(known).decode())
        self.probe_bytes_s = known[key]

    def memory_bytes(self) -> int:
        """What stages may take, those that there are with them: what is free, less a reserve, unless it is set.

        Nothing where the device is gone.
        """
        if self._settings.memory_bytes is not None:
            return self._settings.memory_bytes
        system = psutil.virtual_memory()
        reserve = max(_LEAST_RESERVE_BYTES, system.total // _RESERVED_PART)
        own = psutil.Process().memory_info().rss
        try:
            free = resolve(self.device.name).free_memory_bytes + own - reserve
        except DeviceError as error:
            log.warning("this node can carry nothing now: %s", error)
            return 0
        return max(0, free // _ROUND_BYTES * _ROUND_BYTES)

    def options(self, kv: KvBackend, precision: Precision, kv_budget_bytes: int) -> StageOptions:
        """How stages are opened here."""
        return StageOptions(self.device, kv, precision, kv_budget_bytes, self.threads)

    def calibrate(self, store: Store, manifest: Manifest, kv: KvBackend, precision: Precision) -> bool:
        """Seconds per layer and for the head, by the shards that are here; whether there were any."""
        self.fingerprint = fingerprint = manifest.fingerprint()
        self.layer_s = self.head_s = 0.0
        layers = [shard for shard in manifest.shards if shard.kind == "layer"]
        if not any(store.has(shard.graph) and store.has(shard.weights) for shard in layers):
            return False
        try:
            found = calibrate(store, manifest, self.options(kv, precision, 0))
        except MeshinferError as error:
            log.warning("cannot measure %s here: %s", manifest.name, error)
            return False
        if self.fingerprint != fingerprint:  # another model was chosen meanwhile
            return False
        self.layer_s, self.head_s = found.layer_s, found.head_s or 0.0
        return True

    def learn(self, token_s: float, manifest: Manifest, part: StagePlan, head_ratio: float | None) -> None:
        """Seconds per layer from a token's time in a whole stage, where nothing was measured yet.

        `head_ratio`: how many layers the head is worth; without it a stage with the head teaches nothing.
        """
        heads = part.stop == len(manifest.shards)
        layers = sum(spec.kind == "layer" for spec in manifest.range(part.start, part.stop))
        if self.layer_s or token_s <= 0 or not layers or (heads and head_ratio is None):
            return
        self.layer_s = token_s / (layers + (head_ratio or 0.0 if heads else 0.0))
        self.head_s = self.layer_s * head_ratio if heads and head_ratio else 0.0

    def adapt(self, token_s: float, manifest: Manifest, part: StagePlan) -> bool:
        """Correct what was measured by what a token takes in the stage that serves; whether that was much."""
        layers = sum(spec.kind == "layer" for spec in manifest.range(part.start, part.stop))
        expected = layers * self.layer_s + (self.head_s if part.stop == len(manifest.shards) else 0.0)
        if not expected or 1 / WAVER < token_s / expected < WAVER:
            return False
        self.layer_s *= token_s / expected
        self.head_s *= token_s / expected
        return True


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
