"""What a node says of itself to the others, and whether the mesh could answer now."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from meshinfer.agent.capacity import Capacity
from meshinfer.agent.exchange import Exchange
from meshinfer.agent.models import Models
from meshinfer.api.service import Readiness
from meshinfer.links.link import Link
from meshinfer.negotiation.state import Negotiation
from meshinfer.wire.messages import LinkReport, Report

MEMORY_EVERY_S = 20.0
RETRY_AFTER_S = 2
_NAMED = 4
_QUIET = ("idle", "serving", "prepared")


class Reporter:
    """`say` what this node is doing; `report` puts it together with what else others have to know."""

    def __init__(self, name: str, capacity: Capacity, models: Models, exchange: Exchange) -> None:
        self._name, self._capacity, self._models, self._exchange = name, capacity, models, exchange
        self.phase, self._done, self._total = "starting", 0, 0
        self._memory_at, self._memory_bytes = -MEMORY_EVERY_S, 0
        self.trouble = ""
        """What last went wrong with a choice of a model, for people."""

    def say(self, phase: str, done: int = 0, total: int = 0) -> None:
        """What is being done now, and how far that is."""
        self.phase, self._done, self._total = phase, done, total

    def adding(self, phase: str, done: int, total: int) -> None:
        """A `Progress` of adding a model."""
        self.say(f"adding the model ({phase})", done, total)

    def report(
        self, negotiation: Negotiation, links: Sequence[Link], *, serving: int, ready: int, running: int
    ) -> Report:
        """Everything about this node. `serving`, `ready`: see `Report`; `running`: requests of this origin."""
        now = time.monotonic()
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at, self._memory_bytes = now, self._capacity.memory_bytes()
        capacity, models, exchange = self._capacity, self._models, self._exchange
        fetching = exchange.total > exchange.done
        return Report(
            name=self._name,
            memory_bytes=self._memory_bytes,
            device=capacity.device.name,
            device_name=capacity.device.full_name[:200],
            threads=capacity.threads,
            probe_bytes_s=_rough(capacity.probe_bytes_s),
            fingerprint=capacity.fingerprint if capacity.fingerprint == models.fingerprint else "",
            layer_s=capacity.layer_s,
            head_s=capacity.head_s,
            shards=models.shards,
            links=tuple(
                LinkReport(link.hello.peer.id, _coarse(link.health.rtt_s), _rough(link.health.goodput_bytes_s))
                for link in links
            ),
            epoch=negotiation.seen,
            serving=serving,
            ready=ready,
            models=models.named,
            phase="fetching" if fetching else self.phase[:200],
            done=exchange.done if fetching else self._done,
            total=exchange.total if fetching else self._total,
            fetched_bytes=exchange.fetched_bytes,
            running=running,
        )

    def readiness(self, negotiation: Negotiation, serving: int, own_ready: int, *, has_model: bool) -> Readiness:
        """Whether the ring that holds has given a token, and what is being done if not."""
        plan = negotiation.committed
        if plan is not None and plan.epoch == serving and plan.choice == negotiation.choice and has_model:
            head = negotiation.reports.get(plan.ring.head)
            ready = own_ready if plan.ring.head == negotiation.me else head.ready if head else 0
            if ready == plan.epoch and plan.nodes <= set(negotiation.members):
                return Readiness(True, "ready", 0)
        return Readiness(False, self._what_is_done(negotiation), RETRY_AFTER_S)

    def _what_is_done(self, negotiation: Negotiation) -> str:
        if negotiation.choice is None and self.phase in ("idle", "starting"):
            return self.trouble or negotiation.why or "no model is chosen yet: meshinfer use MODEL, at any node"
        doing: dict[str, list[Report]] = {}
        for _, report in sorted(negotiation.reports.items()):
            if report.phase not in _QUIET:
                doing.setdefault(report.phase, []).append(report)
        return "; ".join(map(_in_words, doing, doing.values())) or negotiation.why or "planning"


def _in_words(phase: str, nodes: Sequence[Report]) -> str:
    """Which nodes are doing the same, and how far they are together."""
    names = ", ".join(report.name for report in nodes[:_NAMED]) + (", ..." if len(nodes) > _NAMED else "")
    done, total = sum(report.done for report in nodes), sum(report.total for report in nodes)
    return f"{names} {'is' if len(nodes) == 1 else 'are'} {phase}" + (f" {done * 100 // total} %" if total else "")


def _coarse(value: float) -> float:
    """The nearest power of 1.5: a round trip never stays the same, and every change is told to everybody."""
    return 1.5 ** round(math.log(value, 1.5)) if value > 0 else 0.0


def _rough(value: float) -> float:
    """Two digits: what wavers below that is no news."""
    return float(f"{value:.2g}")
