"""What an agent is told: how each key is read, what is refused, and which place wins."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import InputError
from meshinfer.settings import (
    COMMAND_LINE,
    DEFAULT,
    KEYS,
    Settings,
    fit_name,
    host_port,
    host_port_text,
    is_loopback,
    settle,
    size_bytes,
)

FILE = "/etc/x/config.toml"


def settled(given: dict[str, object] | None = None, filed: dict[str, object] | None = None) -> Settings:
    return settle(given or {}, filed or {}, FILE, "pc-7")[0]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.168.1.20:9000", "192.168.1.20", 9000),
        (" pc-7.office.example ", "pc-7.office.example", 7420),
        ("büro_pc:1", "büro_pc", 1),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("[::1]", "::1", 7420),
    ],
)
def test_host_and_port(text: str, host: str, port: int) -> None:
    assert host_port(text, 7420) == (host, port)
    assert host_port(host_port_text(host, port), 1) == (host, port)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://pc-7:7420", "is a URL"),
        ("fe80::1:7420", "in brackets"),
        ("7420", "as in 127.0.0.1:7420"),
        ("", "names no host"),
        (":7420", "names no host"),
        ("[pc-7]:7420", "names no host"),
        ("[::1", "in brackets"),
        ("192.168.1.300:1", "names no host"),
        ("192.168.1:1", "names no host"),
        ("two words", "names no host"),
        ("pc:", "has no port"),
        ("pc:0", "from 1 to 65535"),
        ("pc:65536", "has no port"),
        ("pc:-1", "has no port"),
        ("pc:²", "has no port"),
        ("[::1]7420", "has no port"),
    ],
)
def test_what_is_no_host_and_port_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace(".", r"\.")):
        host_port(text, 7420)


@given(st.text(max_size=40))
def test_any_text_is_a_host_and_port_or_refused(text: str) -> None:
    try:
        host, port = host_port(text, 7420)
    except InputError:
        return
    assert host and 1 <= port <= 65535 and host_port(host_port_text(host, port), 1) == (host, port)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("1.5 gb", 1_500_000_000),
        ("800MB", 800_000_000),
        ("2kB", 2000),
        ("6GiB", 6 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1TB", 10**12),
        ("12345", 12345),
        ("12345 B", 12345),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "6", "-6GB", "6G", "GB", "6 gigabytes", "1e9", "6,5GB", "6GB 1MB", "١GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        settled({"memory": text})


def test_the_command_line_outweighs_the_file_which_outweighs_the_defaults() -> None:
    settings, origins = settle({"users": 2}, {"users": 3, "device": "cpu"}, FILE, "pc-7")
    assert (settings.users, settings.device, settings.api_port, settings.name) == (2, "cpu", 8000, "pc-7")
    assert (origins["users"], origins["device"], origins["api_port"]) == (COMMAND_LINE, FILE, DEFAULT)
    assert set(origins) == {field.name for field in dataclasses.fields(Settings)}


def test_every_key_sets_a_field_of_its_own() -> None:
    filed: dict[str, object] = {
        "model": "qwen3-0.6b",
        "name": "front desk",
        "api": "[::1]:9000",
        "port": 0,
        "join": "abcd",
        "peer": ["pc-1", "[fe80::1%eth0]:1"],
        "memory": "6GB",
        "device": "GPU.1",
        "exact": True,
        "interface": ["eth0", "10.0.0.2"],
        "threads": 4,
        "context": 4096,
        "users": 3,
        "api-key": "secret",
        "mdns": False,
    }
    assert set(filed) == set(KEYS)
    settings, origins = settle({}, filed, FILE, "pc-7")
    assert settings == Settings(
        model="qwen3-0.6b",
        name="front desk",
        api_host="::1",
        api_port=9000,
        port=0,
        join="abcd",
        peers=("pc-1:7420", "[fe80::1%eth0]:1"),
        memory_bytes=6_000_000_000,
        device="GPU.1",
        exact=True,
        interfaces=("eth0", "10.0.0.2"),
        threads=4,
        context_tokens=4096,
        users=3,
        api_key="secret",
        discovery=False,
    )
    assert set(origins.values()) == {FILE}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("prot", 1, "there is no key 'prot'; did you mean 'port'?"),
        ("API_KEY", "x", "did you mean 'api-key'?"),
        ("zzz", 1, "there is no key 'zzz'; there are model, name"),
        ("port", 70000, "port: has to be a whole number from 0 to 65535"),
        ("port", True, "port: has to be a whole number"),
        ("port", "7420", "port: has to be a whole number"),
        ("users", 0, "users: has to be a whole number from 1"),
        ("exact", "yes", "exact: has to be true or false"),
        ("model", "  ", "model: has to be text of 1 to"),
        ("model", {"name": "x"}, "model: has to be text in quotes"),
        ("name", "a\nb", "on one line"),
        ("name", "x" * 64, "1 to 63 characters"),
        ("peer", "pc-1", "peer: has to be a list"),
        ("peer", ["pc-1", 2], "peer: has to be text in quotes"),
        ("peer", ["pc-1:0"], "peer: 'pc-1:0' has no port"),
        ("api", 8000, "api: has to be text in quotes"),
        ("memory", 6.5, "memory: has to be a size"),
        ("memory", 6, "memory: 6 bytes hold no model"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_the_file_and_the_key(key: str, value: object, said: str) -> None:
    with pytest.raises(InputError) as caught:
        settled(filed={key: value})
    assert str(caught.value).startswith(f"{FILE}: ") and said in str(caught.value)


def test_what_is_wrong_on_the_command_line_is_said_with_the_option() -> None:
    with pytest.raises(InputError, match=r"^--api: 'x y' names no host"):
        settled({"api": "x y"})


@pytest.mark.parametrize("api", ["0.0.0.0:8000", "[::]:8000", "192.168.1.2", "pc-7"])
def test_an_api_that_others_can_reach_needs_a_key(api: str) -> None:
    with pytest.raises(InputError, match="--api-key"):
        settled({"api": api})
    assert settled({"api": api}, {"api-key": "secret"}).api_key == "secret"


@pytest.mark.parametrize("api", ["127.0.0.1:0", "127.0.0.53", "localhost:80", "[::1]:8000"])
def test_an_api_for_this_machine_alone_needs_no_key(api: str) -> None:
    assert is_loopback(settled({"api": api}).api_host)


@pytest.mark.parametrize(
    ("host_name", "name"), [("pc-7", "pc-7"), ("", "node"), (" \x00 ", "node"), ("x" * 80, "x" * 63)]
)
def test_any_host_name_gives_a_name(host_name: str, name: str) -> None:
    assert fit_name(host_name) == name
