"""A plan as nodes agree on it: who runs which shards of which model, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from meshinfer.planning.cost import StagePlan
from meshinfer.types import Digest, KvBackend, NodeId, Precision

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


@dataclass(frozen=True, slots=True)
class Choice:
    """The model that the mesh serves, and for how much. The greater `counter` wins, then the smaller node."""

    name: str
    fingerprint: Digest
    precision: Precision
    context_tokens: Positive
    sequences: Positive
    counter: Count
    node: NodeId

    def wins_over(self, other: Choice | None) -> bool:
        """Whether this choice stands where both were made."""
        return other is None or (-self.counter, self.node) < (-other.counter, other.node)


@dataclass(frozen=True, slots=True)
class RingPlan:
    """The stages of one ring in order, and what it is predicted to do: tokens/s of one user and of all."""

    stages: Annotated[tuple[StagePlan, ...], msgspec.Meta(min_length=1)]
    tokens_per_s: float = 0.0
    tokens_per_s_together: float = 0.0

    @property
    def head(self) -> NodeId:
        return self.stages[0].node

    @property
    def tail(self) -> NodeId:
        return self.stages[-1].node

    def stage_of(self, node: NodeId) -> StagePlan | None:
        """The stage that a node runs, if any."""
        return next((stage for stage in self.stages if stage.node == node), None)

    def neighbours(self, node: NodeId) -> frozenset[NodeId]:
        """Whom a node of the ring has to have links to: those before and after it, and the head, whom all answer."""
        nodes = [stage.node for stage in self.stages]
        if node not in nodes:
            return frozenset()
        if node == self.head:
            return frozenset(nodes) - {node}
        place = nodes.index(node)
        return frozenset({nodes[place - 1], nodes[(place + 1) % len(nodes)], self.head}) - {node}

    def after(self, node: NodeId) -> NodeId:
        """The node that the output of `node` goes to: of the tail, the head."""
        nodes = [stage.node for stage in self.stages]
        return nodes[(nodes.index(node) + 1) % len(nodes)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What nodes negotiate. `epoch` numbers plans and is in every frame; `reasons` says of each node what it does."""

    epoch: Count
    leader: NodeId
    choice: Choice
    kv: KvBackend
    codec: str
    rings: Annotated[tuple[RingPlan, ...], msgspec.Meta(min_length=1)]
    reasons: dict[NodeId, str] = field(default_factory=dict)

    @property
    def ring(self) -> RingPlan:
        """The one ring that is formed today."""
        return self.rings[0]

    @property
    def nodes(self) -> frozenset[NodeId]:
        """All that carry layers."""
        return frozenset(stage.node for ring in self.rings for stage in ring.stages)

    def stage_of(self, node: NodeId) -> StagePlan | None:
        """The stage that a node runs, if any."""
        return self.ring.stage_of(node)


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache that all stages of a ring have: logical blocks, the same on each."""

    blocks: Count
    block_tokens: Positive
