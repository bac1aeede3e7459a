"""What negotiation is told, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from meshinfer.planning.plan import Choice, Plan, Pool, RingPlan
from meshinfer.types import NodeId
from meshinfer.wire.messages import Report


@dataclass(frozen=True, slots=True)
class MembersSeen:
    """The nodes with a link, and this one."""

    members: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class LinkMade:
    """There is a new link to a node: it may have started anew and know nothing."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class RingBroken:
    """This node's part in the plan that holds does not work any more; `stage`: because of the node itself."""

    epoch: int
    reason: str
    stage: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """Another node, or this one itself, sent a message."""

    sender: NodeId
    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class ReportMade:
    """What this node now says of itself."""

    report: Report


@dataclass(frozen=True, slots=True)
class ModelChosen:
    """The user chose a model at this node."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class ManifestKnown:
    """The manifest of the chosen model is here."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class PlanMade:
    """The planner's answer to order `number`: a ring with reasons, or why there is none.

    `kept`: what the plan that holds would give, None where it would not work any more.
    """

    number: int
    ring: RingPlan | None
    reasons: dict[NodeId, str]
    kv: str
    codec: str
    shortage: str = ""
    kept: RingPlan | None = None
    kept_reasons: dict[NodeId, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageReady:
    """This node's stage of a plan is compiled and checked."""

    epoch: int
    pool: Pool


@dataclass(frozen=True, slots=True)
class StageFailed:
    """This node could not prepare its stage of a plan."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Some time passed; sent a few times a second."""


Event = (
    MembersSeen
    | LinkMade
    | RingBroken
    | Told
    | ReportMade
    | ModelChosen
    | ManifestKnown
    | PlanMade
    | StageReady
    | StageFailed
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Send:
    """Give a message to a node; to this one by calling `handle` again."""

    node: NodeId
    message: msgspec.Struct


@dataclass(frozen=True, slots=True)
class Adopt:
    """The mesh serves this model from now on: keep it, get its manifest; `ManifestKnown` is to follow."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan a ring of these nodes from their reports; `PlanMade` with this number is to follow.

    `kept` is the plan that holds, `left_out` says why a node may not be in the new one.
    """

    number: int
    choice: Choice
    reports: dict[NodeId, Report]
    kept: Plan | None
    left_out: dict[NodeId, str]


@dataclass(frozen=True, slots=True)
class PrepareStage:
    """Fetch, compile and check this node's stage; `StageReady` or `StageFailed` is to follow."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class DropStage:
    """A plan does not come: stop preparing its stage, or let go of it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Serve:
    """A plan holds: run it, and let go of the one before."""

    plan: Plan
    pool: Pool


Instruction = Send | Adopt | MakePlan | PrepareStage | DropStage | Serve
