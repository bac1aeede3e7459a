"""What a planner says of its choice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.planning.explain import reasons, shortage
from meshinfer.planning.partition import best_ring
from meshinfer.planning.specs import Demand, LinkSpec, Network
from meshinfer.types import NodeId
from tests.planning.worlds import LAN, model, networks, node, nodes


def test_a_node_behind_a_slow_link_hears_what_it_would_cost() -> None:
    here = [node("a"), node("far")]
    network = Network(LAN, {frozenset((NodeId("a"), NodeId("far"))): LinkSpec(0.06, 1e8)})
    ring = best_ring(model(30), here, network, Demand(64, 1))
    assert ring is not None
    why = reasons(model(30), here, network, Demand(64, 1), ring)
    assert why[NodeId("a")].startswith("shards 0 to 31: 33.0 of 33.5 ms for a token, 0.37 GB of 1.05 GB")
    assert why[NodeId("far")].startswith("left out: its link would cost 60.1 ms for a token; with it ")


def test_a_slow_node_hears_how_slow_it_is() -> None:
    here = [node("a"), node("slow", layer_ms=200, head_ms=600)]
    ring = best_ring(model(30), here, Network(LAN), Demand(64, 4))
    assert ring is not None
    why = reasons(model(30), here, Network(LAN), Demand(64, 4), ring)
    assert "it takes 200.0 ms for a layer, the others 1.0 ms at most; with it" in why[NodeId("slow")]


def test_a_node_without_room_hears_what_a_shard_takes() -> None:
    here = [node("a"), node("small", memory_mb=5)]
    ring = best_ring(model(30), here, Network(LAN), Demand(64, 4))
    assert ring is not None
    why = reasons(model(30), here, Network(LAN), Demand(64, 4), ring)
    assert "budget of 0.01 GB holds no shard, the smallest takes 0.01 GB" in why[NodeId("small")]


@settings(max_examples=60)
@given(data=st.data(), demand=st.builds(Demand, st.integers(1, 2000), st.integers(1, 12)))
def test_every_node_has_a_reason(data: st.DataObject, demand: Demand) -> None:
    here, shards = data.draw(nodes(4)), model(4)
    network = data.draw(networks(here))
    ring = best_ring(shards, here, network, demand)
    if ring is None:
        text = str(shortage(shards, here, network, demand))
        assert "the model and its KV cache need" in text and "fit" in text
        return
    why = reasons(shards, here, network, demand, ring)
    used = {stage.node for stage in ring.stages}
    assert why.keys() == {n.id for n in here}
    for n in here:
        assert why[n.id].startswith("shards " if n.id in used else "left out: ")
        if "instead of" in why[n.id]:
            then, now = (float(word) for word in why[n.id].split("with it ")[1].split(" tokens/s instead of "))
            assert then <= now + 0.1


def test_what_would_fit_is_said() -> None:
    here = [node("a", memory_mb=200), node("b", memory_mb=200)]
    demand = Demand(8192, 16)
    assert best_ring(model(30), here, Network(LAN), demand) is None
    missing = shortage(model(30), here, Network(LAN), demand)
    assert missing.demand_that_fits is not None
    assert best_ring(model(30), here, Network(LAN), missing.demand_that_fits) is not None
    assert missing.needed_bytes == 350 * (1 << 20) + 16 * 8192 * 1024 * 30
    assert "need 4.39 GB, the nodes have 0.42 GB; 1 at once with 1024 tokens each would fit" in str(missing)


def test_what_cannot_fit_at_all_is_said() -> None:
    text = str(shortage(model(30), [node("a", memory_mb=200)], Network(LAN), Demand()))
    assert "it does not fit with the shortest context either" in text
