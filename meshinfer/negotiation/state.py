"""How nodes come to one plan: the leader proposes, all prepare, then it holds.

The leader is the node with the smallest id that a node has a link to, itself among them. A node refuses who is not
its leader, what it cannot do, and epochs that it has promised already. Nothing that serves is given up before the next
plan is ready on all its nodes. Of two plans that hold, in parts of the mesh that had lost each other, the one with the
greater epoch stays, then that of the smaller leader. A message may get lost where a link takes the place of another
one: what is not answered is asked again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from meshinfer.negotiation.events import (
    Adopt,
    DropStage,
    Event,
    Instruction,
    LinkMade,
    MakePlan,
    ManifestKnown,
    MembersSeen,
    ModelChosen,
    PlanMade,
    PrepareStage,
    ReportMade,
    RingBroken,
    Send,
    Serve,
    StageFailed,
    StageReady,
    TimePassed,
    Told,
)
from meshinfer.negotiation.situation import Situation
from meshinfer.planning.plan import Choice, Plan, Pool
from meshinfer.types import NodeId, kv_backend
from meshinfer.wire.messages import (
    Abandon,
    Accept,
    Break,
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
"""How long the leader waits for a node to know the model and to have measured itself with it."""
ANSWER_S = 5.0
"""How long a node may take to accept or refuse."""
REPEAT_S = 2.0
"""How long the leader waits before it says again what a node does not seem to have heard."""
SERVE_S = 5.0
"""How long after a commit a node may say that it does not serve the plan yet."""
EXCLUDED_S = 20.0
"""How long a node that could not do its part is left out; twice as long each time it cannot again."""
REFUSED_S = 3.0
"""How long a node that refused at once is left out, which cost nobody anything; longer each time too."""
MOST_DOUBLINGS = 5
GAIN = 1.15
"""How much faster a new plan has to be before it takes the place of one that works."""
RETURN_S = 3.0
"""How long a leader that starts again waits for the nodes of the plan of before."""
YOUNG_S = 30.0
"""How long a plan is left alone where only numbers have changed: many are measured while everything starts."""
RETHINK_S = 3.0
"""How often the leader looks for a better plan at most."""
HOPELESS_S = 30.0
"""How often it looks for any plan where nothing has changed since there was none."""
PLAN_S = 30.0
"""How long planning may take."""
NO_MODEL = "no model is chosen yet: meshinfer use MODEL, at any node"


@dataclass(slots=True)
class _Talk:
    """The leader's side of one proposal."""

    plan: Plan
    began_at: float
    asked_at: float
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
    last: Plan | None = None
    """The plan that held when this node last ran."""
    pool: Pool | None = None
    why: str = NO_MODEL
    """Why there is no ring, for people."""
    seen: int = 0
    """The greatest epoch heard of."""
    _promised: int = 0
    """The greatest epoch that this node itself has accepted or served."""
    _began_at: float | None = None
    _manifest: str = ""
    _since: dict[NodeId, float] = field(default_factory=dict)
    """From when on the members are given time to measure themselves."""
    _changed_at: float = 0.0
    _committed_at: float = 0.0
    _reminded_at: float = 0.0
    _broken: int = 0
    """The epoch of a plan that was committed and does not work any more."""
    _orders: int = 0
    _order: MakePlan | None = None
    _planned_at: float = -RETHINK_S
    _planned_for: Situation | None = None
    _hopeless: bool = False
    _talk: _Talk | None = None
    _excluded: dict[NodeId, tuple[float, str]] = field(default_factory=dict)
    _failures: Counter[NodeId] = field(default_factory=Counter)
    _proposed: Plan | None = None
    _preparing: bool = False
    _ready: Pool | None = None

    def __post_init__(self) -> None:
        self.members = self.members or (self.me,)
        self.remember(self.last)

    def remember(self, last: Plan | None) -> None:
        """The plan that held when this node last ran: it may hold again, but not under its epoch."""
        self.last = last
        self.seen = max(self.seen, last.epoch if last is not None else 0)

    @property
    def leader(self) -> NodeId:
        return min(self.members)

    @property
    def preparing(self) -> Plan | None:
        """The plan that is being prepared, as far as this node knows."""
        return self._talk.plan if self._talk else self._proposed

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What is to be done about an event."""
        if self._began_at is None:
            self._began_at = now
        done = list(self._decide(event, now))
        done += self._lead(now)
        return done

    def _decide(self, event: Event, now: float) -> Iterator[Instruction]:
        match event:
            case MembersSeen(members):
                yield from self._see(members, now)
            case LinkMade(node):
                yield from self._brief(node)
            case RingBroken(epoch, reason, stage):
                if self.committed is not None and self.committed.epoch == epoch:
                    yield Send(self.leader, Break(epoch=epoch, reason=reason[:400], stage=stage))
            case ReportMade(report):
                self.reports[self.me] = report
            case ModelChosen(choice):
                yield from self._choose(choice, now)
            case ManifestKnown(fingerprint):
                self._manifest = fingerprint
            case PlanMade():
                yield from self._planned(event, now)
            case StageReady(epoch, pool):
                if self._preparing and self._proposed is not None and self._proposed.epoch == epoch:
                    self._ready = pool
                    yield Send(self._proposed.leader, Prepared(epoch=epoch, pool=pool))
            case StageFailed(epoch, reason):
                yield from self._stage_failed(epoch, reason)
            case Told(sender, message):
                yield from self._told(sender, message, now)
            case TimePassed():
                pass

    def _see(self, members: tuple[NodeId, ...], now: float) -> Iterator[Instruction]:
        self._changed_at = now
        self._since = {node: self._since.get(node, now) for node in members}
        self.members = members
        self.reports = {node: report for node, report in self.reports.items() if node in members}
        talk = self._talk
        if talk is not None and not talk.plan.nodes <= set(members):
            yield from self._give_up("a node of it is gone", talk)
        if self._proposed is not None and self._proposed.leader not in members:
            yield from self._drop_proposed()

    def _brief(self, node: NodeId) -> Iterator[Instruction]:
        """Tell a node what it may have missed."""
        if self.choice is not None:
            yield Send(node, Chosen(choice=self.choice))
        if self.committed is not None and self.pool is not None and self._works:
            yield Send(node, Commit(plan=self.committed, pool=self.pool))

    def _choose(self, choice: Choice, now: float) -> Iterator[Instruction]:
        if not choice.wins_over(self.choice):
            return
        self.choice = choice
        self.why = ""
        self._since = dict.fromkeys(self.members, now)
        self._excluded.clear()
        self._failures.clear()
        self._order = None
        yield Adopt(choice)
        for node in self.members:
            if node != self.me:
                yield Send(node, Chosen(choice=choice))
        if self._talk is not None:
            yield from self._give_up("another model was chosen", self._talk)
        if self._proposed is not None and self._proposed.choice != choice:
            yield from self._drop_proposed()

    def _told(self, sender: NodeId, message: msgspec.Struct, now: float) -> Iterator[Instruction]:
        match message:
            case Report():
                self.reports[sender] = message
                self.seen = max(self.seen, message.epoch)
            case Chosen(choice=choice):
                yield from self._choose(choice, now)
            case Propose(plan=plan):
                yield from self._consider(sender, plan)
            case Prepare(epoch=epoch):
                yield from self._prepare(sender, epoch)
            case Abandon(epoch=epoch, reason=reason):
                if self._proposed is not None and (self._proposed.leader, self._proposed.epoch) == (sender, epoch):
                    yield from self._drop_proposed()
                if sender == self.leader and not self._works:
                    self.why = reason
            case Commit(plan=plan, pool=pool):
                yield from self._commit(plan, pool, now)
            case Break(epoch=epoch, reason=reason, stage=stage):
                self._break(sender, epoch, reason, stage, now)
            case Accept(epoch=epoch):
                yield from self._accepted(sender, epoch, now)
            case Refuse(epoch=epoch, reason=reason, seen=seen):
                self.seen = max(self.seen, seen)
                yield from self._refused(sender, epoch, reason, seen, now)
            case Prepared(epoch=epoch, pool=pool):
                yield from self._prepared(sender, epoch, pool, now)

    # --- as a node of a plan ------------------------------------------------------------------------------------

    def _consider(self, sender: NodeId, plan: Plan) -> Iterator[Instruction]:
        self.seen = max(self.seen, plan.epoch)
        if plan != self._proposed:
            if plan.epoch <= self._promised:
                reason = f"epoch {plan.epoch} is no news after {self.seen}"
                yield Send(sender, Refuse(epoch=plan.epoch, reason=reason, seen=self.seen))
                return
            if reason := self._objection(sender, plan):
                yield Send(sender, Refuse(epoch=plan.epoch, reason=reason[:400]))
                return
            yield from self._drop_proposed()
            self._proposed, self._promised = plan, plan.epoch
        yield Send(sender, Accept(epoch=plan.epoch))

    def _objection(self, sender: NodeId, plan: Plan) -> str:
        if sender != self.leader or plan.leader != sender:
            return f"{self.leader[:8]} leads here"
        if self.choice != plan.choice:
            return "another model is chosen here"
        if plan.stage_of(self.me) is None:
            return "the plan has no stage for this node"
        missing = sorted(plan.ring.neighbours(self.me) - set(self.members))
        return f"no link to {', '.join(node[:8] for node in missing)}" if missing else ""

    def _prepare(self, sender: NodeId, epoch: int) -> Iterator[Instruction]:
        plan = self._proposed
        if plan is None or (plan.leader, plan.epoch) != (sender, epoch):
            held = self.committed
            if held is None or (held.leader, held.epoch) != (sender, epoch):
                yield Send(sender, Refuse(epoch=epoch, reason="this node knows nothing of the plan", seen=self.seen))
        elif self._ready is not None:
            yield Send(sender, Prepared(epoch=epoch, pool=self._ready))
        elif not self._preparing:
            self._preparing = True
            yield PrepareStage(plan)

    def _commit(self, plan: Plan, pool: Pool, now: float) -> Iterator[Instruction]:
        self.seen = max(self.seen, plan.epoch)
        held = self.committed
        if held is not None and (-plan.epoch, plan.leader) >= (-held.epoch, held.leader):
            return
        if plan.choice != self.choice and not plan.choice.wins_over(self.choice):
            return
        yield from self._choose(plan.choice, now)
        if self._proposed is not None and self._proposed != plan:
            yield from self._drop_proposed()
        self.committed, self.pool, self._committed_at = plan, pool, now
        self._promised = max(self._promised, plan.epoch)
        self._proposed, self._preparing, self._ready = None, False, None
        self._broken = 0
        self.why = ""
        yield Serve(plan, pool)

    def _stage_failed(self, epoch: int, reason: str) -> Iterator[Instruction]:
        if self._preparing and self._proposed is not None and self._proposed.epoch == epoch:
            leader = self._proposed.leader
            yield from self._drop_proposed()
            yield Send(leader, Refuse(epoch=epoch, reason=reason[:400]))

    def _drop_proposed(self) -> Iterator[Instruction]:
        if self._proposed is not None:
            yield DropStage(self._proposed.epoch)
        self._proposed, self._preparing, self._ready = None, False, None

    @property
    def _works(self) -> bool:
        """Whether the plan that holds is for the model that is chosen, and all its nodes are there."""
        plan = self.committed
        return plan is not None and plan.choice == self.choice and plan.nodes <= set(self.members)

    # --- as the leader ------------------------------------------------------------------------------------------

    def _lead(self, now: float) -> Iterator[Instruction]:
        """Plan, where that is needed or may gain something."""
        if self.leader != self.me:
            if self._talk is not None:
                yield from self._give_up("another node leads", self._talk)
            return
        if self._talk is not None:
            yield from self._press(self._talk, now)
            return
        yield from self._remind(now)
        if self.choice is None or self._manifest != self.choice.fingerprint:
            return
        if self._order is not None and now - self._planned_at < PLAN_S:
            return
        self._excluded = {n: entry for n, entry in self._excluded.items() if entry[0] > now and n in self.members}
        if now - self._changed_at < SETTLE_S or not all(self._measured(node, now) for node in self.members):
            return
        if self._awaits_the_others(now):
            return
        situation = Situation.of(self.choice, self._excluded, self.reports)
        changed, holds = not situation.like(self._planned_for), self._holds(now)
        if holds and situation.same_nodes(self._planned_for):
            pause = YOUNG_S if changed else math.inf
        elif holds:
            pause = RETHINK_S
        else:
            pause = 0.0 if changed else HOPELESS_S if self._hopeless else RETHINK_S
        if now - self._planned_at < pause:
            return
        self._planned_at, self._planned_for, self._hopeless = now, situation, False
        self._orders += 1
        left_out = {node: why for node, (_, why) in self._excluded.items()}
        kept = self.committed or self.last
        if kept is not None and kept.choice.fingerprint != self.choice.fingerprint:
            kept = None
        self._order = MakePlan(self._orders, self.choice, dict(self.reports), kept, left_out)
        yield self._order

    def _awaits_the_others(self, now: float) -> bool:
        """Whether nodes of the plan of before may be starting again as well: it would be compiled soonest."""
        missing = self.committed is None and self.last is not None and not self.last.nodes <= set(self.members)
        return missing and now - (self._began_at or now) < RETURN_S

    def _measured(self, node: NodeId, now: float) -> bool:
        """Whether a node knows how fast it is with the model, or has had the time to find out."""
        report = self.reports.get(node)
        known = report is not None and self.choice is not None and report.fingerprint == self.choice.fingerprint
        return known or now - self._since.get(node, 0.0) > PATIENCE_S

    def _holds(self, now: float) -> bool:
        """Whether the plan that was agreed on still works."""
        plan = self.committed
        if plan is None or not self._works or self._broken == plan.epoch:
            return False
        if any(report.serving > plan.epoch for report in self.reports.values()):
            return False
        fresh = now - self._committed_at < SERVE_S
        return fresh or all(node not in self.reports or self.reports[node].serving == plan.epoch for node in plan.nodes)

    def _remind(self, now: float) -> Iterator[Instruction]:
        """Say again which plan holds to those that do not serve it."""
        plan, pool = self.committed, self.pool
        if plan is None or pool is None or not self._works:
            return
        if now - max(self._committed_at, self._reminded_at) < REPEAT_S:
            return
        self._reminded_at = now
        for node, report in self.reports.items():
            if node != self.me and report.serving != plan.epoch:
                yield Send(node, Commit(plan=plan, pool=pool))

    def _press(self, talk: _Talk, now: float) -> Iterator[Instruction]:
        """Ask again those who have not answered; leave them out where they should have by now."""
        late = talk.plan.nodes - talk.accepted
        if late and now - talk.began_at > ANSWER_S:
            self._exclude(late, "it did not answer", REFUSED_S, now)
            yield from self._give_up("a node did not answer", talk)
        elif now - talk.asked_at >= REPEAT_S:
            talk.asked_at = now
            for node in sorted(late):
                yield Send(node, Propose(plan=talk.plan))
            for node in [] if late else sorted(talk.plan.nodes - talk.pools.keys()):
                yield Send(node, Prepare(epoch=talk.plan.epoch))

    def _planned(self, made: PlanMade, now: float) -> Iterator[Instruction]:
        order = self._order
        if order is None or made.number != order.number:
            return
        self._order = None
        if self.leader != self.me:
            return
        if made.ring is None:
            self._hopeless = True
            if not self._works:
                self.why = made.shortage
                for node in self.members:
                    if node != self.me:
                        yield Send(node, Abandon(epoch=0, reason=made.shortage[:400]))
            return
        ring, reasons = made.ring, made.reasons
        if made.kept is not None and ring.tokens_per_s_together < GAIN * made.kept.tokens_per_s_together:
            if self._holds(now):
                return
            if not self._excluded.keys() & {stage.node for stage in made.kept.stages}:
                ring, reasons = made.kept, made.kept_reasons  # what was there is compiled already
        self.seen += 1
        plan = Plan(self.seen, self.me, order.choice, kv_backend(made.kv), made.codec, (ring,), dict(reasons))
        if not plan.nodes <= set(self.members):
            self._planned_for = None
            return
        self._talk = _Talk(plan, now, now)
        for node in sorted(plan.nodes):
            yield Send(node, Propose(plan=plan))

    def _accepted(self, sender: NodeId, epoch: int, now: float) -> Iterator[Instruction]:
        talk = self._talk
        if talk is None or talk.plan.epoch != epoch or talk.accepted >= talk.plan.nodes:
            return
        talk.accepted.add(sender)
        if talk.accepted >= talk.plan.nodes:
            talk.asked_at = now
            for node in sorted(talk.plan.nodes):
                yield Send(node, Prepare(epoch=epoch))

    def _refused(self, sender: NodeId, epoch: int, reason: str, seen: int, now: float) -> Iterator[Instruction]:
        """`seen` is not 0 where the node itself is all right."""
        talk = self._talk
        if talk is not None and talk.plan.epoch == epoch and sender in talk.plan.nodes:
            if not seen:
                self._exclude({sender}, reason, EXCLUDED_S if sender in talk.accepted else REFUSED_S, now)
            yield from self._give_up(f"{sender[:8]}: {reason}", talk)

    def _break(self, sender: NodeId, epoch: int, reason: str, stage: bool, now: float) -> None:
        """The plan that holds does not work. Nodes say so again and again: only the first time is news."""
        plan = self.committed
        if plan is None or plan.epoch != epoch or sender not in plan.nodes:
            return
        if self._broken != epoch:
            self._broken, self._changed_at = epoch, now
            self.why = f"planning again: {reason}"
        if stage and sender not in self._excluded:
            self._exclude({sender}, reason, EXCLUDED_S, now)

    def _prepared(self, sender: NodeId, epoch: int, pool: Pool, now: float) -> Iterator[Instruction]:
        talk = self._talk
        if talk is None or talk.plan.epoch != epoch or sender not in talk.plan.nodes:
            return
        talk.pools[sender] = pool
        if talk.pools.keys() < talk.plan.nodes:
            return
        self._talk = None
        for node in talk.plan.nodes:
            del self._failures[node]
        agreed = common_pool(list(talk.pools.values()))
        for node in self.members:
            if node != self.me:
                yield Send(node, Commit(plan=talk.plan, pool=agreed))
        yield from self._commit(talk.plan, agreed, now)

    def _give_up(self, reason: str, talk: _Talk) -> Iterator[Instruction]:
        self._talk = None
        self._planned_for = None
        text = f"planning again: {reason}"[:400]
        if not self._works:
            self.why = text
        for node in sorted(talk.plan.nodes):
            if node in self.members:
                yield Send(node, Abandon(epoch=talk.plan.epoch, reason=text))

    def _exclude(self, nodes: Collection[NodeId], reason: str, seconds: float, now: float) -> None:
        for node in nodes:
            pause = seconds * 2 ** min(self._failures[node], MOST_DOUBLINGS)
            self._failures[node] += 1
            self._excluded[node] = now + pause, reason


def common_pool(pools: list[Pool]) -> Pool:
    """What all stages of a ring can hold: blocks of a size that is a whole number of every stage's own."""
    block_tokens = math.lcm(*(pool.block_tokens for pool in pools))
    return Pool(min(pool.blocks // (block_tokens // pool.block_tokens) for pool in pools), block_tokens)
