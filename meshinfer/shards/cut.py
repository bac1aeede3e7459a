"""Cut an OpenVINO language model into shards: embedding, layers, head; each a self-contained IR.

The original graph is edited in place for one shard at a time and put back, so that the peak memory
is one layer plus the memory-mapped weights. What depends only on inputs (rotary tables, masks) is
copied into every shard that needs it; a shape taken from another shard's tensor is taken from an
equal dimension of a tensor the shard has itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from meshinfer.errors import CutError
from meshinfer.shards.dims import Dims, probe_dims
from meshinfer.shards.graph import Tensor
from meshinfer.shards.layers import find_layout
from meshinfer.shards.ports import boundary_name, copy_runtime_options, output_name, parameter, snapshot
from meshinfer.shards.rows import RowLayout, from_rows, own_state, pass_on, row_layout, to_rows


class Cutter:
    """One model on the table. `shard(i)` yields shard i as a model that lives as long as the block."""

    def __init__(self, model: ov.Model) -> None:
        self.model = model
        self.graph, self._nodes = snapshot(model)
        self.layout = find_layout(self.graph)
        self._dims: Dims = probe_dims(self.model, self._nodes)
        self._owned: dict[int, list[int]] = {}
        for position, shard in self.layout.shard_of.items():
            self._owned.setdefault(shard, []).append(position)

    @property
    def shards(self) -> int:
        return self.layout.shards

    @contextmanager
    def shard(self, index: int) -> Iterator[ov.Model]:
        """Shard `index`: inputs and outputs carry the boundary's names. Raises CutError."""
        edit = _Edit(self, index)
        try:
            yield edit.build()
        finally:
            edit.undo()

    def output(self, tensor: Tensor) -> ov.Output:
        return self._nodes[tensor[0]].output(tensor[1])

    def node(self, position: int) -> ov.Node:
        return self._nodes[position]

    def dims(self, tensor: Tensor) -> tuple[tuple[int, ...], ...] | None:
        return self._dims.get(tensor)

    def owned(self, shard: int) -> list[int]:
        """Positions of the ops that belong to a shard alone, in topological order."""
        return sorted(self._owned.get(shard, []))


