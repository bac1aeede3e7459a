"""Open a stage: assemble its shards, choose the KV back end, compile, reserve memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from meshinfer.engine.assemble import assemble
from meshinfer.engine.devices import Device, compile_properties, converting, core
from meshinfer.engine.paged import PagedStage, to_paged
from meshinfer.engine.stateful import StatefulStage
from meshinfer.engine.stateless import StatelessStage
from meshinfer.engine.step import Stage
from meshinfer.errors import DeviceError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, Precision

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How to run a stage. `kv_budget_bytes` is what its KV cache may take; `mask_rewinds`: see `engine.stateful`."""

    device: Device
    kv: KvBackend = "paged"
    precision: Precision = "fast"
    kv_budget_bytes: int = 256 << 20
    threads: int | None = None
    mask_rewinds: bool = False


def open_stage(store: Store, manifest: Manifest, start: int, stop: int, options: StageOptions) -> Stage:
    """Compile shards [start, stop) of a model into a stage.

    A budget too small for one KV block gives a stage without blocks, whose `block_bytes` says what one takes. Raises
    RangeError, DeviceError, PagedUnsupportedError, CutError, CorruptFileError, InputError for missing files.
    """
    specs = manifest.range(start, stop)
    device = options.device
    stateless = not any(spec.kv_bytes_per_token or spec.fixed_state_bytes for spec in specs)
    paged = options.kv == "paged" and not stateless
    if not device.paged and not stateless:
        raise DeviceError(f"{device.name} has no KV cache that meshinfer can use yet: take another device")
    model = assemble(store, manifest, start, stop, position_axis=0 if paged else 1)
    if paged:
        to_paged(model)
    compiled = compile_model(model, options, store.folders.compiled)
    if stateless:
        return StatelessStage(compiled, device.name, device.kv_block_tokens)
    if paged:
        return PagedStage(compiled, device, options.kv_budget_bytes)
    return StatefulStage(
        compiled,
        device.name,
        options.kv_budget_bytes,
        sum(spec.kv_bytes_per_token for spec in specs),
        rewinds=not any(spec.fixed_state_bytes for spec in specs),
        mask_rewinds=options.mask_rewinds and options.precision == "fast",
    )


def compile_model(model: ov.Model, options: StageOptions, cache_dir: Path | None = None) -> ov.CompiledModel:
    """Compile for the options' device and precision, from OpenVINO's cache where the device gains by one.

    A cache that cannot be used (a full disk, a damaged file) costs time, not the stage. Raises DeviceError.
    """
    name = options.device.name
    properties = compile_properties(name, options.precision, options.threads, cache_dir)
    with converting(name, f"compiling {model.get_friendly_name()}"):
        try:
            return core().compile_model(model, name, properties)
        except RuntimeError as error:
            if properties.pop("CACHE_DIR", None) is None:
                raise
            log.warning("compiling without the cache in %s: %s", cache_dir, error)
            return core().compile_model(model, name, properties)
