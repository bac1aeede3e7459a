"""Many nodes in one process, on a network that can fail: every instruction is done, after a while."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from meshinfer.membership.events import (
    Address,
    AddressesHinted,
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
    SendHeartbeat,
    SendPeers,
    TimePassed,
)
from meshinfer.membership.state import Membership
from meshinfer.types import NodeId

TICK_S = 0.2


@dataclass
class Node:
    state: Membership
    address: Address
    links: dict[LinkId, tuple[str, LinkId]] = field(default_factory=dict)
    """Of each link: the node at the other end, and what it calls the link."""
    alive: bool = True
    twins: list[Peer] = field(default_factory=list)


class Lan:
    """`blocked`: pairs (from, to) of names between which no connection can be opened, nor anything be sent."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.blocked: set[tuple[str, str]] = set()
        self.deaf: set[tuple[str, str]] = set()
        """Pairs between which connections cannot be opened; what is open stays."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._numbers = count(), count(1)

    def add(self, name: str, id: str | None = None, incarnation: int | None = None) -> Node:
        address = Address(f"10.0.0.{len(self.nodes) + 1}", 7000)
        drawn = int(self.random.integers(1 << 62)) if incarnation is None else incarnation
        me = Peer(NodeId(id or name), name, drawn, (address,))
        node = self.nodes[name] = Node(Membership(me, self.random.random), address)
        self._tick(name, node)
        return node

    def restart(self, name: str) -> None:
        """The process dies without a word and starts again at the same address."""
        old = self.nodes[name]
        self.kill(name)
        drawn = int(self.random.integers(1 << 62))
        me = Peer(old.state.me.id, name, drawn, (old.address,))
        node = self.nodes[name] = Node(Membership(me, self.random.random), old.address)
        self._tick(name, node)

    def kill(self, name: str) -> None:
        self.nodes[name].alive = False

    def hint(self, name: str, *others: str, with_id: bool = True) -> None:
        for other in others:
            target = self.nodes[other]
            node = target.state.me.id if with_id else None
            self.happen(name, AddressesHinted((target.address,), node))

    def everyone_hears_of_everyone(self) -> None:
        for name in self.nodes:
            self.hint(name, *(other for other in self.nodes if other != name))

    def happen(self, name: str, event: Event) -> None:
        node = self.nodes[name]
        if node.alive:
            for instruction in node.state.handle(event, self.now):
                self._do(name, node, instruction)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def views(self) -> dict[str, list[str]]:
        """Whom every living node believes to be there."""
        return {name: [peer.name for peer in n.state.members] for name, n in self.nodes.items() if n.alive}

    def _later(self, action: Callable[[], None], seconds: float | None = None) -> None:
        delay = float(self.random.uniform(0.0005, 0.02)) if seconds is None else seconds
        heapq.heappush(self._queue, (self.now + delay, next(self._order), action))

    def _tick(self, name: str, node: Node) -> None:
        def tick() -> None:
            if self.nodes.get(name) is node and node.alive:
                self.happen(name, TimePassed())
                self._later(tick, TICK_S)

        self._later(tick, float(self.random.uniform(0, TICK_S)))

    def _do(self, name: str, node: Node, instruction: Instruction) -> None:
        match instruction:
            case Dial(addresses):
                self._later(lambda: self._connect(name, node, addresses))
            case Close(link, _):
                if link in node.links:
                    other, far = node.links.pop(link)
                    self._later(lambda: self._ended(other, far))
            case SendHeartbeat(link):
                self._send(name, node, link, None)
            case SendPeers(link, peers):
                self._send(name, node, link, peers)
            case BecomeAnotherNode(twin):
                node.twins.append(twin)

    def _connect(self, name: str, node: Node, addresses: tuple[Address, ...]) -> None:
        if self.nodes.get(name) is not node or not node.alive:
            return
        for address in addresses:
            found = next((n for n, other in self.nodes.items() if other.address == address and other.alive), None)
            if found is None or (name, found) in self.blocked | self.deaf:
                continue
            near, far = LinkId(next(self._numbers)), LinkId(next(self._numbers))
            other = self.nodes[found]
            node.links[near], other.links[far] = (found, far), (name, near)
            self.happen(found, LinkOpened(far, node.state.me, None))
            self.happen(name, LinkOpened(near, other.state.me, address))
            return
        self._later(lambda: self.happen(name, DialFailed(addresses)))

    def _ended(self, name: str, link: LinkId) -> None:
        if self.nodes[name].links.pop(link, None):
            self.happen(name, LinkLost(link))

    def _send(self, name: str, node: Node, link: LinkId, peers: tuple[Peer, ...] | None) -> None:
        if link not in node.links:
            return
        other, far = node.links[link]

        def arrive() -> None:
            if (name, other) in self.blocked or far not in self.nodes[other].links:
                return
            self.happen(other, FrameArrived(far))
            for peer in peers or ():
                self.happen(other, AddressesHinted(peer.addresses, peer.id))

        self._later(arrive)
