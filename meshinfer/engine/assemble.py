"""From a range of shards in the store to the model that a stage compiles."""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from meshinfer.engine.devices import converting, core
from meshinfer.shards.compose import compose
from meshinfer.shards.manifest import Manifest, ShardSpec
from meshinfer.shards.ports import HIDDEN, ROWS, parameter
from meshinfer.shards.store import Store


def assemble(store: Store, manifest: Manifest, start: int, stop: int, *, position_axis: int) -> ov.Model:
    """The model of shards [start, stop), its head applied only to the rows asked for.

    `position_axis` is the axis of the hidden states along which positions lie. Every file
    is hashed first. Raises RangeError, CorruptFileError, InputError for missing files, DeviceError.
    """
    specs = manifest.range(start, stop)
    models = [_read(store, spec) for spec in specs]
    if specs[-1].kind == "head":
        _select_rows(models[-1], position_axis)
    return compose(models, f"{manifest.name}-{start}-{stop}")


def _read(store: Store, spec: ShardSpec) -> ov.Model:
    store.check(spec.graph)
    store.check(spec.weights)
    with converting("OpenVINO", f"reading shard {spec.index}"):
        return core().read_model(store.path(spec.graph), store.path(spec.weights))


def _select_rows(head: ov.Model, position_axis: int) -> None:
    (hidden,) = [p for p in head.get_parameters() if HIDDEN in p.output(0).get_names()]
    readers = list(hidden.output(0).get_target_inputs())
    rows = parameter(ROWS, ov.Type.i64, ov.PartialShape([-1]))
    axis = ops.constant(position_axis)
    picked = ops.gather(hidden, rows, axis)
    axis.set_friendly_name(f"{ROWS}/axis")  # names that no other op has: composing takes ops with one name for one op
    picked.set_friendly_name(f"{ROWS}/picked")
    for reader in readers:
        reader.replace_source_output(picked.output(0))
    head.add_parameters([rows])
    head.validate_nodes_and_infer_types()
