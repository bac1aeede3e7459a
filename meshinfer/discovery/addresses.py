"""Which interfaces of this machine are of use, and in which order to try a node's addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface

from meshinfer.errors import InputError

_VIRTUAL = re.compile(
    r"(docker|veth|br-|virbr|vmnet|vboxnet|lxcbr|lxdbr|podman|cni|flannel|cali|tun|tap|wg|utun|ppp|zt|tailscale|awdl|llw)"
    r"|bridge1\d\d|vEthernet \((Default Switch|WSL|nat)|VirtualBox|VMware|WireGuard|OpenVPN|Loopback",
    re.IGNORECASE,
)
"""Names of what leads to containers, virtual machines and VPNs, not to the office."""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this machine, with its addresses and their networks."""

    name: str
    networks: tuple[IPv4Interface | IPv6Interface, ...]
    up: bool = True
    loopback: bool = False
    tunnel: bool = False
    """Point to point: a VPN."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """IPv4 first."""
        ordered = sorted(self.networks, key=lambda network: network.version)
        return tuple(str(network.ip) for network in ordered)

    @property
    def virtual(self) -> bool:
        """Whether it leads away from the office."""
        return self.tunnel or (not self.loopback and _VIRTUAL.match(self.name) is not None)


def choose(interfaces: Sequence[Interface], wanted: Sequence[str] = ()) -> tuple[Interface, ...]:
    """The interfaces to find others on: those `wanted` by name or address, else all that lead to the office.

    Loopback where there is no other, so that nodes on one machine find each other. Raises InputError for one
    that is not there.
    """
    for item in wanted:
        if not any(_is_called(interface, item) for interface in interfaces):
            there = ", ".join(_described(interface) for interface in interfaces)
            raise InputError(f"there is no network interface '{item}' (there are: {there or 'none'})")
    usable = [interface for interface in interfaces if interface.up and interface.networks]
    if wanted:
        return tuple(i for i in usable if any(_is_called(i, item) for item in wanted))
    office = tuple(i for i in usable if not i.loopback and not i.virtual)
    return office or tuple(i for i in usable if i.loopback)


def sources(interfaces: Iterable[Interface], dual_stack: bool) -> list[str]:
    """The addresses to send multicast from: all IPv4 ones, and of IPv6 one per interface, link-local if there is one.

    Without `dual_stack` IPv6 is left out where there is IPv4: BSD and macOS do not let one socket hear both.
    """
    chosen = list(interfaces)
    v4 = [str(network.ip) for i in chosen for network in i.networks if network.version == 4]
    if v4 and not dual_stack:
        return v4
    v6 = []
    for interface in chosen:
        here = [n.ip for n in interface.networks if n.version == 6 and not n.ip.is_loopback]
        v6 += [str(ip) for ip in sorted(here, key=lambda ip: not ip.is_link_local)[:1]]
    return v4 + v6


def rank(addresses: Sequence[str], mine: Sequence[Interface], used: Sequence[Interface] = ()) -> tuple[str, ...]:
    """A node's addresses, the likeliest first, as seen from a machine with the interfaces `mine`.

    First those in networks of this machine, then private ones, then the rest. Last those in networks of containers
    and VPNs that are not `used`: they may lead to this machine itself. Loopback only if the node is on this machine.
    """
    away = [i for i in mine if i.virtual and i not in used]
    near = [i for i in mine if i not in away]
    parsed = [ipaddress.ip_address(address) for address in addresses]
    outside = {_bare(str(address)) for address in parsed if not address.is_loopback}
    here = not outside or any(_bare(address) in outside for i in near for address in i.addresses)

    def place(address: IPv4Address | IPv6Address) -> int:
        if address.is_loopback:
            return 0
        if address.is_link_local:
            return 3
        if _leads_to(address, near):
            return 1 if address.version == 4 else 2
        if _leads_to(address, away):
            return 6
        return 4 if address.is_private else 5

    kept = [address for address in parsed if here or not address.is_loopback]
    return tuple(str(address) for address in sorted(kept, key=place))


def _leads_to(address: IPv4Address | IPv6Address, interfaces: Sequence[Interface]) -> bool:
    return any(address in network.network for interface in interfaces for network in interface.networks)


def _bare(address: str) -> str:
    """An address without its scope."""
    return address.partition("%")[0]


def _is_called(interface: Interface, text: str) -> bool:
    return text == interface.name or _bare(text) in map(_bare, interface.addresses)


def _described(interface: Interface) -> str:
    return f"{interface.name} {interface.addresses[0]}" if interface.addresses else interface.name
