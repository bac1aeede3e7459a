"""What depends on what in a graph, by values and by shapes."""

from __future__ import annotations

import pytest

from meshinfer.shards.graph import Graph, Op


def graph(*ops: tuple[str, list[tuple[int, int]]]) -> Graph:
    """Ops of a type with their inputs, called by their positions; all outputs of rank 2."""
    return Graph(tuple(Op(kind, f"op{n}", tuple(inputs), (2, None)) for n, (kind, inputs) in enumerate(ops)))


CHAIN = graph(
    ("Parameter", []),
    ("ShapeOf", [(0, 0)]),
    ("Constant", []),
    ("Reshape", [(2, 0), (1, 0)]),
    ("Split", [(0, 0)]),
    ("Add", [(4, 0), (3, 0)]),
    ("Result", [(5, 0)]),
)


def test_ops_are_found_by_type() -> None:
    assert CHAIN.find("Parameter", "Constant") == [0, 2]
    assert CHAIN.find("MatMul") == []


def test_ranks_belong_to_outputs() -> None:
    assert (CHAIN.rank((4, 0)), CHAIN.rank((4, 1))) == (2, None)


def test_a_shape_carries_no_values() -> None:
    assert list(CHAIN.value_inputs(1)) == []
    assert CHAIN.dependents([0]) == {0, 4, 5, 6}
    assert CHAIN.dependents([1]) == {1, 3, 5, 6}


@pytest.mark.parametrize(
    ("through_shapes", "expected"), [(False, {1, 2, 3}), (True, {0, 1, 2, 3})], ids=["values", "shapes too"]
)
def test_ancestors_go_through_shapes_only_if_asked(through_shapes: bool, expected: set[int]) -> None:
    assert CHAIN.ancestors([3], through_shapes=through_shapes) == expected


def test_ancestors_stop_at_tensors_not_at_ops() -> None:
    assert CHAIN.ancestors([6], stop=[(4, 0)]) == {1, 2, 3, 5, 6}
    assert CHAIN.ancestors([6], stop=[(4, 1)]) == {0, 1, 2, 3, 4, 5, 6}
