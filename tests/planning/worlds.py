"""Small models, nodes and networks for hypothesis, and the best ring by trying every one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from hypothesis import strategies as st

from meshinfer.planning.cost import StagePlan, predict, stage_bytes
from meshinfer.planning.partition import Ring
from meshinfer.planning.specs import Demand, LinkSpec, ModelSpec, Network, NodeSpec, ShardCost
from meshinfer.types import NodeId

MB = 1 << 20
LAN = LinkSpec(0.0005, 1e8)


def model(layers: int, layer_mb: int = 10, hidden_bytes: int = 4096) -> ModelSpec:
    layer = ShardCost(layer_mb * MB, kv_bytes_per_token=1024)
    head = ShardCost(3 * layer_mb * MB)
    return ModelSpec("m", (ShardCost(2 * layer_mb * MB), *[layer] * layers, head), hidden_bytes)


def node(name: str, memory_mb: int = 1000, layer_ms: float = 1.0, head_ms: float = 3.0) -> NodeSpec:
    return NodeSpec(NodeId(name), name, memory_mb * MB, layer_ms / 1e3, head_ms / 1e3)


@st.composite
def nodes(draw: st.DrawFn, most: int) -> list[NodeSpec]:
    count = draw(st.integers(1, most))
    return [
        node(f"pc-{n}", draw(st.integers(5, 120)), draw(st.floats(0.1, 20)), draw(st.floats(0.1, 60)))
        for n in range(count)
    ]


@st.composite
def networks(draw: st.DrawFn, among: Sequence[NodeSpec]) -> Network:
    pairs = [frozenset((a.id, b.id)) for a, b in combinations(among, 2)]
    link = st.builds(LinkSpec, st.floats(0.0001, 0.1), st.floats(1e5, 1e9))
    return Network(LAN, {pair: draw(link) for pair in pairs if draw(st.booleans())})


def every_ring(model: ModelSpec, nodes: Sequence[NodeSpec], network: Network, demand: Demand) -> Iterator[Ring]:
    """Every ring whose stages fit."""
    count = len(model.shards)
    for used in range(1, min(len(nodes), count) + 1):
        for order in permutations(nodes, used):
            for inner in combinations(range(1, count), used - 1):
                ends = [0, *inner, count]
                cuts = list(zip(ends, ends[1:], strict=False))
                if any(stage_bytes(model, *cut, demand) > n.memory_bytes for n, cut in zip(order, cuts, strict=True)):
                    continue
                stages = tuple(StagePlan(n.id, *cut) for n, cut in zip(order, cuts, strict=True))
                yield Ring(stages, predict(model, nodes, network, stages))
