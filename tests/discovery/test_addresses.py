"""Which interfaces are used, and which address of a node is tried first."""

from __future__ import annotations

from ipaddress import ip_interface

import pytest

from meshinfer.discovery.addresses import Interface, choose, rank, sources
from meshinfer.discovery.interfaces import read_interfaces
from meshinfer.errors import InputError


def interface(name: str, *networks: str, up: bool = True, tunnel: bool = False) -> Interface:
    return Interface(name, tuple(map(ip_interface, networks)), up, loopback=name == "lo", tunnel=tunnel)


LO = interface("lo", "127.0.0.1/8", "::1/128")
LAN = interface("eth0", "fe80::2/64", "192.168.1.20/24", "fd00:1::20/64")
WIFI = interface("wlan0", "10.1.0.20/16")
DOCKER = interface("docker0", "172.17.0.1/16", "fe80::42/64")
VPN = interface("nordlynx", "10.5.0.2/16", tunnel=True)
ALL = (LO, DOCKER, VPN, LAN, WIFI)


def names(interfaces: tuple[Interface, ...]) -> list[str]:
    return [found.name for found in interfaces]


def test_containers_vpns_and_loopback_are_left_out() -> None:
    assert names(choose(ALL)) == ["eth0", "wlan0"]


@pytest.mark.parametrize(
    "name",
    ["veth12ab", "br-0af3", "virbr0", "vmnet8", "tun0", "tap0", "wg0", "utun3", "tailscale0", "bridge100"]
    + [
        "vEthernet (WSL)",
        "vEthernet (Default Switch)",
        "VirtualBox Host-Only Network",
        "VMware Network Adapter VMnet1",
    ],
)
def test_virtual_interfaces_are_known_by_name(name: str) -> None:
    assert choose((LO, interface(name, "10.9.0.1/24"))) == (LO,)


@pytest.mark.parametrize("name", ["en0", "eno1", "enp3s0", "wlp2s0", "br0", "bond0", "Ethernet 2", "Wi-Fi", "Wireless"])
def test_real_interfaces_are_not_taken_for_virtual_ones(name: str) -> None:
    assert names(choose((LO, interface(name, "10.9.0.1/24")))) == [name]


def test_loopback_is_used_where_there_is_no_other() -> None:
    down = interface("eth0", "192.168.1.20/24", up=False)
    assert choose((LO, down, interface("wlan0"), DOCKER)) == (LO,)
    assert choose(()) == ()


@pytest.mark.parametrize("wanted", ["docker0", "172.17.0.1", "fe80::42", "fe80::42%docker0"])
def test_an_interface_that_is_named_is_used_whatever_it_is(wanted: str) -> None:
    assert choose(ALL, [wanted]) == (DOCKER,)


def test_several_can_be_named() -> None:
    assert names(choose(ALL, ["wlan0", "127.0.0.1"])) == ["lo", "wlan0"]


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"no network interface 'eth9' \(there are: lo 127.0.0.1, .*eth0 192.168.1.20"):
        choose(ALL, ["eth0", "eth9"])
    with pytest.raises(InputError, match="there are: none"):
        choose((), ["eth9"])


def test_multicast_goes_out_by_ipv4_and_by_one_ipv6_address_per_interface() -> None:
    v6 = interface("en1", "fd00:2::1/64")
    assert sources((LAN, WIFI, v6, LO), dual_stack=True) == [
        *("192.168.1.20", "10.1.0.20", "127.0.0.1"),
        *("fe80::2", "fd00:2::1"),
    ]
    assert sources((LAN, v6), dual_stack=False) == ["192.168.1.20"]
    assert sources((v6,), dual_stack=False) == ["fd00:2::1"]


def test_addresses_in_own_networks_come_first() -> None:
    found = rank(["8.8.4.4", "10.99.0.1", "fe80::9%2", "fd00:1::9", "192.168.1.9", "172.17.0.9"], ALL)
    assert found == ("192.168.1.9", "fd00:1::9", "fe80::9%2", "10.99.0.1", "8.8.4.4", "172.17.0.9")


def test_a_container_network_that_this_machine_has_too_is_last_unless_it_is_used() -> None:
    assert rank(["172.17.0.1", "8.8.4.4"], ALL) == ("8.8.4.4", "172.17.0.1")
    assert rank(["172.17.0.9", "8.8.4.4"], ALL, [DOCKER]) == ("172.17.0.9", "8.8.4.4")
    assert rank(["8.8.4.4", "172.17.0.9"], [LO, LAN]) == ("172.17.0.9", "8.8.4.4")


def test_loopback_is_for_nodes_on_this_machine() -> None:
    assert rank(["192.168.1.9", "127.0.0.1", "::1"], ALL) == ("192.168.1.9",)
    assert rank(["192.168.1.20", "127.0.0.1"], ALL) == ("127.0.0.1", "192.168.1.20")
    assert rank(["172.17.0.1", "127.0.0.1"], ALL) == ("172.17.0.1",)  # every machine with Docker has this address
    assert rank(["127.0.0.1", "::1"], [LO]) == ("127.0.0.1", "::1")
    assert rank([], ALL) == ()


def test_the_interfaces_of_this_machine_are_read() -> None:
    found = read_interfaces()
    assert any(interface.loopback and "127.0.0.1" in interface.addresses for interface in found)
    assert choose(found)
