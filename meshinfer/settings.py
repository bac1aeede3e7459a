"""What an agent is told: options of the command line, and keys of the config file by the same names."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from meshinfer.errors import InputError

DEFAULT_PORT = 7420
DEFAULT_API_PORT = 8000
COMMAND_LINE, DEFAULT = "command line", "default"
NAME_CHARACTERS = 63
_LEAST_MEMORY_BYTES = 1_000_000
_HOST = re.compile(r"[^\W_]([\w.-]*\w)?\.?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Settings:
    """What an agent is told. Addresses of peers are HOST:PORT, IPv6 in brackets."""

    name: str
    model: str | None = None
    api_host: str = "127.0.0.1"
    api_port: int = DEFAULT_API_PORT
    port: int | None = None
    """Where other nodes come in. None: 7420 or the next one that is free; 0: any."""
    join: str | None = None
    peers: tuple[str, ...] = ()
    memory_bytes: int | None = None
    """None: what is free, less a reserve."""
    device: str = "auto"
    exact: bool = False
    interfaces: tuple[str, ...] = ()
    """Names or addresses; empty: all that make sense."""
    threads: int | None = None
    context_tokens: int | None = None
    """Positions that room is kept for in each request."""
    users: int = 8
    """Requests at once."""
    api_key: str | None = None
    discovery: bool = True


def host_port(text: str, default_port: int, least_port: int = 1) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`, `HOST`, `[IPV6]:PORT` or `[IPV6]`. Raises InputError."""
    trimmed = text.strip()
    if "://" in trimmed:
        raise InputError(f"'{text}' is a URL: give HOST:PORT")
    host, bracket, rest = trimmed[1:].rpartition("]") if trimmed.startswith("[") else ("", "", "")
    if not bracket:
        host, colon, port = trimmed.partition(":")
        rest = colon + port
        if ":" in port:
            raise InputError(f"'{text}' has more than one colon: put an IPv6 address in brackets, as in [fe80::1]:7420")
    if host.isdigit() and not rest:
        raise InputError(f"'{text}' has no host: give HOST:PORT, as in 127.0.0.1:{host}")
    if not (_is_ipv6(host) if bracket else _is_host(host)):
        raise InputError(f"'{text}' names no host: give HOST:PORT, as in 192.168.1.20:{default_port}")
    if not rest:
        return host, default_port
    digits = rest[1:]
    if rest[0] != ":" or not (digits.isascii() and digits.isdigit()) or not least_port <= int(digits) <= 65535:
        raise InputError(f"'{text}' has no port: it is a number from {least_port} to 65535 behind the host and a colon")
    return host, int(digits)


def host_port_text(host: str, port: int) -> str:
    """HOST:PORT, as `host_port` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def size_bytes(text: str) -> int:
    """The bytes of `6GB`, `512 MiB` or `1000000`. Raises InputError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"'{text}' is not a size: say 6GB, 800MB, 6GiB, or a number of bytes")
    number, unit = match[1], (match[2] or "").lower().removesuffix("b")
    return int(float(number) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")])


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and no other can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def fit_name(host_name: str) -> str:
    """A name for a node, made from what its machine is called."""
    return "".join(c for c in host_name if c.isprintable()).strip()[:NAME_CHARACTERS].strip() or "node"


def settle(
    given: Mapping[str, object], filed: Mapping[str, object], file: str, host_name: str
) -> tuple[Settings, dict[str, str]]:
    """The settings from the command line, the config file `file` and the defaults, in this order of weight.

    Also says for each field where its value is from. Raises InputError, which names the file and the key.
    """
    values: dict[str, Any] = {"name": fit_name(host_name)}
    origins = {field.name: DEFAULT for field in fields(Settings)}
    for source, place in ((filed, file), (given, COMMAND_LINE)):
        for key, value in source.items():
            found = _read(key, value, place)
            values |= found
            origins |= dict.fromkeys(found, place)
    settings = Settings(**values)
    if not is_loopback(settings.api_host) and settings.api_key is None:
        raise InputError(
            f"{origins['api_host']}: api: other machines reach {settings.api_host}, so the API needs a key: give "
            f"--api-key KEY, or api-key in {file}; without --api it is there for this machine alone"
        )
    return settings, origins


def _read(key: str, value: object, place: str) -> dict[str, object]:
    where = f"--{key}" if place == COMMAND_LINE else f"{place}: {key}"
    if key not in KEYS:
        near = difflib.get_close_matches(key.lower().replace("_", "-"), KEYS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(KEYS)}"
        raise InputError(f"{place}: there is no key '{key}'; {hint}")
    try:
        return KEYS[key](value)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _is_host(host: str) -> bool:
    if re.fullmatch(r"[\d.]+", host):  # nothing but an address looks like this
        try:
            return ipaddress.ip_address(host).version == 4
        except ValueError:
            return False
    return _HOST.fullmatch(host) is not None and len(host) <= 253


Reader = Callable[[object], dict[str, object]]
"""From the value of a key to the fields it sets. Raises InputError."""


def _as_text(value: object, longest: int = 4096) -> str:
    if not isinstance(value, str):
        raise InputError("has to be text in quotes")
    if not value.strip() or not value.isprintable() or len(value) > longest:
        raise InputError(f"has to be text of 1 to {longest} characters on one line")
    return value.strip()


def _as_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise InputError('has to be a list, as in ["one", "another"]')
    return tuple(_as_text(item) for item in value)


def _text(field: str, longest: int = 4096) -> Reader:
    return lambda value: {field: _as_text(value, longest)}


def _whole(field: str, least: int, most: int) -> Reader:
    def read(value: object) -> dict[str, object]:
        if type(value) is not int or not least <= value <= most:
            raise InputError(f"has to be a whole number from {least} to {most}")
        return {field: value}

    return read


def _yes_no(field: str) -> Reader:
    def read(value: object) -> dict[str, object]:
        if not isinstance(value, bool):
            raise InputError("has to be true or false")
        return {field: value}

    return read


def _api(value: object) -> dict[str, object]:
    host, port = host_port(_as_text(value), DEFAULT_API_PORT, least_port=0)
    return {"api_host": host, "api_port": port}


def _peers(value: object) -> dict[str, object]:
    return {"peers": tuple(host_port_text(*host_port(item, DEFAULT_PORT)) for item in _as_texts(value))}


def _memory(value: object) -> dict[str, object]:
    if not isinstance(value, str) and type(value) is not int:
        raise InputError('has to be a size, as in "6GB"')
    size = size_bytes(str(value))
    if size < _LEAST_MEMORY_BYTES:
        raise InputError(f"{size} bytes hold no model: say 6GB, for example")
    return {"memory_bytes": size}


KEYS: dict[str, Reader] = {
    "model": _text("model"),
    "name": _text("name", NAME_CHARACTERS),
    "api": _api,
    "port": _whole("port", 0, 65535),
    "join": _text("join"),
    "peer": _peers,
    "memory": _memory,
    "device": _text("device"),
    "exact": _yes_no("exact"),
    "interface": lambda value: {"interfaces": _as_texts(value)},
    "threads": _whole("threads", 1, 1024),
    "context": _whole("context_tokens", 1, 1 << 30),
    "users": _whole("users", 1, 4096),
    "api-key": _text("api_key"),
    "mdns": _yes_no("discovery"),
}
"""Every key of the config file, which is an option of the command line too."""
