"""The network interfaces of this machine, as the operating system has them now."""

from __future__ import annotations

import socket
from ipaddress import IPv4Interface, IPv6Interface, ip_interface

import psutil

from meshinfer.discovery.addresses import Interface


def read_interfaces() -> tuple[Interface, ...]:
    """Every interface with its addresses, those that are down too. Raises OSError."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        networks = [_network(entry.address, entry.netmask) for entry in entries if entry.family in _FAMILIES]
        flags = set(stats[name].flags.split(",")) if name in stats else set()
        sound = tuple(network for network in networks if network is not None)
        found.append(
            Interface(
                name,
                sound,
                up=name in stats and stats[name].isup,
                loopback="loopback" in flags or any(network.ip.is_loopback for network in sound),
                tunnel="pointopoint" in flags,
            )
        )
    return tuple(found)


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _network(address: str, netmask: str | None) -> IPv4Interface | IPv6Interface | None:
    """An address with its network; IPv6 is taken as a /64, which every link is."""
    try:
        return ip_interface(f"{address}/64" if ":" in address else f"{address}/{netmask or 24}")
    except ValueError:
        return None
