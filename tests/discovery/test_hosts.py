"""Two hosts on one network, each in a network namespace of its own, find each other; needs root on Linux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tree import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root on Linux, and the ip command",
)

NODE = """
import asyncio, json, sys
from dataclasses import asdict
from meshinfer.discovery.mdns import Mdns
from meshinfer.discovery.records import Advert

async def main() -> None:
    say = lambda advert: print(json.dumps(asdict(advert)), flush=True)
    mdns = Mdns(Advert(1, "a" * 16, sys.argv[1] * 32, "pc", 7420), say, lambda node: None)
    task = asyncio.create_task(mdns.run())
    await asyncio.to_thread(sys.stdin.read)
    await mdns.close()
    await task

asyncio.run(main())
"""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def wait_until_up(host: str) -> None:
    """Wait for the cable: the kernel takes up to a second to see it."""
    deadline = time.monotonic() + 10
    while "state UP" not in ip("-n", host, "link", "show", "eth0"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts on one cable, with IPv6 link-local addresses, and each with Docker's bridge at the same address."""
    names = f"mi{os.getpid()}a", f"mi{os.getpid()}b"
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "link", "add", "docker0", "type", "bridge")
            ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", name, "link", "set", "eth0", "addrgenmode", "none")
            ip("-n", name, "addr", "add", f"fe80::{number}/64", "dev", "eth0", "nodad")
            for link in ("lo", "docker0", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        for name in names:
            wait_until_up(name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def find(hosts: tuple[str, str], addresses: int) -> list[dict[str, Any]]:
    """What each of the two nodes finds, when it knows that many addresses of the other."""
    nodes = [
        subprocess.Popen(
            ["timeout", "30", "ip", "netns", "exec", host, sys.executable, "-c", NODE, str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, host in enumerate(hosts, 1)
    ]
    try:
        found = []
        for node in nodes:
            assert node.stdout is not None
            adverts = map(json.loads, node.stdout)
            found.append(next(advert for advert in adverts if len(advert["addresses"]) == addresses))
        return found
    finally:
        for node in nodes:
            node.communicate(timeout=30)


def test_by_ipv4_the_address_on_the_cable_is_first_and_docker_is_not_there(hosts: tuple[str, str]) -> None:
    for number, host in enumerate(hosts, 1):
        ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
    first, second = find(hosts, addresses=2)
    assert first["id"] == "2" * 32 and first["addresses"][0] == "10.77.0.2"
    assert second["id"] == "1" * 32 and second["addresses"][0] == "10.77.0.1"
    assert first["addresses"][1].startswith("fe80::2%")


def test_by_ipv6_alone_the_address_says_through_which_interface(hosts: tuple[str, str]) -> None:
    first, second = find(hosts, addresses=1)
    for found, number in ((first, 2), (second, 1)):
        (address,) = found["addresses"]
        host, _, scope = address.partition("%")
        assert host == f"fe80::{number}" and scope
