"""What a plan depends on, so that the leader plans again when that has changed, and not because numbers waver."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshinfer.planning.plan import Choice
from meshinfer.types import NodeId
from meshinfer.wire.messages import Report

WAVER = 1.3
"""By which factor a number may change and the situation still be the same."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of the nodes that can be planned with."""

    choice: Choice
    left_out: frozenset[NodeId]
    devices: Mapping[NodeId, str]
    links: frozenset[frozenset[NodeId]]
    """The pairs that have one, whatever it is like: that wavers too much."""
    numbers: Mapping[NodeId, tuple[float, ...]]

    @classmethod
    def of(cls, choice: Choice, left_out: Collection[NodeId], reports: Mapping[NodeId, Report]) -> Situation:
        return cls(
            choice,
            frozenset(left_out),
            {node: report.device for node, report in reports.items()},
            frozenset(frozenset((node, link.peer)) for node, report in reports.items() for link in report.links),
            {node: (r.memory_bytes, r.layer_s, r.head_s, r.probe_bytes_s) for node, r in reports.items()},
        )

    def same_nodes(self, other: Situation | None) -> bool:
        """Whether nothing but numbers differs."""
        return (
            other is not None
            and (self.choice, self.left_out, self.devices) == (other.choice, other.left_out, other.devices)
            and self.links == other.links
        )

    def like(self, other: Situation | None) -> bool:
        """Whether a plan for the one is good for the other."""
        return (
            other is not None
            and self.same_nodes(other)
            and all(
                max(here, there) <= WAVER * min(here, there)
                for node, numbers in self.numbers.items()
                for here, there in zip(numbers, other.numbers[node], strict=True)
            )
        )
