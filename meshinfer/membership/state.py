"""Who is in the mesh: decided from links alone, each pair of nodes keeping one.

Adverts only say where to dial. The node with the smaller id dials at once, the other one a little later, for
the case that only it can. Where both did, the link that the smaller id dialled stays. A node is dead when nothing
came over its link for `DEAD_AFTER_S`; heartbeats come from a loop that inference does not block, so slow is not dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshinfer.membership.events import (
    Address,
    AddressesHinted,
    AdvertWithdrawn,
    BecomeAnotherNode,
    Close,
    Dial,
    DialFailed,
    Event,
    FrameArrived,
    Instruction,
    LinkId,
    LinkLost,
    LinkOpened,
    Peer,
    ReportMembers,
    SendHeartbeat,
    SendPeers,
    TimePassed,
)
from meshinfer.types import NodeId

HEARTBEAT_S = 0.4
DEAD_AFTER_S = 1.6
GRACE_S = 0.7
"""How long the node with the greater id waits for the other one to dial."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
MAX_TARGETS = 1024
_FORGET_AFTER_FAILURES = 12
"""Of a node that nothing but other nodes' memory speaks for: some five minutes."""


@dataclass(slots=True)
class _Link:
    peer: Peer
    dialled: bool
    heard_at: float
    sent_at: float


@dataclass(slots=True)
class _Target:
    """Somewhere to dial: a node, or addresses of nobody knows whom."""

    addresses: tuple[Address, ...]
    due_at: float
    id: NodeId | None = None
    dialling: bool = False
    failures: int = 0
    lasting: bool = False
    """Given by the user, or advertised now: never forgotten."""


