"""What a node advertises of itself, and what is believed of others: every advert is a hint, never a proof."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshinfer.settings import NAME_CHARACTERS
from meshinfer.types import NodeId

MOST_ADDRESSES = 16
MOST_DEVICES = 8
_DEVICES_CHARACTERS = 200
_NAME_BYTES = 200
"""A TXT entry has 255 bytes with its key."""
_HEX = re.compile(r"[0-9a-f]+")
_DIGITS = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Advert:
    """What a node says on the network to whoever listens. `mesh`: `security.mesh_key.mesh_fingerprint`.

    Addresses are text without a port; IPv6 link-local ones have their scope.
    """

    protocol: int
    mesh: str
    id: NodeId
    name: str
    port: int
    addresses: tuple[str, ...] = ()
    memory_bytes: int = 0
    devices: tuple[str, ...] = ()


def txt(advert: Advert) -> dict[bytes, bytes]:
    """The TXT record (RFC 6763, section 6); port and addresses are in records of their own."""
    values = {
        "v": str(advert.protocol),
        "mesh": advert.mesh,
        "id": advert.id,
        "name": advert.name.encode()[:_NAME_BYTES].decode(errors="ignore").strip(),
        "memory": str(advert.memory_bytes),
        "devices": ",".join(advert.devices[:MOST_DEVICES]),
    }
    return {key.encode(): value.encode() for key, value in values.items()}


def parse(properties: Mapping[bytes, bytes | None], addresses: Sequence[str], port: int | None) -> Advert | None:
    """The advert that these records make, or None where they are not one of meshinfer."""
    try:
        values = {key: (properties.get(key.encode()) or b"").decode() for key in _SOUND}
    except UnicodeDecodeError:
        return None
    usable = [address for address in map(_address, addresses[: 4 * MOST_ADDRESSES]) if address is not None]
    devices = tuple(device for device in values["devices"].split(",") if device)
    if port is None or not 1 <= port <= 65535 or not usable or len(devices) > MOST_DEVICES:
        return None
    if not all(_SOUND[key](value) for key, value in values.items()):
        return None
    return Advert(
        protocol=int(values["v"]),
        mesh=values["mesh"],
        id=NodeId(values["id"]),
        name=values["name"],
        port=port,
        addresses=tuple(dict.fromkeys(usable))[:MOST_ADDRESSES],
        memory_bytes=int(values["memory"]),
        devices=devices,
    )


_SOUND: dict[str, Callable[[str], bool]] = {
    "v": lambda value: _DIGITS.fullmatch(value) is not None,
    "mesh": lambda value: len(value) == 16 and _HEX.fullmatch(value) is not None,
    "id": lambda value: len(value) == 32 and _HEX.fullmatch(value) is not None,
    "name": lambda value: 0 < len(value) <= NAME_CHARACTERS and value.isprintable() and value.strip() == value,
    "memory": lambda value: _DIGITS.fullmatch(value) is not None,
    "devices": lambda value: len(value) <= _DEVICES_CHARACTERS and value.isprintable(),
}
"""The keys of the TXT record, and what makes their values sound."""


def _address(text: str) -> str | None:
    """An address that can be dialled, in one spelling."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if address.is_unspecified or address.is_multicast:
        return None
    if address.version == 6 and address.is_link_local and not address.scope_id:
        return None  # leads nowhere without its interface
    return str(address)
