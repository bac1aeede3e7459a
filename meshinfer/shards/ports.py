"""What the ports of a shard are called, and how an OpenVINO model becomes a plain `Graph`."""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from meshinfer.shards.graph import Graph, Op

HIDDEN = "hidden_states"

ROWS = "rows"
"""Input of a tail stage: which positions of the step the head is applied to, [rows] i64."""


def boundary_name(index: int) -> str:
    """Name of the tensor at `index` of a boundary's list."""
    return HIDDEN if index == 0 else f"{HIDDEN}.{index}"


def output_name(name: str) -> str:
    """Name a boundary tensor has where it leaves a shard (one model cannot name two tensors alike)."""
    return f"{name}.out"


def parameter(name: str, kind: ov.Type, shape: ov.PartialShape) -> ov.Node:
    """A model input called `name`, for people and for code."""
    node = ops.parameter(shape, kind)
    node.set_friendly_name(name)
    node.output(0).set_names({name})
    return node


_RUNTIME_OPTIONS = "runtime_options"


def copy_runtime_options(source: ov.Model, target: ov.Model) -> None:
    """Hand on what an exporter wrote into its IR for compiling it, such as a scale that keeps f16 from overflowing."""
    if source.has_rt_info(_RUNTIME_OPTIONS):
        for key, value in source.get_rt_info(_RUNTIME_OPTIONS).astype(dict).items():
            target.set_rt_info(str(value.value), [_RUNTIME_OPTIONS, key])


def snapshot(model: ov.Model) -> tuple[Graph, list[ov.Node]]:
    """The model as a `Graph`, and its nodes in the same order."""
    nodes = list(model.get_ordered_ops())
    position = {node.get_name(): index for index, node in enumerate(nodes)}

    def op(node: ov.Node) -> Op:
        inputs = tuple((position[value.get_node().get_name()], value.get_index()) for value in node.input_values())
        shapes = [output.get_partial_shape() for output in node.outputs()]
        ranks = tuple(s.rank.get_length() if s.rank.is_static else None for s in shapes)
        name = _input_name(node) if node.get_type_name() == "Parameter" else node.get_friendly_name()
        return Op(node.get_type_name(), name, inputs, ranks)

    return Graph(tuple(op(node) for node in nodes)), nodes


def _input_name(node: ov.Node) -> str:
    names: list[str] = sorted(node.output(0).get_names())
    return names[0] if names else str(node.get_friendly_name())
