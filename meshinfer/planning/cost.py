"""What a stage takes of a node, and how fast a ring of stages is.

A token of one user passes every stage and every link once: that sum is the latency. With several
users the slowest stage is busy all the time, and no ring gives more than one token per its time. So
`sequences` users get `sequences / max(latency, sequences * slowest stage)` tokens/s together, which is
pessimistic: a stage that runs several sequences in one step reads its weights once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshinfer.planning.specs import Demand, ModelSpec, Network, NodeSpec
from meshinfer.types import NodeId

STEP_OVERHEAD_S = 0.0005
"""What a step takes in a stage besides inference: frames, queues, one call into OpenVINO."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class StagePlan:
    """Shards [start, stop) on one node."""

    node: NodeId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one ring: seconds of one token through all of it, and of its slowest stage."""

    latency_s: float
    slowest_s: float

    def tokens_per_s(self, sequences: int) -> float:
        """Of so many users together."""
        return sequences / max(self.latency_s, sequences * self.slowest_s)


def stage_bytes(model: ModelSpec, start: int, stop: int, demand: Demand) -> int:
    """Memory of shards [start, stop): weights, and state for every sequence at its full length."""
    return sum(_shard_bytes(model, demand)[start:stop])


def shard_seconds(model: ModelSpec, node: NodeSpec) -> Seconds:
    """One token through each shard, [shards] s; the embedding's lookup costs nothing."""
    seconds = np.array([shard.work * node.layer_s for shard in model.shards])
    seconds[0], seconds[-1] = 0.0, node.head_s
    return seconds


def range_seconds(model: ModelSpec, node: NodeSpec, demand: Demand) -> Seconds:
    """One token through shards [a, b) for every a and b, [shards + 1, shards + 1] s; inf where they do not fit."""
    ends = np.concatenate([[0.0], np.cumsum(shard_seconds(model, node))])
    filled = np.concatenate([[0], np.cumsum(_shard_bytes(model, demand))])
    seconds = ends[None, :] - ends[:, None] + STEP_OVERHEAD_S
    memory = filled[None, :] - filled[:, None]
    index = np.arange(len(ends))
    return np.where((index[None, :] > index[:, None]) & (memory <= node.memory_bytes), seconds, np.inf)


def hop_seconds(model: ModelSpec, network: Network, source: NodeId, target: NodeId) -> float:
    """One token's hidden state from a stage to the next."""
    link = network.between(source, target)
    return link.rtt_s / 2 + model.hidden_bytes / link.goodput_bytes_s


def closing_seconds(network: Network, tail: NodeId, head: NodeId) -> float:
    """A token's number from the tail back to the head: a few bytes, and nothing within one node."""
    return 0.0 if tail == head else network.between(tail, head).rtt_s / 2


def predict(model: ModelSpec, nodes: Sequence[NodeSpec], network: Network, stages: Sequence[StagePlan]) -> Prediction:
    """How fast a ring is. `nodes` holds every node of `stages`."""
    known = {node.id: node for node in nodes}
    times = [
        float(shard_seconds(model, known[stage.node])[stage.start : stage.stop].sum()) + STEP_OVERHEAD_S
        for stage in stages
    ]
    ring = [stage.node for stage in stages]
    hops = sum(hop_seconds(model, network, a, b) for a, b in zip(ring, ring[1:], strict=False))
    return Prediction(sum(times) + hops + closing_seconds(network, ring[-1], ring[0]), max(times))


def _shard_bytes(model: ModelSpec, demand: Demand) -> list[int]:
    return [
        shard.size_bytes
        + demand.sequences * (shard.kv_bytes_per_token * demand.context_tokens + shard.fixed_state_bytes)
        for shard in model.shards
    ]
