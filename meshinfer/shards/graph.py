"""A plain picture of an OpenVINO graph: integers and tuples, so that analysis needs no OpenVINO.

Every op has a position in topological order. An edge into a `ShapeOf` carries no values, only a
shape; almost everything here follows *value* edges, which leave those out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

Tensor = tuple[int, int]
"""(position of the producing op, output port)."""

SHAPE_ONLY = frozenset({"ShapeOf"})


@dataclass(frozen=True, slots=True)
class Op:
    """One op: `inputs` are the tensors it reads, in port order."""

    type: str
    name: str
    inputs: tuple[Tensor, ...]
    ranks: tuple[int | None, ...]
    """Rank of every output, None where it is not known."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in topological order."""

    ops: tuple[Op, ...]

    def rank(self, tensor: Tensor) -> int | None:
        """Number of dimensions of a tensor."""
        return self.ops[tensor[0]].ranks[tensor[1]]

    def find(self, *types: str) -> list[int]:
        """Positions of all ops of these types."""
        return [position for position, op in enumerate(self.ops) if op.type in types]

    def value_inputs(self, position: int) -> Sequence[Tensor]:
        """The tensors whose values (not only shapes) an op reads."""
        op = self.ops[position]
        return () if op.type in SHAPE_ONLY else op.inputs

    def dependents(self, seeds: Iterable[int]) -> set[int]:
        """Ops whose value depends on the value of a seed, the seeds included."""
        reached = set(seeds)
        for position in range(len(self.ops)):
            if any(source in reached for source, _ in self.value_inputs(position)):
                reached.add(position)
        return reached

    def ancestors(
        self, seeds: Iterable[int], *, through_shapes: bool = False, stop: Collection[Tensor] = ()
    ) -> set[int]:
        """Ops that the seeds depend on, the seeds included, without going past the tensors in `stop`."""
        reached = set(seeds)
        pending = list(reached)
        while pending:
            position = pending.pop()
            inputs = self.ops[position].inputs if through_shapes else self.value_inputs(position)
            for tensor in inputs:
                if tensor[0] not in reached and tensor not in stop:
                    reached.add(tensor[0])
                    pending.append(tensor[0])
        return reached
