"""The agent of one PC: links, negotiation, stages, ring, origin and API, tied together on one event loop.

What is to be done is decided by `membership`, `negotiation`, `transfer` and the ring's `scheduler`; here it is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import msgspec

from meshinfer.agent.capacity import Capacity
from meshinfer.agent.exchange import Exchange, FileMessage
from meshinfer.agent.models import Models
from meshinfer.agent.origin import Origin
from meshinfer.agent.report import Reporter
from meshinfer.agent.stages import Stages
from meshinfer.api.service import Readiness
from meshinfer.errors import MeshinferError
from meshinfer.links.lanes import Lane
from meshinfer.links.link import Link
from meshinfer.links.links import Handler, Links
from meshinfer.membership.events import Peer
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
from meshinfer.negotiation.plan import make_plan
from meshinfer.negotiation.state import Negotiation
from meshinfer.planning.plan import Choice, Plan, Pool
from meshinfer.ring.runner import RingRunner
from meshinfer.settings import Settings
from meshinfer.shards.store import Store
from meshinfer.types import NodeId, Precision, Sha256
from meshinfer.wire.messages import (
    Abandon,
    Accept,
    Break,
    Cancel,
    Chosen,
    Commit,
    Drawn,
    Emit,
    Prepare,
    Prepared,
    Propose,
    Refuse,
    Report,
    RingStep,
    StepFailed,
    Submit,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.25
LATE_S = 0.8
VITAL = frozenset({"agent tick", "links tick", "give shards"})
"""Tasks without which the process had better end, and say so."""
REPORT_EVERY_S = 0.5
"""Reports that changed are sent at most so often."""
BUSY_S = 1.0
"""How long after its last step a ring counts as busy."""
DEFAULT_CONTEXT_TOKENS = 4096
ASK_AGAIN_S = 1.0
MAX_FAILURES = 3
"""Steps that fail one after the other before a stage counts as broken."""
MEASURING = "measuring"
MAX_EARLY = 64
STUCK_S = 60.0
"""How long a step may take before its ring counts as broken."""

_NEGOTIATED = (Report, Chosen, Propose, Accept, Refuse, Prepare, Prepared, Commit, Abandon, Break)
_OF_THE_RING = (RingStep, Drawn, StepFailed, Submit, Cancel)


class Agent(Handler):
    """Everything but the shell around it (`meshinfer.agent.service`): made, `start`ed once its links are, `close`d."""

    def __init__(self, settings: Settings, store: Store, capacity: Capacity, me: Peer) -> None:
        self.settings, self.me, self.capacity = settings, me, capacity
        self.models = Models(store)
        self.links: Links | None = None
        self.negotiation = Negotiation(me.id)
        self.origin = Origin(me.id, self.post, self.readiness, self.name_of)
        self.exchange = Exchange(self.models, self.post, self.post_bulk, self.busy, self._others)
        self.stages = Stages(store, capacity, self.exchange.fetch, self._say, self._stop_serving)
        self.runner: RingRunner | None = None
        self.reporter = Reporter(me.name, capacity, self.models, self.exchange)
        self.on_twin: Callable[[Peer], None] = lambda _: None
        self.on_failure: Callable[[BaseException], None] = lambda _: None
        self._names: dict[NodeId, str] = {me.id: me.name}
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: asyncio.Task[None] | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._report: Report | None = None
        self._ready = 0
        self._closing = False
        self._swapping, self._measured = asyncio.Lock(), asyncio.Event()
        self._early: list[tuple[NodeId, Any, memoryview]] = []
        """What came for a ring that does not run here yet: others learned a moment sooner that its plan holds."""

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self, links: Links) -> None:
        """Begin with links that are open."""
        self.links = links
        self._spawn(self.exchange.give(), "give shards")
        self._spawn(self._measure(), "measure this machine")
        self._spawn(self._tick(), "agent tick")

    async def close(self) -> None:
        """Stop everything but the links."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        if self.runner is not None:
            await self.runner.close()
        await self.stages.close()

    async def _measure(self) -> None:
        await asyncio.to_thread(self.models.look_for_models)
        try:
            await asyncio.to_thread(self.capacity.measure, self.models.store.folders)
        except MeshinferError as error:
            self.reporter.trouble = str(error)
            log.error("cannot measure this machine: %s", error)
        self._measured.set()
        self.negotiation.remember(self.models.last_plan())
        remembered = self.models.remembered()
        self.reporter.say("idle")
        if remembered is not None:
            self._handle(ModelChosen(remembered))
        elif self.settings.model is not None:
            await asyncio.sleep(1.5)  # the mesh may have chosen already; `choose` would find that out too late
            if self.negotiation.choice is None:
                try:
                    await self.choose(self.settings.model)
                except MeshinferError as error:
                    self.reporter.trouble = str(error)
                    log.error("cannot serve %s: %s", self.settings.model, error)
            elif self.negotiation.choice.name != self.settings.model:
                chosen = self.negotiation.choice.name
                log.warning("the mesh serves %s: to change that, meshinfer use %s", chosen, self.settings.model)
        self._refresh()

    async def choose(self, name: str, *, anew: bool = False) -> Choice:
        """Choose the model for the mesh: one that is here, one that a peer has, or one that is made from its source.

        `anew` takes the place of an earlier choice. Raises all that adding a model does.
        """
        await asyncio.to_thread(self.models.look_for_models)  # commands add and remove some too
        peers = {n: f for report in self.negotiation.reports.values() for n, f in report.models}
        local = dict(self.models.named)
        fingerprint = local.get(name) or peers.get(name)
        context = self.settings.context_tokens or DEFAULT_CONTEXT_TOKENS
        if fingerprint is None:
            try:
                manifest = await asyncio.to_thread(self.models.find, name, self.reporter.adding)
            finally:
                self._rest()
            name, fingerprint = manifest.name, manifest.fingerprint()
        precision: Precision = "exact" if self.settings.exact else "fast"
        old = self.negotiation.choice
        counter = old.counter + 1 if old is not None and anew else 1
        choice = Choice(name, Sha256(fingerprint), precision, context, self.settings.users, counter, self.me.id)
        self._handle(ModelChosen(choice))
        return choice

    # --- what links tell ----------------------------------------------------------------------------------------

    def members_changed(self, members: tuple[Peer, ...]) -> None:
        """See `Handler`."""
        gone = set(self.negotiation.members) - {peer.id for peer in members}
        self._names |= {peer.id: peer.name for peer in members}
        log.info("nodes: %s", ", ".join(sorted(peer.name for peer in members)))
        self._handle(MembersSeen(tuple(sorted(peer.id for peer in members))))
        for node in gone:
            if self.runner is not None:
                self.runner.abandon(node)

    def link_lost(self, node: NodeId) -> None:
        """See `Handler`: what was under way on that link is lost, even where there is a new one at once."""
        runner = self.runner
        if runner is not None and node in runner.plan.ring.neighbours(self.me.id):
            self._handle(RingBroken(runner.epoch, f"the link between {self.me.name} and {self.name_of(node)} broke"))

    def link_opened(self, link: Link) -> None:
        """See `Handler`."""
        node = link.hello.peer.id
        if self._report is not None:
            link.post(self._report)
        self._handle(LinkMade(node))
        self.origin.head_is_back(node)

    def twin_found(self, twin: Peer) -> None:
        """See `Handler`."""
        self.on_twin(twin)

    def received(self, sender: NodeId, message: msgspec.Struct, payload: memoryview) -> None:
        """See `Handler`; this node's messages to itself come here too."""
        if isinstance(message, _NEGOTIATED):
            self._handle(Told(sender, message))
        elif isinstance(message, _OF_THE_RING):
            self._to_ring(sender, message, payload)
        elif isinstance(message, Emit):
            self.origin.received(sender, message)
        elif isinstance(message, FileMessage):
            self.exchange.received(sender, message, payload)

    def post(self, node: NodeId, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> bool:
        """Send to a node, or to this one; False where there is no link to it."""
        if node == self.me.id:
            data = memoryview(b"".join(payloads))
            asyncio.get_running_loop().call_soon(self.received, node, message, data)
            return True
        lane = Lane.STEPS if isinstance(message, RingStep) else Lane.SMALL
        return self.links is not None and self.links.post(node, message, payloads, lane)

    def post_bulk(self, node: NodeId, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> bool:
        """Send what may wait for everything else."""
        return self.links is not None and self.links.post(node, message, payloads, Lane.BULK)

    def name_of(self, node: NodeId) -> str:
        """What people call a node."""
        return self._names.get(node, node[:8])

    def _others(self) -> Mapping[NodeId, Report | None]:
        negotiation = self.negotiation
        return {node: negotiation.reports.get(node) for node in negotiation.members if node != self.me.id}

    def busy(self) -> bool:
        """Whether the ring here works for somebody."""
        return self.runner is not None and time.monotonic() - self.runner.busy_at < BUSY_S

    def _to_ring(self, sender: NodeId, message: Any, payload: memoryview) -> None:
        if self.runner is not None and self.runner.epoch == message.epoch:
            self.runner.received(sender, message, payload)
        elif self._is_coming(message.epoch) and len(self._early) < MAX_EARLY:
            self._early.append((sender, message, payload))
        elif isinstance(message, Submit):
            reason = "the ring has changed"
            self.post(
                sender, Emit(epoch=message.epoch, number=message.number, finish="failed", reason=reason, retry=True)
            )

    def _is_coming(self, epoch: int) -> bool:
        """Whether the ring of an epoch may begin here any moment."""
        known = {plan.epoch for plan in (self.negotiation.preparing, self.negotiation.committed) if plan is not None}
        return epoch in known and epoch > (self.runner.epoch if self.runner else 0)

    # --- negotiation --------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if self._closing:
            return
        for instruction in self.negotiation.handle(event, time.monotonic()):
            self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Send(node, message):
                self.post(node, message)
            case Adopt(choice):
                log.info("the mesh serves %s (%s)", choice.name, choice.precision)
                if self._adopting is not None:
                    self._adopting.cancel()
                self._adopting = self._spawn(self._adopt(choice), "adopt the model")
            case MakePlan():
                self._spawn(self._plan(instruction), "plan")
            case PrepareStage(plan):
                self._preparing = self._spawn(self._prepare(plan), "prepare a stage")
            case DropStage():
                if self._preparing is not None and not self._preparing.done():
                    self._preparing.cancel()
                    self._rest()
                self._spawn(self.stages.drop(), "drop a stage")
            case Serve(plan, pool):
                self._serve(plan, pool)

    async def _plan(self, order: MakePlan) -> None:
        manifest = self.models.manifest
        if manifest is None or self.models.fingerprint != order.choice.fingerprint:
            return
        try:
            made = await asyncio.to_thread(make_plan, order, manifest)
        except Exception as error:
            log.exception("planning failed")
            made = PlanMade(order.number, None, {}, "", "", f"planning failed: {error!r}"[:400])
        if made.ring is None:
            log.warning("no plan: %s", made.shortage)
        self._handle(made)

    async def _prepare(self, plan: Plan) -> None:
        part = plan.stage_of(self.me.id)
        manifest = self.models.manifest
        try:
            if part is None or manifest is None or self.models.fingerprint != plan.choice.fingerprint:
                raise MeshinferError("the manifest of the model is not here yet")
            pool = await self.stages.prepare(plan, part, manifest)
            self.capacity.learn(self.stages.token_s, manifest, part, self._head_ratio())
        except MeshinferError as error:
            log.warning("cannot prepare shards of %s: %s", plan.choice.name, error)
            self._not_prepared(plan, str(error))
            return
        except Exception as error:  # the leader waits for an answer as long as this node is there
            log.exception("preparing a stage failed")
            self._not_prepared(plan, f"preparing a stage failed: {error!r}")
            return
        self._say("prepared")
        self._handle(StageReady(plan.epoch, pool))

    def _not_prepared(self, plan: Plan, reason: str) -> None:
        self._rest()
        self._handle(StageFailed(plan.epoch, reason))

    def _head_ratio(self) -> float | None:
        """How much longer than a layer the head takes, where some node has measured both."""
        ratios = [r.head_s / r.layer_s for r in self.negotiation.reports.values() if r.layer_s > 0 and r.head_s > 0]
        return median(ratios) if ratios else None

    def _serve(self, plan: Plan, pool: Pool) -> None:
        ready, old = self.stages.take(plan.epoch)
        if plan.stage_of(self.me.id) is not None and ready is None:
            log.warning("plan %d needs a stage here that is not prepared", plan.epoch)
            self._spawn(self._swap(None, old), "close a ring")
            return
        stages = ", ".join(f"{self.name_of(s.node)} {s.start}-{s.stop - 1}" for s in plan.ring.stages)
        log.info("plan %d holds: %s", plan.epoch, stages)
        runner = RingRunner(plan, pool, self.me.id, ready.stage if ready else None, self.post)
        self._say("serving" if ready else "idle")
        self._spawn(self._swap(runner, old), "change the ring")

    async def _swap(self, runner: RingRunner | None, old_stage: Any) -> None:
        async with self._swapping:
            await self._stop_ring()
            if old_stage is not None:
                await asyncio.to_thread(old_stage.stage.close)
            self.runner = runner
        if runner is None:
            return
        self.origin.serve(runner.plan)
        self._refresh()
        try:
            await asyncio.to_thread(self.models.remember_plan, runner.plan)
        except MeshinferError as error:
            log.warning("the plan is not kept: %s", error)
        early, self._early = self._early, []
        for sender, message, payload in early:
            self._to_ring(sender, message, payload)
        if runner.scheduler is not None:
            await self._probe(runner)

    async def _stop_serving(self) -> None:
        """`_stop_ring`, also where the ring of this moment is only just beginning."""
        async with self._swapping:
            await self._stop_ring()

    async def _stop_ring(self) -> None:
        """Run no ring until the next plan holds; requests wait for that."""
        old, self.runner = self.runner, None
        if old is not None:
            await old.close()
        self._refresh()

    async def _probe(self, runner: RingRunner) -> None:
        """Ready is a ring that gave a token."""
        while self.runner is runner and self._ready != runner.epoch:
            try:
                await self.origin.probe(0)
            except (MeshinferError, TimeoutError) as error:
                log.warning("the ring gives no token: %s", error or "no answer")
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            self._ready = runner.epoch
            self._refresh()
            return

    # --- the model ----------------------------------------------------------------------------------------------

    async def _adopt(self, choice: Choice) -> None:
        """Have the chosen model here, so far as an origin needs it, and tell negotiation about it."""
        try:
            await asyncio.to_thread(self.models.remember, choice)
        except MeshinferError as error:
            log.warning("the choice of the model is not kept: %s", error)
        self._say("asking for the manifest")
        manifest = await _had("the manifest", choice, lambda: self.exchange.manifest(choice.fingerprint))
        self.models.know(manifest, choice.fingerprint)
        self._say(MEASURING)
        await self._measured.wait()  # a node that says nothing of its speed would count as slow
        kv = manifest.kv_backends[0] if manifest.kv_backends else "stateful"
        await asyncio.to_thread(self.capacity.calibrate, self.models.store, manifest, kv, choice.precision)
        if self.reporter.phase == MEASURING:  # and not at work for a plan by now
            self._rest()
        self._handle(ManifestKnown(choice.fingerprint))
        self.origin.model = await _had(
            "the tokenizer", choice, lambda: self.models.serve(choice, manifest, self.exchange.fetch)
        )
        self._refresh()

    # --- what this node says of itself --------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """See `Reporter.readiness`."""
        serving = self.runner.epoch if self.runner else 0
        plan, model = self.negotiation.committed, self.origin.model
        has_model = plan is not None and model is not None and model.choice == plan.choice
        return self.reporter.readiness(self.negotiation, serving, self._ready, has_model=has_model)

    def _rest(self) -> None:
        """Say what this node does when it is at work for nothing new."""
        self._say("idle" if self.stages.serving is None else "serving")

    def _say(self, phase: str) -> None:
        self.reporter.say(phase)
        self._refresh()

    def _refresh(self) -> None:
        report = self._own_report()
        if report != self._report:
            self._report = report
            self._handle(ReportMade(report))

    def _own_report(self) -> Report:
        return self.reporter.report(
            self.negotiation,
            self.links.all if self.links else (),
            serving=self.runner.epoch if self.runner else 0,
            ready=self._ready,
            running=self.origin.open_requests,
        )

    async def _tick(self) -> None:
        sent: Report | None = None
        sent_at = 0.0
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            if (late := time.monotonic() - began - TICK_S) > LATE_S:
                log.warning("this process stood still for %.1f s: others may have taken it for dead", late)
            self._refresh()
            self._watch_ring()
            self._handle(TimePassed())
            if self._report is not None and self._report != sent and time.monotonic() - sent_at >= REPORT_EVERY_S:
                sent, sent_at = self._report, time.monotonic()
                if self.links is not None:
                    self.links.post_all(sent)

    def _watch_ring(self) -> None:
        runner = self.runner
        if runner is None:
            return
        part, manifest, token_s = runner.plan.stage_of(self.me.id), self.models.manifest, runner.take_token_s()
        if token_s and part and manifest and self.capacity.adapt(token_s, manifest, part):
            log.info("a token takes %.1f ms in shards %d to %d", token_s * 1e3, part.start, part.stop - 1)
        if runner.gave_tokens and self._ready != runner.epoch:
            self._ready = runner.epoch  # it works for others, while the probe waits in line
            self._refresh()
        if runner.failures >= MAX_FAILURES:
            runner.failures = 0
            self._handle(RingBroken(runner.epoch, f"the stage of {self.me.name} fails", stage=True))
        elif runner.stuck_s(time.monotonic()) > STUCK_S:
            self._handle(RingBroken(runner.epoch, f"a step did not come round within {STUCK_S:.0f} s"))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.task_failed(task.get_name(), error)

    def task_failed(self, name: str, error: BaseException) -> None:
        """See `Handler`: without its vital tasks an agent is not one."""
        log.error("%s failed: %r", name, error, exc_info=error)
        if name in VITAL:
            self.on_failure(error)


async def _had(what: str, choice: Choice, get: Callable[[], Awaitable[T]]) -> T:
    """Something of the chosen model, however often it takes: a disk is full, nobody has it yet."""
    while True:
        try:
            return await get()
        except MeshinferError as error:
            log.warning("cannot have %s of %s yet: %s", what, choice.name, error)
            await asyncio.sleep(ASK_AGAIN_S)
