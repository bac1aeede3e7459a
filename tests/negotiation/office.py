"""Several negotiations in one process with one clock: messages take time, links break, nodes die, stages fail."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec
import numpy as np

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
from meshinfer.negotiation.state import Negotiation
from meshinfer.planning.cost import StagePlan
from meshinfer.planning.plan import Choice, Plan, Pool, RingPlan
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import LinkReport, Report

TICK_S = 0.25
REPORT_EVERY_S = 0.5
DETECTION_S = 1.8
LAYERS = 12
"""Of the model that the simple planner splits: a node holds as many as it has units of memory."""

Planner = Callable[[MakePlan], PlanMade]


def choice(name: str = "model", counter: int = 1, node: str = "pc-00") -> Choice:
    return Choice(name, Sha256(name), "exact", 256, 4, counter, NodeId(node))


def split_evenly(order: MakePlan) -> PlanMade:
    """A ring of all that are usable, each with its share; the faster, the more nodes there are."""
    usable = sorted(node for node in order.reports if node not in order.left_out and order.reports[node].memory_bytes)
    room = {node: order.reports[node].memory_bytes for node in order.reports}
    if sum(room[node] for node in usable) < LAYERS:
        shortage = f"the model needs {LAYERS}, the nodes have {sum(room[node] for node in usable)}"
        return PlanMade(order.number, None, {}, "stateful", "f32", shortage)
    shares = dict.fromkeys(usable, 0)
    for turn in range(LAYERS * len(usable)):
        node = usable[turn % len(usable)]
        if sum(shares.values()) < LAYERS and shares[node] < room[node]:
            shares[node] += 1
    stages, start = [], 0
    for node, share in shares.items():
        if share:
            stages.append(StagePlan(node, start, start + share))
            start += share
    kept = None
    if order.kept is not None and order.kept.nodes <= order.reports.keys():
        old = order.kept.ring.stages
        fits = all(stage.stop - stage.start <= room[stage.node] for stage in old)
        kept = RingPlan(old, 1.0, float(len(old))) if fits else None
    ring = RingPlan(tuple(stages), 1.0, float(len(stages)))
    return PlanMade(order.number, ring, dict.fromkeys(order.reports, "why"), "stateful", "f32", kept=kept)


@dataclass
class Node:
    """A negotiation, and what an agent around it keeps."""

    id: NodeId
    state: Negotiation
    memory: int
    alive: bool = True
    linked: set[NodeId] = field(default_factory=set)
    model: str = ""
    serving: int = 0
    ready: set[int] = field(default_factory=set)
    """Epochs whose stage is prepared."""
    served: list[Plan] = field(default_factory=list)
    sent: Report | None = None
    sent_at: float = -1.0
    preparing: int = 0
    adopting: int = 0


class Office:
    """`broken`: nodes that cannot prepare a stage. `never_measures`: nodes that do not get the model's manifest."""

    def __init__(self, seed: int = 0, planner: Planner = split_evenly) -> None:
        self.random = np.random.default_rng(seed)
        self.planner = planner
        self.now = 0.0
        self.nodes: dict[NodeId, Node] = {}
        self.blocked: set[frozenset[NodeId]] = set()
        self.broken: dict[NodeId, str] = {}
        self.never_measures: set[NodeId] = set()
        self.slow_to_prepare: dict[NodeId, float] = {}
        self.wavering = 0.0
        """By which part the memory that nodes report changes from one report to the next."""
        self.plans: list[tuple[float, NodeId, MakePlan]] = []
        self.messages: Counter[str] = Counter()
        self.prepared: list[tuple[float, NodeId, int]] = []
        self.lose: Callable[[NodeId, NodeId, msgspec.Struct], bool] = lambda source, target, message: False
        """Messages that a link swallowed as it was replaced by another one."""
        self._links: dict[frozenset[NodeId], int] = {}
        self._last: dict[tuple[NodeId, NodeId], float] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._jobs = count(), count(1)

    # --- stories ------------------------------------------------------------------------------------------------

    def add(self, name: str, memory: int = 4, links: Iterable[str] | None = None) -> Node:
        """Start a node; it comes to be linked with all others, or with `links`."""
        id = NodeId(name)
        node = self.nodes[id] = Node(id, Negotiation(id), memory)
        self._tick(node)
        for other in self.nodes if links is None else map(NodeId, links):
            self._connect_soon(id, other)
        return node

    def kill(self, name: str) -> None:
        """The process ends; the others notice when it has been silent for a while."""
        gone = self.nodes[NodeId(name)]
        gone.alive = False
        for other in list(gone.linked):
            self._disconnect(gone.id, other, self._some(0.1, DETECTION_S))

    def restart(self, name: str, *, noticed: bool = True) -> Node:
        """The process ends and starts again with its id, and knows of epochs only that of the plan it served last.

        Where it is not `noticed`, the new link took the place of the old one before anyone missed it.
        """
        old = self.nodes[NodeId(name)]
        others = sorted(old.linked)
        old.alive = False
        node = self.nodes[old.id] = Node(
            old.id, Negotiation(old.id, last=old.state.committed or old.state.last), old.memory
        )
        self._tick(node)
        for other in others:
            if noticed:
                self._disconnect(old.id, other, 0.0)
                self._connect_soon(old.id, other, self._some(0.2, 1.0))
            else:
                self._links.pop(frozenset((old.id, other)), None)
                self._connect(old.id, other)
        return node

    def cut(self, left: Iterable[str], right: Iterable[str]) -> None:
        for a in map(NodeId, left):
            for b in map(NodeId, right):
                self.blocked.add(frozenset((a, b)))
                self._disconnect(a, b, self._some(0.1, DETECTION_S))

    def mend(self) -> None:
        self.blocked.clear()
        for a in self.nodes:
            for b in self.nodes:
                if a < b:
                    self._connect_soon(a, b)

    def blink(self, a: str, b: str) -> None:
        """A connection breaks, and is there again at once."""
        self._disconnect(NodeId(a), NodeId(b), 0.0)
        self._connect_soon(NodeId(a), NodeId(b), 0.1)

    def use(self, name: str, wanted: Choice) -> None:
        self.happen(self.nodes[NodeId(name)], ModelChosen(wanted))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def run_until(self, condition: Callable[[], bool], within: float) -> float:
        """Run until something holds; how long that took. Fails where it takes too long."""
        start, end = self.now, self.now + within
        while not condition():
            assert self.now < end, f"not within {within} s: {self.describe()}"
            self.run(0.1)
        return self.now - start

    # --- what is seen -------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def agreed(self) -> bool:
        """Whether all living nodes, which have to be linked with each other, serve the same plan."""
        living = self.living
        plans = [node.state.committed for node in living]
        return (
            plans[0] is not None
            and all(plan == plans[0] for plan in plans)
            and all(node.serving == plans[0].epoch for node in living)
            and plans[0].nodes <= {node.id for node in living}
        )

    @property
    def plan(self) -> Plan:
        assert self.agreed(), self.describe()
        plan = self.living[0].state.committed
        assert plan is not None
        return plan

    @property
    def carriers(self) -> set[str]:
        return set(self.plan.nodes)

    def plans_since(self, start: float) -> int:
        return sum(at >= start for at, _, _ in self.plans)

    def describe(self) -> str:
        lines = [f"at {self.now:.1f}"]
        for node in self.living:
            plan = node.state.committed
            held = f"{plan.epoch} of {plan.leader}: {sorted(plan.nodes)}" if plan else "nothing"
            lines.append(
                f"{node.id}: {held}, serving {node.serving}, linked with {sorted(node.linked)}, "
                f"seen {node.state.seen}, why {node.state.why!r}"
            )
        return "\n".join(lines)

    # --- one node -----------------------------------------------------------------------------------------------

    def happen(self, node: Node, event: Event) -> None:
        if not node.alive:
            return
        for instruction in node.state.handle(event, self.now):
            self._do(node, instruction)

    def _do(self, node: Node, instruction: Instruction) -> None:
        match instruction:
            case Send(target, message):
                self._send(node, target, message)
            case Adopt(wanted):
                node.adopting = job = next(self._jobs)
                if node.id not in self.never_measures:
                    self._later(lambda: self._adopted(node, job, wanted), self._some(0.1, 1.5))
            case MakePlan():
                self.plans.append((self.now, node.id, instruction))
                assert instruction.reports.keys() <= set(node.state.members)
                self._later(lambda: self._planned(node, instruction), self._some(0.01, 0.5))
            case PrepareStage(plan):
                assert plan.stage_of(node.id) is not None
                node.preparing = job = next(self._jobs)
                self.prepared.append((self.now, node.id, plan.epoch))
                wait = self.slow_to_prepare.get(node.id) or self._some(0.05, 3.0)
                self._later(lambda: self._prepare(node, job, plan), wait)
            case DropStage(epoch):
                node.preparing = 0
                node.ready.discard(epoch)
            case Serve(plan, _):
                self._serve(node, plan)

    def _adopted(self, node: Node, job: int, wanted: Choice) -> None:
        if node.adopting == job:
            node.model = wanted.fingerprint
            self._refresh(node)
            self.happen(node, ManifestKnown(wanted.fingerprint))

    def _planned(self, node: Node, order: MakePlan) -> None:
        if node.model == order.choice.fingerprint:  # as an agent does, which has no other manifest
            self.happen(node, self.planner(order))

    def _prepare(self, node: Node, job: int, plan: Plan) -> None:
        if node.preparing != job or not node.alive:
            return
        if node.id in self.broken:
            self.happen(node, StageFailed(plan.epoch, self.broken[node.id]))
            return
        node.ready.add(plan.epoch)
        self.happen(node, StageReady(plan.epoch, Pool(64, 32)))

    def _serve(self, node: Node, plan: Plan) -> None:
        assert not node.served or node.served[-1].epoch <= plan.epoch, f"{node.id} goes back to epoch {plan.epoch}"
        node.served.append(plan)
        prepared = plan.stage_of(node.id) is None or plan.epoch in node.ready
        node.serving = plan.epoch if prepared else 0
        node.ready = {plan.epoch}

    def _tick(self, node: Node) -> None:
        def tick() -> None:
            if node.alive and self.nodes[node.id] is node:
                self._refresh(node)
                self.happen(node, TimePassed())
                self._later(tick, TICK_S)

        self._later(tick, self._some(0, TICK_S))

    def _refresh(self, node: Node) -> None:
        report = self._report(node)
        if node.sent is None or _without_epoch(report) != _without_epoch(node.sent) or report.epoch != node.sent.epoch:
            self.happen(node, ReportMade(report))
            if self.now - node.sent_at >= REPORT_EVERY_S:
                node.sent, node.sent_at = report, self.now
                for other in sorted(node.linked):
                    self._send(node, other, report)

    def _report(self, node: Node) -> Report:
        memory = node.memory * (1 + self.wavering * self._some(-1, 1)) if self.wavering else node.memory
        return Report(
            name=node.id,
            memory_bytes=int(memory),
            device="CPU",
            device_name="CPU",
            threads=4,
            probe_bytes_s=1e9,
            fingerprint=node.model,
            layer_s=0.001 if node.model else 0.0,
            head_s=0.002 if node.model else 0.0,
            links=tuple(LinkReport(other, 0.001, 1e8) for other in sorted(node.linked)),
            epoch=node.state.seen,
            serving=node.serving,
        )

    # --- links --------------------------------------------------------------------------------------------------

    def _connect_soon(self, a: NodeId, b: NodeId, seconds: float | None = None) -> None:
        self._later(lambda: self._connect(a, b), self._some(0.01, 0.5) if seconds is None else seconds)

    def _connect(self, a: NodeId, b: NodeId) -> None:
        """The new link may take the place of one whose end was not noticed yet."""
        near, far = self.nodes[a], self.nodes[b]
        pair = frozenset((a, b))
        if a == b or not near.alive or not far.alive or pair in self.blocked or pair in self._links:
            return
        self._links[pair] = next(self._jobs)
        for end, other in ((near, b), (far, a)):
            if other in end.linked:
                self._link_lost(end, other)
            end.linked.add(other)
            self.happen(end, MembersSeen(tuple(sorted({*end.linked, end.id}))))
            if end.sent is not None:
                self._send(end, other, end.sent)
            self.happen(end, LinkMade(other))

    def _disconnect(self, a: NodeId, b: NodeId, within: float) -> None:
        """Both ends lose the link, one after the other; nothing comes over it any more."""
        self._links.pop(frozenset((a, b)), None)
        for end, other in ((self.nodes[a], b), (self.nodes[b], a)):
            self._later(partial(self._lost, end, other), within * self._some(0.5, 1.0))

    def _lost(self, node: Node, other: NodeId) -> None:
        if other in node.linked and frozenset((node.id, other)) not in self._links:
            node.linked.discard(other)
            self._link_lost(node, other)
            self.happen(node, MembersSeen(tuple(sorted({*node.linked, node.id}))))

    def _link_lost(self, node: Node, other: NodeId) -> None:
        """As an agent does: what was under way between two stages is lost."""
        plan = node.served[-1] if node.serving else None
        if plan is not None and {node.id, other} <= plan.nodes:
            self.happen(node, RingBroken(plan.epoch, "a link broke"))

    def _send(self, node: Node, target: NodeId, message: msgspec.Struct) -> None:
        self.messages[type(message).__name__] += 1
        if target == node.id:
            self._later(lambda: self.happen(node, Told(node.id, message)), 0.0)
            return
        pair = frozenset((node.id, target))
        link = self._links.get(pair)
        if link is None or target not in node.linked or self.lose(node.id, target, message):
            return
        at = max(self.now + self._some(0.0005, 0.03), self._last.get((node.id, target), 0.0))
        self._last[node.id, target] = at

        def arrive() -> None:
            other = self.nodes[target]
            if self._links.get(pair) == link and node.id in other.linked:
                self.happen(other, Told(node.id, message))

        self._later(arrive, at - self.now)

    def _some(self, low: float, high: float) -> float:
        return float(self.random.uniform(low, high))

    def _later(self, action: Callable[[], None], seconds: float) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))


def _without_epoch(report: Report) -> Report:
    return msgspec.structs.replace(report, epoch=0)


def office(count: int, seed: int = 0, memory: int = 4, planner: Planner = split_evenly) -> Office:
    """So many nodes that find each other, one of which has chosen a model."""
    made = Office(seed, planner)
    for number in range(count):
        made.add(f"pc-{number:02}", memory)
    made.use("pc-00", choice())
    return made
