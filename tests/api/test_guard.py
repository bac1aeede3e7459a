"""Who may ask."""

from __future__ import annotations

import pytest

from meshinfer.api.guard import TOKEN_HEADER, Guard
from meshinfer.errors import InputError

LOCAL = {"Host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST", "localhost.", "[::1]:8000", "127.9.9.9"]
)
def test_loopback_is_answered(host: str) -> None:
    assert Guard().refusal("/v1/models", {"Host": host}) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost@evil.example", "::1", "[::1", "a b"]
    + ["192.168.1.5", "127.0.0.1:80:80", "localhost/x", "127.0.0.1:", "[localhost]", "[127.0.0.1"],
)
def test_a_foreign_host_is_refused(host: str) -> None:
    refusal = Guard().refusal("/health", {"Host": host})
    assert refusal is not None
    assert (refusal.status, refusal.code) == (403, "foreign_host")


def test_no_host_at_all_is_refused() -> None:
    refusal = Guard().refusal("/health", {})
    assert refusal is not None and refusal.status == 403


def test_the_host_it_listens_on_is_answered() -> None:
    guard = Guard(api_key="k").listening_on("192.168.1.5")
    assert guard.refusal("/health", {"Host": "192.168.1.5:8000"}) is None
    assert guard.refusal("/health", {"Host": "192.168.1.6:8000"}) is not None
    named = Guard(hosts=frozenset({"Desk-7.Office"}), api_key="k")
    assert named.refusal("/health", {"Host": "desk-7.office:8000"}) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_on_all_addresses_any_address_is_answered_but_no_name(host: str) -> None:
    guard = Guard(api_key="k").listening_on(host)
    assert guard.refusal("/health", {"Host": "10.0.0.7:8000"}) is None
    assert guard.refusal("/health", {"Host": "[fe80::1]:8000"}) is None
    assert guard.refusal("/health", {"Host": "evil.example:8000"}) is not None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "desk-7"])
def test_beyond_loopback_a_key_is_needed(host: str) -> None:
    with pytest.raises(InputError, match="needs an API key"):
        Guard().listening_on(host)
    Guard(api_key="k").listening_on(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_none_is_needed(host: str) -> None:
    Guard().listening_on(host)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", "http://127.0.0.1:8001", "http://127.0.0.1", "file://", "https://x"]
)
def test_pages_of_other_sites_are_refused(origin: str) -> None:
    refusal = Guard().refusal("/v1/models", {**LOCAL, "Origin": origin})
    assert refusal is not None
    assert (refusal.status, refusal.code) == (403, "foreign_origin")


def test_its_own_page_is_not_refused() -> None:
    assert Guard().refusal("/v1/models", {**LOCAL, "Origin": "http://127.0.0.1:8000"}) is None
    assert Guard().refusal("/", {"Host": "LocalHost:80", "Origin": "http://localhost:80"}) is None


@pytest.mark.parametrize("given", [None, "", "k", "Bearer", "Bearer ", "Bearer no", "Basic secret", "Bearer secret2"])
def test_a_wrong_key_is_refused(given: str | None) -> None:
    headers = LOCAL if given is None else {**LOCAL, "Authorization": given}
    refusal = Guard(api_key="secret").refusal("/v1/models", headers)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert refusal.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("given", ["Bearer secret", "bearer  secret "])
def test_the_right_key_is_taken(given: str) -> None:
    assert Guard(api_key="secret").refusal("/v1/models", {**LOCAL, "Authorization": given}) is None


def test_whoever_watches_needs_no_key_and_everything_else_does() -> None:
    guard = Guard(api_key="secret")
    assert guard.refusal("/health", LOCAL) is None
    assert guard.refusal("/ready", LOCAL) is None
    assert guard.refusal("/health/", LOCAL) is not None
    assert guard.refusal("/", LOCAL) is not None
    assert Guard(api_key="secret", open_paths=frozenset({"/"})).refusal("/", LOCAL) is None


@pytest.mark.parametrize("given", [None, "", "no", "töken", "\udcff"])
def test_the_mesh_is_administered_with_the_token_only(given: str | None) -> None:
    guard = Guard(api_key="secret", token="token")
    headers = {**LOCAL, "Authorization": "Bearer secret"} | ({} if given is None else {TOKEN_HEADER: given})
    refusal = guard.refusal("/mesh/leave", headers)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (401, "invalid_token")
    assert guard.refusal("/mesh/leave", {**LOCAL, TOKEN_HEADER: "token"}) is None


def test_without_a_token_nobody_administers() -> None:
    assert Guard().refusal("/mesh/leave", {**LOCAL, TOKEN_HEADER: ""}) is not None


def test_secrets_are_not_empty_and_not_shown() -> None:
    for secret in ({"api_key": ""}, {"token": ""}):
        with pytest.raises(InputError):
            Guard(**secret)
    assert "hidden" not in repr(Guard(api_key="hidden", token="hidden"))
