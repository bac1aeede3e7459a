"""Memory with which a model needs every node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import InputError
from meshinfer.planning.partition import best_ring
from meshinfer.planning.specs import Demand, ModelSpec, Network, NodeSpec, ShardCost
from meshinfer.planning.spread import memory_for_all
from meshinfer.types import NodeId
from tests.planning.worlds import LAN, model


def nodes(count: int, memory_bytes: int) -> list[NodeSpec]:
    return [NodeSpec(NodeId(f"pc-{n}"), f"pc-{n}", memory_bytes, 0.001, 0.003) for n in range(count)]


@given(sizes=st.lists(st.integers(1, 1000), min_size=3, max_size=12), count=st.integers(1, 4))
def test_all_nodes_hold_the_model_and_one_fewer_do_not(sizes: list[int], count: int) -> None:
    some, demand = ModelSpec("m", tuple(ShardCost(size) for size in sizes), 1), Demand(1, 1)
    try:
        memory = memory_for_all(some, demand, count)
    except InputError:
        return
    ring = best_ring(some, nodes(count, memory), Network(LAN), demand)
    assert ring is not None and len(ring.stages) == count
    assert count == 1 or best_ring(some, nodes(count - 1, memory), Network(LAN), demand) is None


def test_too_many_nodes_are_refused_with_how_many_there_may_be() -> None:
    assert memory_for_all(model(4), Demand(1, 1), 3) > 0
    with pytest.raises(InputError, match="m cannot be spread over 9 nodes with all needed: over 4 at most"):
        memory_for_all(model(4), Demand(1, 1), 9)
