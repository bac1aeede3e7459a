"""How nodes come to one plan: the leader proposes, all prepare, then it holds.

The leader is the node with the smallest id that a node has a link to, itself among them. A node refuses who is not
its leader, what it cannot do, and epochs that are not news. Nothing that serves is given up before the next plan is
ready on all its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from meshinfer.negotiation.events import (
    Adopt,
    DropStage,
    Event,
    Instruction,
    MakePlan,
    ManifestKnown,
    MembersSeen,
    ModelChosen,
    PlanMade,
    PrepareStage,
    ReportMade,
    Send,
    Serve,
    StageFailed,
    StageReady,
    TimePassed,
    Told,
)
from meshinfer.planning.plan import Choice, Plan, Pool
from meshinfer.types import NodeId, kv_backend
from meshinfer.wire.messages import (
    Abandon,
    Accept,
    Chosen,
    Commit,
    Prepare,
    Prepared,
    Propose,
    Refuse,
    Report,
)

SETTLE_S = 0.4
"""How long the members stay the same before the leader plans: many nodes start at once."""
PATIENCE_S = 6.0
"""How long the leader waits for nodes to know the model and to have measured themselves with it."""
ANSWER_S = 5.0
"""How long a node may take to accept or refuse."""
SERVE_S = 5.0
"""How long after a commit a node may say that it does not serve the plan yet."""
EXCLUDED_S = 20.0
"""How long a node that could not do its part is left out."""
GAIN = 1.15
"""How much faster a new plan has to be before it takes the place of one that works."""
RETHINK_S = 3.0
"""How often the leader looks for a better plan at most."""


@dataclass(slots=True)
class _Talk:
    """The leader's side of one proposal."""

    plan: Plan
    began_at: float
    accepted: set[NodeId] = field(default_factory=set)
    pools: dict[NodeId, Pool] = field(default_factory=dict)


