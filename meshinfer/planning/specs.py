"""What a planner is told: the model, the nodes, the links between them, and how much is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshinfer.types import NodeId


@dataclass(frozen=True, slots=True)
class ShardCost:
    """One shard as the planner sees it. `work` is its time as a multiple of an average layer's; a head has its own."""

    size_bytes: int
    kv_bytes_per_token: int = 0
    fixed_state_bytes: int = 0
    work: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shards of a model in order, embedding first and head last, and what one token weighs on a link."""

    name: str
    shards: tuple[ShardCost, ...]
    hidden_bytes: int

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node: its memory budget, and its measured seconds for one token through one average layer and the head."""

    id: NodeId
    name: str
    memory_bytes: int
    layer_s: float
    head_s: float


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A measured link. Half a round trip is what a frame waits."""

    rtt_s: float
    goodput_bytes_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """The links between pairs of nodes, whichever comes first; `default` where a pair was not measured."""

    default: LinkSpec
    links: Mapping[frozenset[NodeId], LinkSpec] = field(default_factory=dict)

    def between(self, a: NodeId, b: NodeId) -> LinkSpec:
        return self.links.get(frozenset((a, b)), self.default)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is wanted of a plan: so many sequences at once, each of so many tokens."""

    context_tokens: int = 2048
    sequences: int = 4
