"""Open a stage: assemble its shards, choose the KV back end, compile, reserve memory."""

from __future__ import annotations

from dataclasses import dataclass

import openvino as ov

from meshinfer.engine.assemble import assemble
from meshinfer.engine.devices import Device, compile_properties, converting, core
from meshinfer.engine.paged import PagedStage, to_paged
from meshinfer.engine.stateful import StatefulStage
from meshinfer.engine.stateless import StatelessStage
from meshinfer.engine.step import Stage
from meshinfer.errors import KvBudgetError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, Precision


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How to run a stage. `kv_budget_bytes` is what its KV cache may take."""

    device: Device
    kv: KvBackend = "paged"
    precision: Precision = "fast"
    kv_budget_bytes: int = 256 << 20
    threads: int | None = None


def open_stage(store: Store, manifest: Manifest, start: int, stop: int, options: StageOptions) -> Stage:
    """Compile shards [start, stop) of a model into a stage.

    Raises RangeError, KvBudgetError, DeviceError, PagedUnsupportedError, InputError for missing files.
    """
    specs = manifest.range(start, stop)
    device = options.device
    stateless = not any(spec.kv_bytes_per_token or spec.fixed_state_bytes for spec in specs)
    paged = options.kv == "paged" and not stateless
    model = assemble(store, manifest, start, stop, position_axis=0 if paged else 1)
    if paged:
        to_paged(model)
    compiled = compile_model(model, options)
    if stateless:
        return StatelessStage(compiled, device.name, device.kv_block_tokens)
    if paged:
        return PagedStage(compiled, device, options.kv_budget_bytes)
    stage = StatefulStage(
        compiled,
        device.name,
        options.precision,
        options.kv_budget_bytes,
        sum(spec.kv_bytes_per_token for spec in specs),
        rewinds=not any(spec.fixed_state_bytes for spec in specs),
    )
    if stage.kv_blocks < 1:
        raise KvBudgetError(
            f"{options.kv_budget_bytes} bytes of KV cache hold no block: "
            f"one of {stage.block_tokens} tokens takes {stage.block_bytes}"
        )
    return stage


def compile_model(model: ov.Model, options: StageOptions) -> ov.CompiledModel:
    """Compile for the options' device and precision. Raises DeviceError."""
    properties = compile_properties(options.device.name, options.precision, options.threads)
    with converting(options.device.name, f"compiling {model.get_friendly_name()}"):
        return core().compile_model(model, options.device.name, properties)
