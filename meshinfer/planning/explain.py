"""A plan in words: what each node does and why, and what is missing where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshinfer.planning.cost import hop_seconds, shard_seconds, stage_bytes
from meshinfer.planning.partition import Ring, best_ring, best_ring_with
from meshinfer.planning.specs import Demand, ModelSpec, Network, NodeSpec
from meshinfer.types import NodeId


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a model does not fit: what it needs, what there is, and with what it would."""

    needed_bytes: int
    there_bytes: int
    demand_that_fits: Demand | None

    def __str__(self) -> str:
        text = f"the model and its KV cache need {_gb(self.needed_bytes)}, the nodes have {_gb(self.there_bytes)}"
        if self.needed_bytes <= self.there_bytes:
            text += ", but not in pieces that hold whole layers"
        if fits := self.demand_that_fits:
            return f"{text}; {fits.sequences} at once with {fits.context_tokens} tokens each would fit"
        return f"{text}; it does not fit with the shortest context either: add a node or take a smaller model"


def shortage(model: ModelSpec, nodes: Sequence[NodeSpec], network: Network, demand: Demand) -> Shortage:
    """What is missing where `best_ring` found nothing: halves users, then their context, until it fits."""
    less = demand
    while less.sequences > 1 or less.context_tokens > 256:
        if less.sequences > 1:
            less = replace(less, sequences=less.sequences // 2)
        else:
            less = replace(less, context_tokens=max(256, less.context_tokens // 2))
        if best_ring(model, nodes, network, less):
            break
    else:
        less = demand
    fits = less if best_ring(model, nodes, network, less) else None
    there = sum(node.memory_bytes for node in nodes)
    return Shortage(stage_bytes(model, 0, len(model.shards), demand), there, fits)


def reasons(
    model: ModelSpec, nodes: Sequence[NodeSpec], network: Network, demand: Demand, ring: Ring
) -> dict[NodeId, str]:
    """Why each node carries what it carries, or nothing."""
    carrying = {stage.node for stage in ring.stages}
    said: dict[object, str] = {}
    why = {}
    for node in nodes:
        links = tuple(network.between(node.id, other) for other in sorted(carrying - {node.id}))
        alike = node.id if node.id in carrying else (node.memory_bytes, node.layer_s, node.head_s, links)
        if alike not in said:  # left out nodes that are alike have the same reason, and finding it takes a while
            said[alike] = _reason(model, nodes, network, demand, ring, node)
        why[node.id] = said[alike]
    return why


def _reason(
    model: ModelSpec, nodes: Sequence[NodeSpec], network: Network, demand: Demand, ring: Ring, node: NodeSpec
) -> str:
    mine = next((stage for stage in ring.stages if stage.node == node.id), None)
    if mine is not None:
        seconds = float(shard_seconds(model, node)[mine.start : mine.stop].sum())
        needed = stage_bytes(model, mine.start, mine.stop, demand)
        return (
            f"shards {mine.start} to {mine.stop - 1}: {seconds * 1e3:.1f} of {ring.prediction.latency_s * 1e3:.1f} ms "
            f"for a token, {_gb(needed)} of {_gb(node.memory_bytes)}"
        )
    smallest = min(stage_bytes(model, index, index + 1, demand) for index in range(len(model.shards)))
    if smallest > node.memory_bytes:
        budget = f"its memory budget of {_gb(node.memory_bytes)}"
        return f"left out: {budget} holds no shard, the smallest takes {_gb(smallest)}"
    used = [n for n in nodes if n.id in {stage.node for stage in ring.stages}]
    with_it = best_ring_with(model, [*used, node], network, demand, node)
    if with_it is None:
        return "left out: no ring that fits has a stage on it"
    now, then = (r.prediction.tokens_per_s(demand.sequences) for r in (ring, with_it))
    return f"left out: {_cause(model, network, used, node)}; with it {then:.1f} tokens/s instead of {now:.1f}"


def _cause(model: ModelSpec, network: Network, used: Sequence[NodeSpec], node: NodeSpec) -> str:
    hop = min(hop_seconds(model, network, node.id, other.id) for other in used)
    slowest = max(other.layer_s for other in used)
    if hop > node.layer_s:
        return f"its link would cost {2 * hop * 1e3:.1f} ms for a token"
    if node.layer_s > slowest:
        return f"it takes {node.layer_s * 1e3:.1f} ms for a layer, the others {slowest * 1e3:.1f} ms at most"
    return "one more stage would gain nothing"


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