class _Edit:
    """The edges that were moved for one shard, and the way back."""

    def __init__(self, cutter: Cutter, index: int) -> None:
        self._cut, self._index = cutter, index
        self._graph, self._layout = cutter.graph, cutter.layout
        self._moved: list[tuple[Any, Any]] = []
        self._inputs: dict[Tensor, ov.Node] = {}
        self._lent: dict[Tensor, ov.Node] = {}
        """What comes in, as rows and in the shape it had."""
        incoming = self._layout.boundaries[index - 1] if index else ()
        for number, tensor in enumerate(incoming):
            layout = self._row_layout(tensor)
            kind, shape = cutter.output(tensor).get_element_type(), _free_shape(cutter.output(tensor), layout)
            self._inputs[tensor] = parameter(boundary_name(number), kind, shape)
            self._lent[tensor] = from_rows(self._inputs[tensor], layout, f"{self._name}/{boundary_name(number)}")

    @property
    def _name(self) -> str:
        return f"shard{self._index:03d}"

    def _row_layout(self, tensor: Tensor) -> RowLayout | None:
        dims = self._cut.dims(tensor)
        return None if dims is None else row_layout(dims, self._graph.ops[tensor[0]].name)

    def build(self) -> ov.Model:
        last = self._index == len(self._layout.boundaries)
        results = []
        if last:
            (result,) = self._graph.find("Result")
            outgoing: tuple[Tensor, ...] = (self._graph.ops[result].inputs[0],)
        else:
            outgoing = self._layout.boundaries[self._index]
        sinks = [p for p in self._graph.find("Assign") if p in self._layout.shard_of and self._has(p)]
        reached = self._walk([tensor[0] for tensor in outgoing if tensor not in self._inputs] + sinks)
        for number, tensor in enumerate(outgoing):
            result_node = ops.result(self._leaving(tensor, None if last else number))
            result_node.set_friendly_name("logits" if last else output_name(boundary_name(number)))
            result_node.output(0).set_names({result_node.get_friendly_name()})
            results.append(result_node)
        inputs = [self._cut.node(p) for p in sorted(reached) if self._graph.ops[p].type == "Parameter"]
        parameters = [*self._inputs.values(), *inputs]
        try:
            shard = ov.Model(results, [self._cut.node(p) for p in sinks], parameters, self._name)
        except RuntimeError as error:
            raise CutError(f"shard {self._index} is not a whole graph: {error}") from error
        if any(self._index in self._layout.copies.get(p, ()) for p in sinks):
            shard = own_state(shard, self._name)
        copy_runtime_options(self._cut.model, shard)
        return shard

    def _leaving(self, tensor: Tensor, number: int | None) -> ov.Output:
        """What a result gives: `tensor` as rows, or the logits as they are."""
        if tensor in self._inputs:
            return pass_on(self._inputs[tensor], f"{self._name}/{boundary_name(number or 0)}/passed")
        layout = None if number is None else self._row_layout(tensor)
        return to_rows(self._cut.output(tensor), layout, f"{self._name}/{output_name(boundary_name(number or 0))}")

    def undo(self) -> None:
        for target, source in reversed(self._moved):
            target.replace_source_output(source)
        self._moved.clear()

    def _walk(self, roots: list[int]) -> set[int]:
        """Everything the roots need, with each edge from outside moved to something the shard has."""
        reached = set(roots)
        pending = list(roots)
        while pending:
            position = pending.pop()
            op = self._graph.ops[position]
            for port, tensor in enumerate(op.inputs):
                if tensor in self._lent:
                    self._move(position, port, self._lent[tensor].output(0))
                elif not self._foreign(tensor):
                    if tensor[0] not in reached:
                        reached.add(tensor[0])
                        pending.append(tensor[0])
                elif op.type == "ShapeOf":
                    source = self._borrow_shape(position, tensor)
                    if source is not None and source[0] not in reached:
                        reached.add(source[0])
                        pending.append(source[0])
                else:
                    raise CutError(
                        f"shard {self._index} needs the value of {self._graph.ops[tensor[0]].name} from another shard"
                    )
        return reached

    def _move(self, position: int, port: int, source: ov.Output) -> None:
        target = self._cut.node(position).input(port)
        self._moved.append((target, target.get_source_output()))
        target.replace_source_output(source)

    def _foreign(self, tensor: Tensor) -> bool:
        if self._graph.ops[tensor[0]].name == "input_ids" and self._index:
            return True
        return not self._has(tensor[0])

    def _has(self, position: int) -> bool:
        return self._layout.has(self._index, position)

    def _borrow_shape(self, shape_of: int, tensor: Tensor) -> Tensor | None:
        """Let a `ShapeOf` read a tensor of this shard that agrees with `tensor` in every dimension that is used.

        Returns that tensor where it is an op of the graph, None where it is an incoming boundary tensor.
        """
        wanted = self._cut.dims(tensor)
        name = self._graph.ops[tensor[0]].name
        if wanted is None:
            raise CutError(f"shard {self._index} needs the shape of {name}, which cannot be predicted")
        picked = self._picked_dims(shape_of)
        for other in self._lenders(tensor, wanted):
            dims = self._cut.dims(other)
            if dims is None or not _agree(dims, wanted, range(len(wanted)) if picked is None else picked):
                continue
            lent = self._lent.get(other)
            if lent is None and not self._acyclic(other[0], shape_of):
                continue
            source = lent.output(0) if lent else self._cut.output(other)
            if picked is None and len(dims) > len(wanted):
                self._read_leading_dims(shape_of, source, len(wanted))
            else:
                self._move(shape_of, 0, source)
            return None if lent else other
        raise CutError(f"shard {self._index} needs the shape of {name} and has no tensor of that shape")

    def _lenders(self, tensor: Tensor, wanted: tuple[tuple[int, ...], ...]) -> list[Tensor]:
        """This shard's tensors, the likeliest first: the same op of another layer, what comes in, the rest."""
        own = [
            (position, port)
            for position in self._cut.owned(self._index)
            for port in range(len(self._graph.ops[position].ranks))
        ]
        kind = self._graph.ops[tensor[0]].type
        alike = [t for t in own if self._graph.ops[t[0]].type == kind and self._cut.dims(t) == wanted]
        return [*alike, *self._lent, *own]

    def _read_leading_dims(self, shape_of: int, source: ov.Output, count: int) -> None:
        """Let the readers of a whole shape see the first `count` dimensions of `source` instead.

        The nodes get names of their own: a generated one could be that of another op in another shard.
        """
        old = self._cut.node(shape_of).output(0)
        readers = list(old.get_target_inputs())
        shape = ops.shape_of(source, old.get_element_type())
        indices, axis = ops.constant(np.arange(count)), ops.constant(np.int64(0))
        leading = ops.gather(shape, indices, axis)
        name = f"{self._graph.ops[shape_of].name}/leading"
        for node, suffix in ((shape, "/shape"), (indices, "/indices"), (axis, "/axis"), (leading, "")):
            node.set_friendly_name(name + suffix)
        for reader in readers:
            self._moved.append((reader, old))
            reader.replace_source_output(leading.output(0))

    def _acyclic(self, position: int, shape_of: int) -> bool:
        return shape_of not in self._graph.ancestors([position], through_shapes=True, stop=self._lent)

    def _picked_dims(self, shape_of: int) -> set[int] | None:
        """The dimensions picked out of a shape by constant indices; None where it is used as a whole."""
        picked: set[int] = set()
        for target in self._cut.node(shape_of).output(0).get_target_inputs():
            user = target.get_node()
            indices = user.input_value(1).get_node() if user.get_type_name() == "Gather" else None
            if indices is None or target.get_index() or indices.get_type_name() != "Constant":
                return None
            picked.update(int(value) for value in indices.get_data().reshape(-1))
        return picked


def _agree(dims: tuple[tuple[int, ...], ...], wanted: tuple[tuple[int, ...], ...], picked: Iterable[int]) -> bool:
    """Whether two shapes are alike in the picked dimensions; those below 0 count from the end."""
    return all(-len(dims) <= d < len(dims) and dims[d] == wanted[d] for d in picked)


def _free_shape(source: ov.Output, layout: RowLayout | None) -> ov.PartialShape:
    """[batch, sequence, ...] with the first two left open."""
    shape = list(source.get_partial_shape()) if layout is None else [-1, -1, layout.width]
    return ov.PartialShape([ov.Dimension(-1) if axis < 2 else dim for axis, dim in enumerate(shape)])
