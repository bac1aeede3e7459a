"""Several hosts on one machine: Linux network namespaces on a switch, with real addresses and multicast.

    with Netlab(hosts=3) as lab:
        lab.rate(lab.hosts[0], 100)
        lab.delay(5)
        server = lab.hosts[0].popen(["python", "-m", "http.server"])
        lab.hosts[1].run(["curl", f"http://{lab.hosts[0].address}:8000"], check=True)

Or `python tools/netlab.py --hosts 3 -- COMMAND...`, which runs a command in every host. Needs root on Linux. The switch
is in a namespace too, so the machine's own network is never touched.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import netlab_system as system
from tools.netlab_system import NetlabError

__all__ = ["Host", "Netlab", "NetlabError"]

MOST_HOSTS = 250
INTERRUPTED = 128 + signal.SIGINT
QUEUE_MS = 100
"""A rate limit holds frames for so long before it drops some."""
DELAY_PROGRAM = Path(__file__).with_name("netlab_delay.py")

SWITCH_SETUP = """
for scope in all default; do
    file=/proc/sys/net/ipv6/conf/$scope/disable_ipv6
    if [ -e $file ]; then echo 1 > $file; fi
done
ip link add br0 type bridge forward_delay 0 mcast_snooping 0
ip link set br0 up
"""
PORT_SETUP = """
ip link add {name} type veth peer name eth0 netns {namespace}
ip link set {name} master br0 up
"""
HOST_SETUP = """
ip link set lo up
for setting in disable_ipv6 accept_dad; do
    file=/proc/sys/net/ipv6/conf/eth0/$setting
    if [ -e $file ]; then echo 0 > $file; fi
done
ip address add {address}/24 broadcast + dev eth0
ip link set eth0 up
ip route add 224.0.0.0/4 dev eth0
"""
DELAY_SETUP = """
ip link add {name}-line type veth peer name {name}-far
ip link set {name}-line up
ip link set {name} nomaster
ip link set {name}-far master br0 up
"""


class Host:
    """One host of a lab; programs that are started here see its network only."""

    def __init__(self, lab: str, number: int) -> None:
        self.number = number
        self.name = f"h{number}"
        self.namespace = f"{lab}-{self.name}"
        self.address = f"10.77.0.{number}"
        self.address6 = ""
        """Link-local, so its users add `%eth0`; empty where the machine has no IPv6."""
        self.started: list[subprocess.Popen[Any]] = []

    def popen(self, command: Sequence[str], core: int | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a program here, on one core if that is given. The process is the program itself: signals reach it.

        What still runs when the lab ends is killed. The options are those of `subprocess.Popen`.
        """
        process = subprocess.Popen(self._inside(command, core), **options)
        self.started.append(process)
        return process

    def run(self, command: Sequence[str], core: int | None = None, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a program here to its end. The options are those of `subprocess.run`."""
        return subprocess.run(self._inside(command, core), **options)

    def _inside(self, command: Sequence[str], core: int | None) -> list[str]:
        pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
        return system.inside(self.namespace, [*pinned, *command])


class Netlab:
    """So many hosts on one switch while the `with` block runs."""

    def __init__(self, hosts: int = 3) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise NetlabError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}")
        self._name = system.new_lab_name() if sys.platform == "linux" else ""
        self._switch = f"{self._name}-switch"
        self.hosts = [Host(self._name, number) for number in range(1, hosts + 1)]
        self._delay_lines: subprocess.Popen[str] | None = None
        self._delayed: set[Host] = set()
        self._blocks: dict[tuple[Host, Host], bool] = {}
        self._without_multicast: set[Host] = set()
        self._firewall = ""

    def __enter__(self) -> Self:
        """Make the hosts. Raises NetlabError where that cannot work."""
        system.require_tools()
        system.sweep()
        try:
            system.make_namespace(self._switch)
            system.run_script(self._switch, SWITCH_SETUP)
            for host in self.hosts:
                system.make_namespace(host.namespace)
                system.run_script(self._switch, PORT_SETUP.format(name=host.name, namespace=host.namespace))
                system.run_script(host.namespace, HOST_SETUP.format(address=host.address))
            for host in self.hosts:
                host.address6 = system.link_local(host.namespace)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in the hosts and remove them."""
        for name in [*(host.namespace for host in self.hosts), self._switch]:
            with suppress(NetlabError):  # it was never made, or it cannot be removed and a later lab sweeps it
                system.remove_namespace(name)
        for process in [process for host in self.hosts for process in host.started]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(system.TIMEOUT_S)
        if self._delay_lines:
            self._delay_lines.communicate()
            self._delay_lines = None

    def link(self, host: Host, up: bool) -> None:
        """Plug the host's cable in or out."""
        system.call("ip", "-n", self._switch, "link", "set", host.name, "up" if up else "down")

    def rate(self, host: Host, mbit: float | None) -> None:
        """Limit what the host sends, and what it receives, to so many Mbit/s each; None lifts the limit."""
        limit = ["noqueue"]
        if mbit is not None:
            burst_bytes = max(16_384, int(mbit * 625))  # 5 ms: a smaller bucket cannot keep a high rate
            limit = f"tbf rate {int(mbit * 1e6)}bit burst {burst_bytes}b latency {QUEUE_MS}ms".split()
        for namespace, device in ((host.namespace, "eth0"), (self._switch, host.name)):
            system.call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)

    def delay(self, ms: float, host: Host | None = None) -> None:
        """Make the way between any two hosts take so long; or, with a host, the way over its cable.

        Between two hosts the delays of their cables add up: `delay(ms)` gives half of it to every cable. So a round
        trip takes twice `ms` between any two hosts, and also between the one host that has a delay and any other.
        """
        for each in [host] if host else self.hosts:
            self._delay_cable(each, ms if host else ms / 2)

    def _delay_cable(self, host: Host, ms: float) -> None:
        if host not in self._delayed:
            system.run_script(self._switch, DELAY_SETUP.format(name=host.name))
            self._delayed.add(host)
        if not self._delay_lines:
            command = system.inside(self._switch, [sys.executable, "-IS", str(DELAY_PROGRAM)])
            # In a session of its own: Ctrl-C is for the programs in the hosts, not for the network between them.
            self._delay_lines = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert self._delay_lines.stdin and self._delay_lines.stdout
        self._delay_lines.stdin.write(f"{host.name} {host.name}-line {ms}\n")
        self._delay_lines.stdin.flush()
        if (answer := self._delay_lines.stdout.readline().strip()) != "ok":
            raise NetlabError(f"{host.name} cannot be delayed: {answer or 'the program that does it has ended'}")

    def block(self, source: Host, target: Host, connections_only: bool = False) -> None:
        """Drop what comes from one host to another; with `connections_only` just its attempts to open TCP connections.

        The latter is the usual firewall: the target reaches the source, and what is connected stays so.
        """
        self._blocks[source, target] = connections_only
        self._filter(target)

    def unblock(self, source: Host, target: Host) -> None:
        """Take a block back."""
        self._blocks.pop((source, target), None)
        self._filter(target)

    def multicast(self, on: bool, host: Host | None = None) -> None:
        """Let multicast pass or not: everywhere, or to and from one host. Sending succeeds, but nothing arrives.

        What a host sends to itself arrives, and so does what IPv6 needs to find its neighbours.
        """
        change = {host} if host else set(self.hosts)
        self._without_multicast = self._without_multicast - change if on else self._without_multicast | change
        for each in self.hosts:
            self._filter(each)

    def _filter(self, host: Host) -> None:
        """Give a host the firewall that follows from what was asked for; its filter table is the lab's alone."""
        if not self._firewall:
            self._firewall = system.working_firewall(host.namespace)
        blocks = {source: only for (source, target), only in self._blocks.items() if target is host}
        system.set_firewall(host.namespace, self._firewall, dropped(host, blocks, self._without_multicast, 4))
        if host.address6:
            rules = dropped(host, blocks, self._without_multicast, 6)
            system.set_firewall(host.namespace, self._firewall.replace("iptables", "ip6tables"), rules)


