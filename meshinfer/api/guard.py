"""Who may ask: decided from the path and the headers of a request, before its body is read."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address, ip_address

from meshinfer.api.problems import Problem
from meshinfer.errors import InputError
from meshinfer.settings import is_loopback

TOKEN_HEADER = "X-Meshinfer-Token"
ADMIN_PREFIX = "/mesh/"
OPEN_PATHS = frozenset({"/health", "/ready"})

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/\\?#\s]+))(?::\d{1,5})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one API.

    `hosts` are the names and addresses besides loopback under which it may be called. Paths below `/mesh/` need the
    node's `token`, `open_paths` need nothing, and all others need the `api_key` where there is one.
    """

    hosts: frozenset[str] = frozenset()
    api_key: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    open_paths: frozenset[str] = OPEN_PATHS

    def __post_init__(self) -> None:
        if self.api_key == "" or self.token == "":
            raise InputError("an API key or token that is empty protects nothing")

    def listening_on(self, host: str) -> Guard:
        """The same rules for an API that listens on this address; beyond loopback there must be a key."""
        if not is_loopback(host) and self.api_key is None:
            raise InputError(f"an API on {host} can be reached from other machines: it needs an API key")
        return replace(self, hosts=self.hosts | {host})

    def refusal(self, path: str, headers: Mapping[str, str]) -> Problem | None:
        """Why a request is refused, or nothing. `headers` are found under any spelling of their name."""
        host, origin = headers.get("Host", ""), headers.get("Origin")
        if not self._answers_to(host):
            return Problem(403, f"this API does not answer to the host '{host}'", code="foreign_host")
        if origin is not None and origin.lower() not in {f"http://{host}".lower(), f"https://{host}".lower()}:
            return Problem(403, f"pages of '{origin}' may not use this API", code="foreign_origin")
        if path.startswith(ADMIN_PREFIX):
            if not _same(headers.get(TOKEN_HEADER), self.token):
                return Problem(401, f"{path} needs this node's token in {TOKEN_HEADER}", code="invalid_token")
        elif path not in self.open_paths and self.api_key is not None:
            scheme, _, key = headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not _same(key.strip(), self.api_key):
                return Problem(401, "this API needs its key: Authorization: Bearer KEY", code="invalid_api_key")
        return None

    def _answers_to(self, host: str) -> bool:
        """Whether a Host header means this API: a name that an attacker made point here does not."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = (match[1] or match[2]).lower().removesuffix(".")
        if is_loopback(name) or name in {known.lower() for known in self.hosts}:
            return True
        on_all = any((address := _address(known)) is not None and address.is_unspecified for known in self.hosts)
        return on_all and _address(name) is not None  # an address is no name that could be made to point elsewhere


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _same(given: str | None, secret: str | None) -> bool:
    """In a time that tells nothing about where they differ."""
    if given is None or secret is None:
        return False
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode("utf-8", "surrogateescape"))