class Membership:
    """One node's view. `handle` is given every event with the time of the monotonic clock, in seconds."""

    def __init__(self, me: Peer, draw: Callable[[], float]) -> None:
        """`draw` gives random numbers from 0 to 1, which spread the redials of many nodes."""
        self.me, self._draw = me, draw
        self._links: dict[LinkId, _Link] = {}
        self._targets: list[_Target] = []
        self._mine: set[Address] = set()

    @property
    def members(self) -> tuple[Peer, ...]:
        """The nodes with a link, and this one, by id."""
        found = {link.peer.id: link.peer for link in self._links.values()} | {self.me.id: self.me}
        return tuple(found[node] for node in sorted(found))

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What is to be done about an event."""
        if isinstance(event, FrameArrived):  # by far the most of them, while tokens wait
            if event.link in self._links:
                self._links[event.link].heard_at = now
            return []
        before = self.members
        done = list(self._decide(event, now))
        if self.members != before:
            done.append(ReportMembers(self.members))
            done += [SendPeers(link, self.members) for link in self._links]
        return done

    def _decide(self, event: Event, now: float) -> Iterator[Instruction]:
        match event:
            case AddressesHinted(addresses, node, lasting):
                self._hint(addresses, node, lasting, now)
                yield from self._dial(now)
            case AdvertWithdrawn(node):
                for target in self._targets:
                    target.lasting = target.lasting and target.id != node
            case LinkOpened(link, peer, address):
                yield from self._open(link, peer, address, now)
            case LinkLost(link, left):
                self._lose(link, left, now)
            case DialFailed(addresses):
                self._fail(addresses, now)
            case TimePassed():
                yield from self._tick(now)

    def _hint(self, addresses: tuple[Address, ...], node: NodeId | None, lasting: bool, now: float) -> None:
        others = tuple(address for address in addresses if address not in self._mine)
        if not others or node == self.me.id:
            return
        target = self._target(node, others)
        if target is None:
            wait = GRACE_S if node is not None and self.me.id > node else 0.0
            if len(self._targets) < MAX_TARGETS:
                self._targets.append(_Target(others, now + wait, node, lasting=lasting))
        else:
            news = set(others) - set(target.addresses)
            target.addresses = (*others, *(a for a in target.addresses if a not in others))
            target.lasting = target.lasting or lasting
            if news and not target.dialling:
                target.due_at, target.failures = min(target.due_at, now + GRACE_S), 0

    def _target(self, node: NodeId | None, addresses: tuple[Address, ...]) -> _Target | None:
        for target in self._targets:
            if (node is not None and target.id == node) or set(addresses) & set(target.addresses):
                return target
        return None

    def _open(self, link: LinkId, peer: Peer, address: Address | None, now: float) -> Iterator[Instruction]:
        if peer.id == self.me.id:
            yield Close(link, "this is the node itself" if peer == self.me else "another process has the same key")
            yield from self._meet_myself(peer, address)
            return
        self._learn(peer, address)
        rival = next((other for other, held in self._links.items() if held.peer.id == peer.id), None)
        if rival is not None:
            same = self._links[rival].peer.incarnation == peer.incarnation
            if same and not self._prefers(address is not None, self._links[rival].dialled, peer.id):
                yield Close(link, "there is a link already")
                return
            yield Close(rival, "a newer link took its place" if same else "its node has started again")
            del self._links[rival]
        self._links[link] = _Link(peer, address is not None, now, now)
        yield SendPeers(link, self.members)

    def _meet_myself(self, peer: Peer, address: Address | None) -> Iterator[Instruction]:
        if peer.incarnation == self.me.incarnation:
            if address is not None:
                self._mine.add(address)
                for target in self._targets:
                    target.dialling = False
                    target.addresses = tuple(a for a in target.addresses if a != address)
                self._targets = [target for target in self._targets if target.addresses]
        elif self.me.incarnation > peer.incarnation:
            yield BecomeAnotherNode(peer)

    def _learn(self, peer: Peer, address: Address | None) -> None:
        """Remember where a node is, and that it was reached."""
        known = tuple(a for a in (address, *peer.addresses) if a is not None)
        same = [t for t in self._targets if t.id == peer.id or (t.id is None and set(t.addresses) & set(known))]
        self._targets = [target for target in self._targets if target not in same]
        addresses = dict.fromkeys((*known, *(a for target in same for a in target.addresses)))
        lasting = any(target.lasting for target in same)
        self._targets.append(_Target(tuple(addresses), 0.0, peer.id, lasting=lasting))

    def _prefers(self, dialled: bool, rival_dialled: bool, peer: NodeId) -> bool:
        """Whether a new link is better than one that is there: both ends have to think alike."""
        return dialled != rival_dialled and dialled == (self.me.id < peer)

    def _lose(self, link: LinkId, left: bool, now: float) -> None:
        held = self._links.pop(link, None)
        if held is None:
            return
        if left:
            self._targets = [target for target in self._targets if target.id != held.peer.id]
            return
        for target in self._targets:
            if target.id == held.peer.id:
                wait = GRACE_S if self.me.id > held.peer.id else 0.0
                target.failures, target.due_at = 0, now + wait + self._draw() * _FIRST_PAUSE_S

    def _fail(self, addresses: tuple[Address, ...], now: float) -> None:
        for target in self._targets:
            if target.dialling and set(addresses) & set(target.addresses):
                target.dialling = False
                target.failures += 1
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**target.failures)
                target.due_at = now + pause * (0.5 + self._draw())
        self._targets = [t for t in self._targets if t.lasting or t.failures < _FORGET_AFTER_FAILURES]

    def _tick(self, now: float) -> Iterator[Instruction]:
        for link, held in list(self._links.items()):
            if now - held.heard_at > DEAD_AFTER_S:
                yield Close(link, f"silent for {now - held.heard_at:.1f} s")
                self._lose(link, False, now)
            elif now - held.sent_at >= HEARTBEAT_S:
                held.sent_at = now
                yield SendHeartbeat(link)
        yield from self._dial(now)

    def _dial(self, now: float) -> Iterator[Instruction]:
        linked = {link.peer.id for link in self._links.values()}
        for target in self._targets:
            if target.id in linked:
                target.dialling = False
            elif not target.dialling and now >= target.due_at:
                target.dialling = True
                yield Dial(target.addresses)