def dropped(host: Host, blocks: dict[Host, bool], without_multicast: set[Host], version: int) -> list[str]:
    """What of IPv4 or IPv6 a host drops: what comes from `blocks` (where true, only connections), and multicast."""

    def address(of: Host) -> str:
        return of.address if version == 4 else of.address6

    groups = "-d 224.0.0.0/4" if version == 4 else "-d ff00::/8 ! -p ipv6-icmp"
    rules = [f"-s {address(source)}{' -p tcp --syn' if only else ''}" for source, only in blocks.items()]
    if host in without_multicast:
        return [*rules, f"! -s {address(host)} {groups}"]
    return rules + [f"-s {address(source)} {groups}" for source in without_multicast]


def run_everywhere(lab: Netlab, command: Sequence[str]) -> int:
    """Run a command in every host, `{n}` replaced by its number, and print what it says; the first exit code but 0."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = {
        # In sessions of their own, so that Ctrl-C reaches each of them once, through this program.
        host: host.popen([word.replace("{n}", str(host.number)) for word in command], start_new_session=True, **pipes)
        for host in lab.hosts
    }
    printing = threading.Lock()

    def show(host: Host, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                with printing:
                    sys.stdout.write(f"{host.name} | {line.decode(errors='replace').rstrip()}\n")
                    sys.stdout.flush()

    printers = [threading.Thread(target=show, args=each, daemon=True) for each in processes.items()]
    try:
        for printer in printers:
            printer.start()
        codes = [process.wait() for process in processes.values()]
    except KeyboardInterrupt:
        codes = [INTERRUPTED]
        for process in processes.values():
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + system.TIMEOUT_S
        for process in processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    lab.close()
    for printer in printers:
        printer.join()
    return next((code for code in codes if code), 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="netlab", description="Run a command in every host of a small network.")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", type=float, metavar="MBIT", help="what every host sends and receives at most")
    parser.add_argument("--delay", type=float, metavar="MS", help="how long the way between any two hosts takes")
    parser.add_argument("command", nargs="+", help="after --; {n} is replaced by the host's number")
    options = parser.parse_args(arguments)
    try:
        with Netlab(options.hosts) as lab:
            for host in lab.hosts:
                lab.rate(host, options.rate)
            if options.delay:
                lab.delay(options.delay)
            return run_everywhere(lab, options.command)
    except NetlabError as error:
        sys.exit(f"netlab: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
