"""The lab keeps its promises: what reaches whom, how fast, and that nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netlab.conftest import MakeLab
from tests.netlab.sockets import answers, connected, connects, hears, round_trip_ms, transfer, until
from tests.signals import hear_control_c
from tests.tree import ROOT
from tools import netlab_system
from tools.netlab import Netlab, NetlabError

pytestmark = pytest.mark.netlab

GROUPS = ["239.77.0.1", "ff02::4d49"]
NETLAB = [sys.executable, str(ROOT / "tools" / "netlab.py")]
SLEEP = [sys.executable, "-ISc", "import time; print('ready', flush=True); time.sleep(1000)"]


def namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("mi-*")}


def alive(pid: int) -> bool:
    return netlab_system.began(pid) > 0


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_hosts_reach_each_other(make_lab: MakeLab, ipv6: bool) -> None:
    one, two, three = make_lab(3).hosts
    if ipv6 and not one.address6:
        pytest.skip("this machine has no IPv6")
    assert [host.address for host in (one, two, three)] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert all(connects(client, server, ipv6) for client, server in [(one, two), (two, one), (three, one)])


def test_labs_are_apart(make_lab: MakeLab) -> None:
    here, there = make_lab(1), make_lab(2)
    assert not connects(here.hosts[0], there.hosts[1])


@pytest.mark.parametrize("group", GROUPS)
def test_multicast_crosses_until_it_is_off(make_lab: MakeLab, group: str) -> None:
    lab = make_lab(3)
    one, two, three = lab.hosts
    if ":" in group and not one.address6:
        pytest.skip("this machine has no IPv6")
    assert hears(two, one, group) and hears(one, three, group)
    lab.multicast(False, two)
    assert not hears(two, one, group) and not hears(one, two, group)
    assert hears(one, three, group) and hears(two, two, group)
    lab.multicast(False)
    assert not hears(one, three, group)
    lab.multicast(True)
    assert hears(two, one, group) and hears(one, two, group) and hears(one, three, group)


def test_a_rate_limits_both_directions(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one, two = lab.hosts
    data = random.Random(1).randbytes(1_500_000)
    lab.rate(one, 20)
    for source, target in [(one, two), (two, one)]:
        received, taken_s = transfer(source, target, data)
        assert received == data
        assert 0.9 < taken_s / (len(data) * 8 / 20e6) < 1.5
    lab.rate(one, None)
    assert transfer(one, two, data)[1] < 0.3


def test_a_delay_holds_between_any_two(make_lab: MakeLab) -> None:
    lab = make_lab(3)
    one, two, three = lab.hosts
    assert round_trip_ms(one, two) < 2
    lab.delay(10)
    assert 20 <= round_trip_ms(one, two) < 22.5
    assert 20 <= round_trip_ms(three, one) < 22.5
    lab.delay(2)
    assert 4 <= round_trip_ms(one, two) < 6.5
    assert hears(two, one, GROUPS[0])


def test_a_delay_of_one_host_leaves_the_others_alone(make_lab: MakeLab) -> None:
    lab = make_lab(3)
    one, two, three = lab.hosts
    lab.delay(10, two)
    assert 20 <= round_trip_ms(one, two) < 22.5
    assert 20 <= round_trip_ms(two, three) < 22.5
    assert round_trip_ms(one, three) < 2


def test_a_delay_leaves_what_passes_whole_and_fast(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one, two = lab.hosts
    data = random.Random(2).randbytes(20_000_000)
    lab.delay(1)
    received, taken_s = transfer(one, two, data)
    assert received == data
    assert len(data) * 8 / taken_s > 200e6
    lab.rate(two, 100)
    received, taken_s = transfer(one, two, data[:5_000_000])
    assert received == data[:5_000_000]
    assert 0.9 < taken_s / 0.4 < 1.5


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_a_block_is_one_way(make_lab: MakeLab, ipv6: bool) -> None:
    lab = make_lab(3)
    one, two, three = lab.hosts
    if ipv6 and not one.address6:
        pytest.skip("this machine has no IPv6")
    assert connects(one, two, ipv6)
    lab.block(one, two)
    assert not connects(one, two, ipv6)
    assert connects(one, three, ipv6) and connects(three, two, ipv6)
    assert hears(one, two, GROUPS[ipv6])
    lab.unblock(one, two)
    assert connects(one, two, ipv6)


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_a_block_of_connections_spares_what_is_connected(make_lab: MakeLab, ipv6: bool) -> None:
    lab = make_lab(2)
    one, two = lab.hosts
    if ipv6 and not one.address6:
        pytest.skip("this machine has no IPv6")
    with connected(one, two, ipv6) as ends:
        lab.block(one, two, connections_only=True)
        assert not connects(one, two, ipv6)
        assert connects(two, one, ipv6)
        assert answers(*ends)


@pytest.mark.parametrize("delay_ms", [0, 1])
def test_a_cable_can_be_pulled(make_lab: MakeLab, delay_ms: float) -> None:
    lab = make_lab(3)
    one, two, three = lab.hosts
    if delay_ms:
        lab.delay(delay_ms)
    with connected(one, two) as ends:
        lab.link(two, up=False)
        assert not connects(one, two) and not connects(two, one)
        assert connects(one, three)
        lab.link(two, up=True)
        assert until(lambda: connects(one, two)) and until(lambda: connects(two, one))
        assert answers(*ends)


# --- programs --------------------------------------------------------------------------------------------------------


def test_signals_reach_the_program_itself(make_lab: MakeLab) -> None:
    host = make_lab(1).hosts[0]
    with host.popen(SLEEP, core=0, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        assert Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[:-1] == SLEEP
        assert os.sched_getaffinity(process.pid) == {0}
        process.terminate()
    assert process.returncode == -signal.SIGTERM


def test_a_program_sees_its_host_alone(make_lab: MakeLab) -> None:
    host = make_lab(2).hosts[1]
    program = "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"
    result = host.run([sys.executable, "-ISc", program], capture_output=True, text=True)
    assert result.stdout == "eth0 lo\n"


@pytest.mark.usefixtures("make_lab")
def test_nothing_is_left_after_an_exception() -> None:
    before = {path.name for path in Path("/sys/class/net").iterdir()}
    with pytest.raises(RuntimeError, match="on purpose"), Netlab(2) as lab:
        lab.delay(1)
        process = lab.hosts[1].popen(SLEEP, stdout=subprocess.DEVNULL)
        assert {path.name for path in Path("/sys/class/net").iterdir()} == before
        made = {name for name in namespaces() if name.startswith(lab.hosts[0].namespace.removesuffix("h1"))}
        assert len(made) == 3
        raise RuntimeError("on purpose")
    assert process.returncode == -signal.SIGKILL
    assert not made & namespaces()


HOLDER = """
import subprocess, time
from tools.netlab import Netlab
with Netlab(2) as lab:
    lab.delay(1)
    process = lab.hosts[1].popen(["sleep", "1000"])
    print(process.pid, *(host.namespace for host in lab.hosts), flush=True)
    time.sleep(1000)
