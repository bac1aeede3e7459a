"""Boundary tensors as rows: one per position, whatever shape the graph gives them.

A stage joins and parts the rows of several sequences, and so does the wire. A tensor that has heads
before positions (keys and values that a later layer attends to again) leaves and enters in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from meshinfer.errors import CutError
from meshinfer.shards.dims import BATCH, SEQUENCE


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a tensor becomes [batch, sequence, width]: its axes in that order, and what the last ones hold."""

    order: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.rest)


def row_layout(dims: tuple[tuple[int, ...], ...], name: str) -> RowLayout | None:
    """The layout of a tensor with these dimensions, None where it has rows already. Raises CutError."""
    axes = range(len(dims))
    rest = [axis for axis in axes if dims[axis] not in (BATCH, SEQUENCE)]
    if dims.count(BATCH) != 1 or dims.count(SEQUENCE) != 1 or any(len(set(dims[axis])) > 1 for axis in rest):
        raise CutError(f"{name} has to pass from one layer to another and has no rows: one for each position")
    order = (dims.index(BATCH), dims.index(SEQUENCE), *rest)
    return None if order == (0, 1, 2) else RowLayout(order, tuple(dims[axis][0] for axis in rest))


def to_rows(source: ov.Output, layout: RowLayout | None, name: str) -> ov.Output:
    """`source` as [batch, sequence, width]."""
    if layout is None:
        return source
    return _reshape(_transpose(source, layout.order, name), (0, 0, -1), name)


def from_rows(rows: ov.Node, layout: RowLayout | None, name: str) -> ov.Node:
    """What `to_rows` made rows of."""
    if layout is None:
        return rows
    back = tuple(int(axis) for axis in np.argsort(layout.order))
    return _transpose(_reshape(rows.output(0), (0, 0, *layout.rest), name), back, name).get_node()


def pass_on(rows: ov.Node, name: str) -> ov.Output:
    """The rows as another tensor: one cannot carry the names of an input and of an output."""
    return _reshape(rows.output(0), (0, 0, -1), name)


def own_state(shard: ov.Model, name: str) -> ov.Model:
    """A copy of a shard with names of its own for its state, so that it composes with the shard that has it too."""
    copy = shard.clone()
    for node in copy.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            known = node.get_attributes()["variable_id"]
            kind, shape = node.get_output_element_type(0), node.get_output_partial_shape(0)
            read = ops.read_value(node.input_value(0), f"{known}/{name}", kind, shape)
            read.set_friendly_name(f"{node.get_friendly_name()}/{name}")
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(read.output(0))
    writes = []
    for sink in copy.get_sinks():
        write = ops.assign(sink.input_value(0).get_node(), f"{sink.get_variable_id()}/{name}")
        write.set_friendly_name(f"{sink.get_friendly_name()}/{name}")
        writes.append(write)
    return ov.Model(copy.get_results(), writes, copy.get_parameters(), shard.get_friendly_name())


def _transpose(source: ov.Output, order: tuple[int, ...], name: str) -> ov.Output:
    if order == tuple(range(len(order))):
        return source
    return _named(ops.transpose(source, _constant(order, f"{name}/order")), f"{name}/transpose")


def _reshape(source: ov.Output, shape: tuple[int, ...], name: str) -> ov.Output:
    """0 keeps a dimension."""
    return _named(ops.reshape(source, _constant(shape, f"{name}/shape"), True), f"{name}/reshape")


def _constant(values: tuple[int, ...], name: str) -> ov.Output:
    return _named(ops.constant(np.array(values, np.int64)), name)


def _named(node: ov.Node, name: str) -> ov.Output:
    """Names that no other op has: composing shards takes ops with one name for copies of one op."""
    node.set_friendly_name(name)
    return node.output(0)
