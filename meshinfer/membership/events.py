"""What happens to a node's links, and what is to be done about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from meshinfer.types import NodeId

LinkId = NewType("LinkId", int)
"""One authenticated connection, as the node that has it numbers them."""


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a node may listen. An IPv6 link-local host has its scope."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as it introduces itself. `incarnation`: a random number of 63 bits that every start draws anew."""

    id: NodeId
    name: str
    incarnation: int
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class AddressesHinted:
    """An advert, another peer or the user says where a node may be; `id` is None where nobody says which."""

    addresses: tuple[Address, ...]
    id: NodeId | None = None
    lasting: bool = True
    """Said by the user or by the node itself, and not only remembered by another one."""


@dataclass(frozen=True, slots=True)
class AdvertWithdrawn:
    """A node's advert is gone; its links decide whether it is."""

    id: NodeId


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The handshake is done: `peer` is who it says. `address` is what was dialled, None for links that came in."""

    link: LinkId
    peer: Peer
    address: Address | None


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A connection ended. `left`: its node said that it goes for good."""

    link: LinkId
    left: bool = False


@dataclass(frozen=True, slots=True)
class DialFailed:
    """Nobody who belongs to this mesh answered at any of these addresses."""

    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """Something came over a link: its node lives."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Some time passed; sent a few times a second."""


Event = AddressesHinted | AdvertWithdrawn | LinkOpened | LinkLost | DialFailed | FrameArrived | TimePassed


@dataclass(frozen=True, slots=True)
class Dial:
    """Try these addresses, the first that answers wins; `LinkOpened` or `DialFailed` is to follow."""

    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """End a connection; no `LinkLost` is to follow."""

    link: LinkId
    reason: str


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Show over a link that this node lives."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendPeers:
    """Tell a node whom this one is linked with."""

    link: LinkId
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class ReportMembers:
    """The nodes that this one is linked with, itself among them, by id: the first leads."""

    members: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class BecomeAnotherNode:
    """Another process has this node's key, from a copied home: take a new one."""

    twin: Peer


Instruction = Dial | Close | SendHeartbeat | SendPeers | ReportMembers | BecomeAnotherNode
