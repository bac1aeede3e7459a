"""What a token costs on this node, in measured seconds: of real shards, and of a synthetic product with its memory.

A planner needs both: the first for the models that it places, the second to compare nodes before they hold any shard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import groupby
from typing import Annotated

import msgspec
import numpy as np
import openvino as ov
from openvino import opset13 as ops

from meshinfer.engine.devices import Device
from meshinfer.engine.inference import Inference
from meshinfer.engine.stage import StageOptions, compile_model, open_stage
from meshinfer.engine.step import Entry, Rows, Stage, Step
from meshinfer.errors import InputError
from meshinfer.files import disk
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.ports import parameter
from meshinfer.shards.store import Store
from meshinfer.types import SequenceId

log = logging.getLogger(__name__)

_LAYERS = 5
_LAYERS_BYTES = 1 << 30
"""Fewer layers where they have more bytes than this: a call's own cost is nothing beside theirs."""
_PROMPT_TOKENS, _DECODE_TOKENS = 16, 32
_KV_TOKENS = 128
"""What the small cache holds: more than the tokens, for blocks are rounded up."""
_MEASURE_S, _PROBE_S = 0.2, 0.15
_LEAST = 7
"""Tokens that are timed at least, however slow."""
_WIDTHS = (2048, 4096)
_PRODUCTS = 4
"""Products with 8 MB of weights each: together more than caches of one core hold."""
_SEQUENCE = SequenceId(0)

Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e4)]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds that one decoded token takes in one layer, and in the head where that was here to be measured."""

    layer_s: Seconds
    head_s: Seconds | None


def probe_rate(device: Device, threads: int | None = None) -> float:
    """Bytes of int8 weights per second that products with one row read on this device. Raises DeviceError.

    For comparing nodes with each other: no model reads its weights at exactly this rate.
    """
    inference = Inference(compile_model(_products(), StageOptions(device, threads=threads)), device.name)
    row = {"row": np.ones((1, _WIDTHS[0]), np.float32)}
    took: list[float] = []
    inference.run(row)
    while len(took) < _LEAST or sum(took) < _PROBE_S:
        began = time.perf_counter()
        inference.run(row)
        took.append(time.perf_counter() - began)
    return _PRODUCTS * _WIDTHS[0] * _WIDTHS[1] / undisturbed(took)


def undisturbed(seconds: Sequence[float]) -> float:
    """What something takes when nothing else runs: the lower quartile, which other programs hardly move."""
    return sorted(seconds)[len(seconds) // 4]


def calibrate(
    store: Store, manifest: Manifest, options: StageOptions, layers: Sequence[int] | None = None
) -> Calibration:
    """Measure shards that are here, or look up what was measured before; `layers`: indices of shards to choose from.

    What is found is kept in the home; a file there that is damaged or cannot be written costs time, nothing else.
    Raises InputError where there is no layer to measure, and what `open_stage` raises.
    """
    key = _key(manifest, options)
    known = _load(store).get(key)
    head = manifest.shards[-1]
    if known and (known.head_s or not _is_here(store, manifest, head.index)):
        return known
    measured = _measure(store, manifest, options, _range(store, manifest, layers))
    _save(store, key, measured)
    return measured


@dataclass(slots=True)
class _Timed:
    """A stage, what it is fed, whether it ends in logits, and how long each token took in it."""

    stage: Stage
    inputs: tuple[Rows, ...]
    logits: bool
    took: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.took) >= _LEAST and sum(self.took) >= _MEASURE_S

    def decode(self) -> None:
        """Time tokens one by one after a short prompt, until enough have been timed."""
        self.stage.release(_SEQUENCE)  # and not rewound: that costs time in the stateful back end
        self.stage.forward(self._step(0, _PROMPT_TOKENS))
        for position in range(_PROMPT_TOKENS, _PROMPT_TOKENS + _DECODE_TOKENS):
            if self.is_done:
                break
            step = self._step(position, 1)
            began = time.perf_counter()
            self.stage.forward(step)
            self.took.append(time.perf_counter() - began)

    def _step(self, position: int, count: int) -> Step:
        blocks = tuple(range(-(-(position + count) // self.stage.block_tokens)))
        entry = Entry(_SEQUENCE, position, count, (count - 1,) if self.logits else (), blocks)
        return Step((entry,), hidden=tuple(rows[:count] for rows in self.inputs))


def _measure(store: Store, manifest: Manifest, options: StageOptions, bounds: tuple[int, int]) -> Calibration:
    """Time layers [start, stop), the first of them alone, and the head, in turn: the machine may be busy by moments."""
    start, stop = bounds
    last = len(manifest.shards) - 1
    with ExitStack() as stack:

        def opened(low: int, high: int) -> _Timed:
            kv_bytes = _KV_TOKENS * sum(spec.kv_bytes_per_token for spec in manifest.range(low, high))
            small = replace(options, kv_budget_bytes=kv_bytes)
            stage = stack.enter_context(closing(open_stage(store, manifest, low, high, small)))
            return _Timed(stage, _inputs(manifest, low), logits=high > last)

        whole = opened(start, stop)
        first = opened(start, start + 1) if stop - start > 1 else whole
        head = opened(last, last + 1) if _is_here(store, manifest, last) else None
        timed = [stage for stage in (whole, first, head) if stage]
        while pending := [stage for stage in timed if not stage.is_done]:
            for stage in pending:
                stage.decode()
    several, one = undisturbed(whole.took), undisturbed(first.took)
    more = stop - start - 1
    # The difference is free of what a call costs by itself; layers may be too small for it to stand out from noise.
    layer_s = (several - one) / more if several > one else several / (more + 1)
    return Calibration(layer_s, undisturbed(head.took) if head else None)


def _range(store: Store, manifest: Manifest, layers: Sequence[int] | None) -> tuple[int, int]:
    """Where some consecutive layers lie that are here."""
    candidates = range(1, len(manifest.shards) - 1)
    here = [index for index in candidates if (layers is None or index in layers) and _is_here(store, manifest, index)]
    if not here:
        raise InputError(f"no layer of {manifest.name} is here that could be measured")
    runs = [[index for _, index in run] for _, run in groupby(enumerate(here), lambda pair: pair[1] - pair[0])]
    longest = max(runs, key=len)
    fitting = max(2, _LAYERS_BYTES // max(manifest.shards[longest[0]].size_bytes, 1))
    return longest[0], longest[0] + min(len(longest), _LAYERS, fitting)


def _is_here(store: Store, manifest: Manifest, index: int) -> bool:
    spec = manifest.shards[index]
    return store.has(spec.graph) and store.has(spec.weights)


def _inputs(manifest: Manifest, start: int) -> tuple[Rows, ...]:
    """Random hidden states for a prompt."""
    random = np.random.default_rng(0)
    widths = [tensor.shape[-1] for tensor in manifest.shards[start - 1].outputs]
    return tuple(random.standard_normal((_PROMPT_TOKENS, width), np.float32) for width in widths)


def _products() -> ov.Model:
    """[1, width] f32 through matrices of i8 with one f32 scale a row, as exporters write them."""
    narrow, wide = _WIDTHS
    row = hidden = parameter("row", ov.Type.f32, ov.PartialShape([1, narrow]))
    for number in range(_PRODUCTS):
        rows, columns = (wide, narrow) if number % 2 == 0 else (narrow, wide)
        values = np.random.default_rng(number).integers(-127, 128, (rows, columns), np.int8)
        weights = ops.convert(ops.constant(values), "f32")
        scales = ops.constant(np.full((rows, 1), 1e-4, np.float32))
        hidden = ops.matmul(hidden, ops.multiply(weights, scales), False, True)
    return ov.Model([ops.result(hidden)], [row], "probe")


def _key(manifest: Manifest, options: StageOptions) -> str:
    """Everything that a measured time depends on."""
    threads = "all" if options.threads is None else options.threads
    how = f"{options.precision} {options.kv} {threads}"
    return f"{manifest.fingerprint()} {options.device.full_name} {how} openvino-{version('openvino')}"


def _load(store: Store) -> dict[str, Calibration]:
    try:
        return msgspec.json.decode(store.folders.calibrations.read_bytes(), type=dict[str, Calibration])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _save(store: Store, key: str, measured: Calibration) -> None:
    path = store.folders.calibrations
    content = msgspec.json.format(msgspec.json.encode(_load(store) | {key: measured}), indent=1)
    try:
        disk.write_atomic(path, content.decode())
    except OSError as error:
        log.warning("measured times are not kept: cannot write %s: %s", path, error)