"""


def test_what_a_killed_lab_left_is_swept(make_lab: MakeLab) -> None:
    living = make_lab(1)
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout
        pid, *names = holder.stdout.readline().split()
        assert len(names) == 2
        make_lab(1)
        assert set(names) <= namespaces()
        holder.kill()
    assert alive(int(pid)) and set(names) <= namespaces()
    make_lab(1)
    assert until(lambda: not alive(int(pid)))
    assert not set(names) & namespaces()
    assert living.hosts[0].namespace in namespaces()


# --- what is said ----------------------------------------------------------------------------------------------------

AS_NOBODY = """
import os, sys
from tools.netlab import main
os.setuid(65534)
sys.exit(main(["--hosts", "1", "--", "true"]))
"""


@pytest.mark.usefixtures("make_lab")
def test_without_root_it_says_so() -> None:
    result = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, cwd=ROOT)
    assert result.stderr == "netlab: a lab needs root: run it as root, or with sudo\n"
    assert result.returncode == 1


@pytest.mark.parametrize(("tool", "package"), netlab_system.PACKAGES.items())
def test_without_a_tool_it_says_which(
    make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch, tool: str, package: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == tool else f"/usr/sbin/{name}")
    with pytest.raises(NetlabError, match=f"needs the program '{tool}'.*apt install {package}"):
        make_lab(1)


def test_a_lab_has_at_least_one_host() -> None:
    with pytest.raises(NetlabError, match="not 0"):
        Netlab(0)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("make_lab")
def test_a_command_runs_in_every_host() -> None:
    program = "import os, sys; print('host {n}', *sorted(os.listdir('/sys/class/net'))); sys.exit({n} - 1)"
    command = [*NETLAB, "--hosts", "2", "--rate", "100", "--delay", "1", "--", sys.executable, "-ISc", program]
    result = subprocess.run(command, capture_output=True, text=True)
    assert sorted(result.stdout.splitlines()) == ["h1 | host 1 eth0 lo", "h2 | host 2 eth0 lo"]
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.usefixtures("make_lab")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_control_c_ends_all(number: int) -> None:
    before = namespaces()
    command = [*NETLAB, "--hosts", "2", "--", "sh", "-c", "sleep 1000 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_control_c) as process:
        assert process.stdout
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(number)
    assert process.returncode == 130
    assert until(lambda: not any(alive(pid) for pid in pids))
    assert namespaces() <= before
