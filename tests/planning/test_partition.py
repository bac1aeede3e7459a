"""The planner's rings against every ring there is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.planning.cost import StagePlan, stage_bytes
from meshinfer.planning.partition import EXACT_NODES, Ring, best_ring, best_ring_with
from meshinfer.planning.specs import Demand, LinkSpec, ModelSpec, Network, NodeSpec
from meshinfer.types import NodeId
from tests.planning.worlds import LAN, every_ring, model, networks, node, nodes

demands = st.builds(Demand, st.integers(1, 2000), st.integers(1, 12))


def check(ring: Ring, model: ModelSpec, nodes: list[NodeSpec], demand: Demand) -> None:
    """A ring is whole, has no node twice, and fits."""
    known = {node.id: node for node in nodes}
    assert ring.stages[0].start == 0 and ring.stages[-1].stop == len(model.shards)
    assert all(a.stop == b.start for a, b in zip(ring.stages, ring.stages[1:], strict=False))
    assert len({stage.node for stage in ring.stages}) == len(ring.stages)
    for stage in ring.stages:
        assert stage_bytes(model, stage.start, stage.stop, demand) <= known[stage.node].memory_bytes


@settings(max_examples=150)
@given(data=st.data(), layers=st.integers(1, 5), demand=demands)
def test_no_ring_is_better(data: st.DataObject, layers: int, demand: Demand) -> None:
    here, shards = data.draw(nodes(4)), model(layers)
    network = data.draw(networks(here))
    found = best_ring(shards, here, network, demand)
    rates = [r.prediction.tokens_per_s(demand.sequences) for r in every_ring(shards, here, network, demand)]
    assert (found is None) == (not rates)
    if found is not None:
        check(found, shards, here, demand)
        assert found.prediction.tokens_per_s(demand.sequences) == pytest.approx(max(rates), rel=1e-9)


@settings(max_examples=60)
@given(data=st.data(), demand=demands)
def test_no_ring_with_a_given_node_is_better(data: st.DataObject, demand: Demand) -> None:
    here, shards = data.draw(nodes(3)), model(4)
    network = data.draw(networks(here))
    wanted = data.draw(st.sampled_from(here))
    found = best_ring_with(shards, here, network, demand, wanted)
    rates = [
        ring.prediction.tokens_per_s(demand.sequences)
        for ring in every_ring(shards, here, network, demand)
        if wanted.id in {stage.node for stage in ring.stages}
    ]
    assert (found is None) == (not rates)
    if found is not None:
        assert found.prediction.tokens_per_s(demand.sequences) == pytest.approx(max(rates), rel=1e-9)


@settings(max_examples=40)
@given(data=st.data(), demand=demands)
def test_many_nodes_are_never_worse_than_one(data: st.DataObject, demand: Demand) -> None:
    here = [node(f"pc-{n}", *data.draw(st.tuples(st.integers(5, 400), st.floats(0.1, 20)))) for n in range(9)]
    assert len(here) > EXACT_NODES
    shards, network = model(12), data.draw(networks(here))
    found = best_ring(shards, here, network, demand)
    alone = [best_ring(shards, [one], network, demand) for one in here]
    if found is None:
        assert not any(alone)
    else:
        check(found, shards, here, demand)
        best = max((ring.prediction.tokens_per_s(demand.sequences) for ring in alone if ring), default=0.0)
        assert found.prediction.tokens_per_s(demand.sequences) >= best


@settings(max_examples=100)
@given(data=st.data(), demand=demands)
def test_slow_nodes_do_not_hide_what_the_others_can_do(data: st.DataObject, demand: Demand) -> None:
    here, shards = data.draw(nodes(4)), model(5)
    spare = [node(f"spare-{n}", memory_mb=16, layer_ms=1000) for n in range(EXACT_NODES)]
    exact, tried = (best_ring(shards, some, Network(LAN), demand) for some in (here, [*here, *spare]))
    if exact is not None:
        assert tried is not None
        rates = [ring.prediction.tokens_per_s(demand.sequences) for ring in (exact, tried)]
        assert rates[1] >= (1 - 1e-9) * rates[0]


def test_a_fast_machine_carries_more() -> None:
    ring = best_ring(model(30), [node("slow", layer_ms=4, head_ms=12), node("fast")], Network(LAN), Demand(64, 8))
    assert ring is not None
    layers = {stage.node: stage.stop - stage.start for stage in ring.stages}
    assert layers[NodeId("fast")] > 2.5 * layers[NodeId("slow")]


def test_a_slow_link_is_not_worth_it_for_one_user() -> None:
    far = Network(LinkSpec(0.2, 1e6))
    ring = best_ring(model(30), [node("a"), node("b")], far, Demand(64, 1))
    assert ring is not None and len(ring.stages) == 1


def test_what_fits_nowhere_alone_is_spread() -> None:
    ring = best_ring(model(30), [node("a", 200), node("b", 200)], Network(LAN), Demand(64, 1))
    assert ring is not None and [stage.node for stage in ring.stages] in (["a", "b"], ["b", "a"])
    assert best_ring(model(30), [node("a", 200), node("b", 100)], Network(LAN), Demand(64, 1)) is None
    assert best_ring(model(30), [], Network(LAN), Demand()) is None


def test_equal_choices_are_made_alike_whatever_the_order_of_the_nodes() -> None:
    here = [node(f"pc-{n}") for n in range(3)]
    rings = {best_ring(model(6), some, Network(LAN), Demand()) for some in (here, here[::-1])}
    assert len(rings) == 1


def test_64_nodes_and_80_layers_take_less_than_a_second() -> None:
    here = [node(f"pc-{n:02d}", 100 + 13 * n % 400, 1 + n % 7, 3 + n % 5) for n in range(64)]
    links = {
        frozenset((a.id, b.id)): LinkSpec(0.0002 * (1 + (i * j) % 11), 1e8)
        for i, a in enumerate(here)
        for j, b in enumerate(here)
        if i < j
    }
    times = []
    for _ in range(3):
        began = time.process_time()
        ring = best_ring(model(80), here, Network(LAN, links), Demand(2048, 16))
        times.append(time.process_time() - began)
    assert ring is not None and min(times) < 1.0


def test_a_stage_names_its_shards() -> None:
    ring = best_ring(model(2), [node("a")], Network(LAN), Demand())
    assert ring is not None and ring.stages == (StagePlan(NodeId("a"), 0, 4),)
