"""From a range of shards in the store to the model that a stage compiles."""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from meshinfer.engine.devices import converting, core
from meshinfer.errors import CutError
from meshinfer.shards.compose import compose
from meshinfer.shards.manifest import Manifest, ShardSpec
from meshinfer.shards.ports import HIDDEN, ROWS, parameter, snapshot
from meshinfer.shards.store import Store

_BATCHED_RANK = 3
"""[batch, position, width]; some graphs have joined the first two by then."""


def assemble(
    store: Store, manifest: Manifest, start: int, stop: int, *, position_axis: int, every_boundary: bool = False
) -> ov.Model:
    """The model of shards [start, stop), its head applied only to the rows asked for.

    `position_axis` is the axis of the hidden states along which positions lie; for `every_boundary` see `compose`.
    Every file is hashed first. Raises RangeError, CorruptFileError, InputError for missing files, DeviceError.
    """
    specs = manifest.range(start, stop)
    models = [_read(store, spec) for spec in specs]
    if specs[-1].kind == "head":
        _select_rows(models[-1], position_axis)
    return compose(models, f"{manifest.name}-{start}-{stop}", every_boundary=every_boundary)


def _read(store: Store, spec: ShardSpec) -> ov.Model:
    store.check(spec.graph)
    store.check(spec.weights)
    with converting("OpenVINO", f"reading shard {spec.index}"):
        return core().read_model(store.path(spec.graph), store.path(spec.weights))


def _select_rows(head: ov.Model, position_axis: int) -> None:
    """Gather the rows asked for in front of the product with the vocabulary.

    Not further up: there, heads of some families are reshaped by the number of all positions.
    """
    graph, nodes = snapshot(head)
    spine = graph.dependents([position for position in graph.find("Parameter") if graph.ops[position].name == HIDDEN])
    products = [position for position in graph.find("MatMul") if position in spine]
    if not products:
        raise CutError(f"{head.get_friendly_name()} has no product of hidden states with a vocabulary")
    product = nodes[products[-1]]
    port = next(port for port, (source, _) in enumerate(graph.ops[products[-1]].inputs) if source in spine)
    hidden = product.input_value(port)
    rank = hidden.get_partial_shape().rank.get_length()
    rows = parameter(ROWS, ov.Type.i64, ov.PartialShape([-1]))
    axis = ops.constant(position_axis if rank == _BATCHED_RANK else 0)
    picked = ops.gather(hidden, rows, axis)
    axis.set_friendly_name(f"{ROWS}/axis")  # names that no other op has: composing takes ops with one name for one op
    picked.set_friendly_name(f"{ROWS}/picked")
    product.input(port).replace_source_output(picked.output(0))
    head.add_parameters([rows])
    head.validate_nodes_and_infer_types()
