"""Adverts survive the way over the network; nothing that arrives can do harm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshinfer.discovery.records import Advert, parse, txt
from meshinfer.types import NodeId

PC = Advert(
    protocol=1,
    mesh="0123456789abcdef",
    id=NodeId("0123456789abcdef" * 2),
    name="front desk",
    port=7420,
    addresses=("192.168.1.20", "fe80::1%3"),
    memory_bytes=12_000_000_000,
    devices=("CPU", "GPU.0"),
)

hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
names = st.text(min_size=1, max_size=63).filter(lambda name: name.isprintable() and name.strip() == name)
adverts = st.builds(
    Advert,
    protocol=st.integers(0, 999),
    mesh=hexes.map(lambda text: text[:16]),
    id=hexes.map(NodeId),
    name=names,
    port=st.integers(1, 65535),
    addresses=st.just(PC.addresses),
    memory_bytes=st.integers(0, 10**14),
    devices=st.lists(st.sampled_from(["CPU", "GPU", "GPU.1", "NPU"]), max_size=8).map(tuple),
)


@given(adverts)
@example(PC)
@example(replace(PC, devices=()))
def test_what_is_advertised_is_what_is_read(advert: Advert) -> None:
    entries = txt(advert)
    assert all(len(key) + 1 + len(value) <= 255 for key, value in entries.items())
    read = parse(entries, advert.addresses, advert.port)
    assert read is not None and advert.name.startswith(read.name)
    assert replace(read, name=advert.name) == advert
    if len(advert.name.encode()) <= 200:
        assert read == advert


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"mesh", b"id", b"name", b"memory", b"devices"]) | st.binary(max_size=9),
        st.none() | st.binary(max_size=300) | st.sampled_from(list(txt(PC).values())),
    ),
    st.lists(st.text(max_size=20) | st.ip_addresses().map(str), max_size=80),
    st.none() | st.integers(),
)
def test_garbage_never_raises(properties: dict[bytes, bytes | None], addresses: list[str], port: int | None) -> None:
    for entries in (properties, txt(PC) | properties):
        advert = parse(entries, addresses, port)
        assert advert is None or (len(advert.id) == 32 and 0 < len(advert.name) <= 63 and advert.addresses)


@pytest.mark.parametrize("key", [b"v", b"mesh", b"id", b"name", b"memory"])
@pytest.mark.parametrize("value", [None, b"", b"-1", b"\xff", b"x" * 64, b" 1", "١".encode(), b"1\n"])
def test_a_value_that_is_missing_or_unsound_makes_no_advert(key: bytes, value: bytes | None) -> None:
    sound_as_a_name = key == b"name" and value == b"-1"
    if not sound_as_a_name and value != "١".encode():
        assert parse(txt(PC) | {key: value}, PC.addresses, PC.port) is None
    if key != b"name":
        assert parse(txt(PC) | {key: value}, PC.addresses, PC.port) is None


@pytest.mark.parametrize("value", [b"x" * 201, b"CPU,\x07", b",".join([b"CPU"] * 9)])
def test_unsound_devices_make_no_advert(value: bytes) -> None:
    assert parse(txt(PC) | {b"devices": value}, PC.addresses, PC.port) is None


@pytest.mark.parametrize("port", [None, 0, -1, 65536])
def test_without_a_port_there_is_no_advert(port: int | None) -> None:
    assert parse(txt(PC), PC.addresses, port) is None


def test_only_addresses_that_can_be_dialled_are_kept() -> None:
    strange = ["0.0.0.0", "::", "224.0.0.251", "ff02::fb", "fe80::1", "pc-7", "1.2.3", ""]
    assert parse(txt(PC), strange, PC.port) is None
    read = parse(txt(PC), [*strange, "FE80::1%eth0", "10.0.0.2", "10.0.0.2", "fd00:0::1"], PC.port)
    assert read is not None and read.addresses == ("fe80::1%eth0", "10.0.0.2", "fd00::1")
    many = parse(txt(PC), [f"10.0.0.{n}" for n in range(1, 255)], PC.port)
    assert many is not None and len(many.addresses) == 16