@dataclass(slots=True)
class Negotiation:
    """One node's view. `handle` is given every event with the time of the monotonic clock, in seconds."""

    me: NodeId
    members: tuple[NodeId, ...] = ()
    reports: dict[NodeId, Report] = field(default_factory=dict)
    choice: Choice | None = None
    committed: Plan | None = None
    pool: Pool | None = None
    why: str = ""
    """Why there is no ring, for people."""
    seen: int = 0
    """The greatest epoch heard of."""
    _manifest: str = ""
    _changed_at: float = 0.0
    _committed_at: float = 0.0
    _planned_at: float = -RETHINK_S
    _planning: int = 0
    _planned_for: object = None
    _talk: _Talk | None = None
    _excluded: dict[NodeId, tuple[float, str]] = field(default_factory=dict)
    _preparing: Plan | None = None
    _proposed: Plan | None = None

    def __post_init__(self) -> None:
        self.members = self.members or (self.me,)

    @property
    def leader(self) -> NodeId:
        return min(self.members)

    @property
    def preparing(self) -> Plan | None:
        """The plan that is being prepared, as far as this node knows."""
        return self._talk.plan if self._talk else self._proposed

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What is to be done about an event."""
        done = list(self._decide(event, now))
        done += self._lead(now)
        return done

    def _decide(self, event: Event, now: float) -> Iterator[Instruction]:
        match event:
            case MembersSeen(members):
                yield from self._see(members, now)
            case ReportMade(report):
                self.reports[self.me] = report
            case ModelChosen(choice):
                yield from self._choose(choice)
            case ManifestKnown(fingerprint):
                self._manifest = fingerprint
            case PlanMade():
                yield from self._planned(event, now)
            case StageReady(epoch, pool):
                if self._preparing is not None and self._preparing.epoch == epoch:
                    yield Send(self._preparing.leader, Prepared(epoch=epoch, pool=pool))
            case StageFailed(epoch, reason):
                yield from self._stage_failed(epoch, reason)
            case Told(sender, message):
                yield from self._told(sender, message, now)
            case TimePassed():
                pass

    def _see(self, members: tuple[NodeId, ...], now: float) -> Iterator[Instruction]:
        new = [node for node in members if node not in self.members]
        self._changed_at = now
        self.members = members
        self.reports = {node: report for node, report in self.reports.items() if node in members}
        for node in new:
            if self.choice is not None:
                yield Send(node, Chosen(choice=self.choice))
            if self.committed is not None and self.pool is not None:
                yield Send(node, Commit(plan=self.committed, pool=self.pool))
        talk = self._talk
        if talk is not None and not talk.plan.nodes <= set(members):
            yield from self._give_up("a node of it is gone", talk)
        if self._proposed is not None and self._proposed.leader not in members:
            yield from self._drop_proposed()

    def _choose(self, choice: Choice) -> Iterator[Instruction]:
        if choice.wins_over(self.choice):
            self.choice = choice
            self._excluded.clear()
            yield Adopt(choice)
            for node in self.members:
                if node != self.me:
                    yield Send(node, Chosen(choice=choice))

    def _told(self, sender: NodeId, message: msgspec.Struct, now: float) -> Iterator[Instruction]:
        match message:
            case Report():
                self.reports[sender] = message
                self.seen = max(self.seen, message.epoch)
            case Chosen(choice=choice):
                yield from self._choose(choice)
            case Propose(plan=plan):
                yield from self._consider(sender, plan)
            case Prepare(epoch=epoch):
                if self._proposed is not None and self._proposed.epoch == epoch:
                    self._preparing = self._proposed
                    yield PrepareStage(self._proposed)
            case Abandon(epoch=epoch):
                if self._proposed is not None and self._proposed.epoch == epoch:
                    yield from self._drop_proposed()
            case Commit(plan=plan, pool=pool):
                yield from self._commit(plan, pool, now)
            case Accept(epoch=epoch):
                yield from self._accepted(sender, epoch)
            case Refuse(epoch=epoch, reason=reason, seen=seen):
                self.seen = max(self.seen, seen)
                yield from self._refused(sender, epoch, reason, now)
            case Prepared(epoch=epoch, pool=pool):
                yield from self._prepared(sender, epoch, pool, now)

    # --- as a node of a plan ------------------------------------------------------------------------------------

    def _consider(self, sender: NodeId, plan: Plan) -> Iterator[Instruction]:
        reason = self._objection(sender, plan)
        known = self.seen
        self.seen = max(self.seen, plan.epoch)
        if reason:
            yield Send(sender, Refuse(epoch=plan.epoch, reason=reason, seen=known))
            return
        if self._proposed is not None:
            yield from self._drop_proposed()
        self._proposed = plan
        yield Send(sender, Accept(epoch=plan.epoch))

    def _objection(self, sender: NodeId, plan: Plan) -> str:
        if sender != self.leader or plan.leader != sender:
            return f"{self.leader[:8]} leads here"
        if plan.epoch <= self.seen and sender != self.me:
            return f"epoch {plan.epoch} is no news after {self.seen}"
        if self.choice != plan.choice:
            return "another model is chosen here"
        if plan.stage_of(self.me) is None:
            return "the plan has no stage for this node"
        neighbours = {plan.ring.after(self.me), plan.ring.head} | {
            stage.node for stage in plan.ring.stages if plan.ring.after(stage.node) == self.me
        }
        missing = sorted(neighbours - set(self.members))
        return f"no link to {', '.join(node[:8] for node in missing)}" if missing else ""

    def _commit(self, plan: Plan, pool: Pool, now: float) -> Iterator[Instruction]:
        self.seen = max(self.seen, plan.epoch)
        if self.committed is not None and plan.epoch <= self.committed.epoch:
            return
        if plan.choice != self.choice and not plan.choice.wins_over(self.choice):
            return
        if plan.choice != self.choice:
            yield from self._choose(plan.choice)
        if self._proposed is not None and self._proposed.epoch != plan.epoch:
            yield from self._drop_proposed()
        self.committed, self.pool, self._committed_at = plan, pool, now
        self._proposed = self._preparing = None
        self.why = ""
        yield Serve(plan, pool)

    def _stage_failed(self, epoch: int, reason: str) -> Iterator[Instruction]:
        if self._preparing is not None and self._preparing.epoch == epoch:
            leader = self._preparing.leader
            yield from self._drop_proposed()
            yield Send(leader, Refuse(epoch=epoch, reason=reason))

    def _drop_proposed(self) -> Iterator[Instruction]:
        if self._proposed is not None:
            yield DropStage(self._proposed.epoch)
        self._proposed = self._preparing = None

    # --- as the leader ------------------------------------------------------------------------------------------

    def _lead(self, now: float) -> Iterator[Instruction]:
        """Plan, where that is needed or may gain something."""
        if self.leader != self.me:
            if self._talk is not None:
                yield from self._give_up("another node leads", self._talk)
            return
        talk = self._talk
        if talk is not None:
            late = talk.plan.nodes - talk.accepted
            if late and now - talk.began_at > ANSWER_S:
                self._exclude(late, "it did not answer", now)
                yield from self._give_up("a node did not answer", talk)
            return
        if self._planning or self.choice is None or self._manifest != self.choice.fingerprint:
            if self.choice is None:
                self.why = "no model is chosen yet: meshinfer use MODEL, at any node"
            return
        self._excluded = {n: entry for n, entry in self._excluded.items() if entry[0] > now and n in self.members}
        measured = all(
            node in self.reports and self.reports[node].fingerprint == self.choice.fingerprint for node in self.members
        )
        ready = measured or now - self._changed_at > PATIENCE_S
        if now - self._changed_at < SETTLE_S or not ready:
            return
        situation = self._situation()
        if self._holds(now) and (situation == self._planned_for or now - self._planned_at < RETHINK_S):
            return
        if situation == self._planned_for and now - self._planned_at < RETHINK_S:
            return
        self._planned_at, self._planned_for = now, situation
        self.seen += 1
        self._planning = self.seen
        usable = {node: self.reports[node] for node in self.members if node in self.reports}
        kept = self.committed if self._holds(now) else None
        yield MakePlan(self.seen, self.choice, usable, kept, {n: why for n, (_, why) in self._excluded.items()})

    def _holds(self, now: float) -> bool:
        """Whether the plan that was agreed on still works."""
        plan = self.committed
        if plan is None or plan.choice != self.choice or not plan.nodes <= set(self.members):
            return False
        if any(report.serving > plan.epoch for report in self.reports.values()):
            return False
        fresh = now - self._committed_at < SERVE_S
        return fresh or all(node not in self.reports or self.reports[node].serving == plan.epoch for node in plan.nodes)

    def _situation(self) -> object:
        """What a plan depends on, coarsely: numbers that waver a little make no other situation."""

        def rough(value: float) -> float:
            return float(f"{value:.1g}")

        return (
            self.choice,
            tuple(sorted(self._excluded)),
            tuple(
                (node, rough(r.memory_bytes), rough(r.layer_s), rough(r.head_s), rough(r.probe_bytes_s), r.device)
                for node, r in sorted(self.reports.items())
                if node in self.members
            ),
        )

    def _planned(self, made: PlanMade, now: float) -> Iterator[Instruction]:
        if made.epoch != self._planning:
            return
        self._planning = 0
        if self.leader != self.me or self.choice is None:
            return
        if made.ring is None:
            self.why = made.shortage
            return
        if made.kept is not None and made.ring.tokens_per_s_together < GAIN * made.kept.tokens_per_s_together:
            return
        plan = Plan(made.epoch, self.me, self.choice, kv_backend(made.kv), made.codec, (made.ring,), dict(made.reasons))
        if not plan.nodes <= set(self.members):
            self._planned_for = None
            return
        self._talk = _Talk(plan, now)
        for node in sorted(plan.nodes):
            yield Send(node, Propose(plan=plan))

    def _accepted(self, sender: NodeId, epoch: int) -> Iterator[Instruction]:
        talk = self._talk
        if talk is None or talk.plan.epoch != epoch:
            return
        talk.accepted.add(sender)
        if talk.accepted >= talk.plan.nodes:
            for node in sorted(talk.plan.nodes):
                yield Send(node, Prepare(epoch=epoch))

    def _refused(self, sender: NodeId, epoch: int, reason: str, now: float) -> Iterator[Instruction]:
        talk = self._talk
        if talk is None or talk.plan.epoch != epoch:
            return
        if self.seen <= epoch:  # not only a number that was too small
            self._exclude({sender}, reason, now)
        yield from self._give_up(f"{sender[:8]}: {reason}", talk)

    def _prepared(self, sender: NodeId, epoch: int, pool: Pool, now: float) -> Iterator[Instruction]:
        talk = self._talk
        if talk is None or talk.plan.epoch != epoch or sender not in talk.plan.nodes:
            return
        talk.pools[sender] = pool
        if talk.pools.keys() < talk.plan.nodes:
            return
        self._talk = None
        agreed = common_pool(list(talk.pools.values()))
        for node in self.members:
            if node != self.me:
                yield Send(node, Commit(plan=talk.plan, pool=agreed))
        yield from self._commit(talk.plan, agreed, now)

    def _give_up(self, reason: str, talk: _Talk) -> Iterator[Instruction]:
        self._talk = None
        self._planned_for = None
        if self.committed is None:
            self.why = f"planning again: {reason}"
        for node in sorted(talk.plan.nodes):
            if node in self.members:
                yield Send(node, Abandon(epoch=talk.plan.epoch, reason=reason[:400]))

    def _exclude(self, nodes: set[NodeId] | frozenset[NodeId], reason: str, now: float) -> None:
        for node in nodes:
            self._excluded[node] = now + EXCLUDED_S, reason


def common_pool(pools: list[Pool]) -> Pool:
    """What all stages of a ring can hold: blocks of the largest size, each a whole number of every stage's own."""
    block_tokens = max(pool.block_tokens for pool in pools)
    return Pool(min(pool.blocks * pool.block_tokens // block_tokens for pool in pools), block_tokens)
