"""Which dimensions of a graph are equal whatever the batch, the sequence and the past.

Shape inference runs twice with different, mutually prime sizes; a dimension is then known by the
pair of values it took: a constant took the same value twice, and two dimensions that took the same
pair are the same dimension.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from meshinfer.errors import CutError, telling_line
from meshinfer.shards.graph import Tensor

Dims = dict[Tensor, tuple[tuple[int, ...], ...]]
"""For every tensor of known rank: per dimension the values it took, one per probe."""

_PROBES = ((2, 3, 11), (5, 7, 13))
"""(batch, sequence, past) of each probe."""

BATCH, SEQUENCE, _PAST = zip(*_PROBES, strict=True)
"""What a dimension is in both probes if it is the batch, or the sequence."""


def probe_dims(model: ov.Model, nodes: list[ov.Node]) -> Dims:
    """The dimensions of every tensor of `model`; tensors whose shape stays unknown are left out.

    `nodes` are the model's ops in order; the result is keyed by their positions.
    """
    probes = [_infer(model, *sizes) for sizes in _PROBES]
    dims: Dims = {}
    for position, node in enumerate(nodes):
        for port in range(node.get_output_size()):
            found = [probe.get((position, port)) for probe in probes]
            shapes = [shape for shape in found if shape is not None]
            if len(shapes) == len(_PROBES) and len({len(shape) for shape in shapes}) == 1:
                dims[(position, port)] = tuple(zip(*shapes, strict=True))
    return dims


def _infer(model: ov.Model, batch: int, sequence: int, past: int) -> dict[Tensor, tuple[int, ...]]:
    clone = model.clone()
    nodes = list(clone.get_ordered_ops())
    states = [_free_state(node) for node in nodes if node.get_type_name() == "ReadValue"]
    for node in nodes:
        keep_broadcast_dims(node)
    written = [ops.result(node.input_value(0)) for node in nodes if node.get_type_name() == "Assign"]
    probe = ov.Model([*clone.get_results(), *written], [*clone.get_parameters(), *states], "probe")
    sizes = {
        "input_ids": [batch, sequence],
        "attention_mask": [batch, past + sequence],
        "position_ids": [batch, sequence],
        "beam_idx": [batch],
    }
    shapes = {state.output(0): _state_shape(state, batch, past) for state in states}
    for parameter in clone.get_parameters():
        for name in parameter.output(0).get_names() & sizes.keys():
            rank = len(parameter.output(0).get_partial_shape())
            shapes[parameter.output(0)] = ([-1] * (rank - len(sizes[name]))) + sizes[name]
    try:
        probe.reshape(shapes)
    except RuntimeError as error:
        raise CutError(f"the shapes in this model contradict each other: {telling_line(error)}") from error
    return {
        (position, port): tuple(output.get_shape())
        for position, node in enumerate(nodes)
        for port, output in enumerate(node.outputs())
        if output.get_partial_shape().is_static
    }


def _free_state(node: ov.Node) -> ov.Node:
    """Put an input in place of a state read, so that a shape can be chosen for it."""
    stand_in = ops.parameter(node.get_output_partial_shape(0), node.get_output_element_type(0))
    for target in node.output(0).get_target_inputs():
        target.replace_source_output(stand_in.output(0))
    return stand_in


def keep_broadcast_dims(node: ov.Node) -> None:
    """Openvino-genai's GGUF reader writes 0 for "keep this dimension" in a two-way broadcast.

    Kernels that fuse the broadcast never look; shape inference with real sizes refuses it. 1 says the same.
    """
    if node.get_type_name() != "Broadcast" or node.get_attributes().get("mode") != "bidirectional":
        return
    target = node.input_value(1).get_node()
    for index, value in enumerate(target.input_values() if target.get_type_name() == "Concat" else []):
        part = value.get_node()
        if part.get_type_name() == "Constant" and not part.get_data().any():
            one = ops.constant(np.ones_like(part.get_data()))
            target.input(index).replace_source_output(one.output(0))


def _state_shape(state: ov.Node, batch: int, past: int) -> list[int]:
    """The first dimension is the batch, any other free one the past."""
    dims = state.get_output_partial_shape(0)
    return [d.get_length() if d.is_static else (past if axis else batch) for axis, d in enumerate(dims)]
