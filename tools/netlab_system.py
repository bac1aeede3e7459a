"""What `netlab.py` asks of Linux: namespaces, programs in them, firewalls."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "iptables-restore": "iptables", "taskset": "util-linux"}
"""The tools that a lab uses, and what to install where one is missing."""
FIREWALLS = ("iptables", "iptables-legacy", "iptables-nft")
"""The default one is tried first; a kernel may know only one of the other two."""
TIMEOUT_S = 5.0
"""What the kernel and killed programs do takes less."""

_labs = itertools.count(1)
_NAMESPACE = re.compile(r"^(mi-(\d+)-(\d+)-\d+-\w+)", re.MULTILINE)


class NetlabError(Exception):
    """A lab cannot be made or changed; says in one line what is missing and what to do."""


def require_tools() -> None:
    """Raises NetlabError where this system cannot have a lab, or something is missing for one."""
    if sys.platform != "linux":
        raise NetlabError("a lab needs Linux: run it on a Linux machine or in WSL 2")
    if os.geteuid() != 0:
        raise NetlabError("a lab needs root: run it as root, or with sudo")
    for tool, package in PACKAGES.items():
        if shutil.which(tool) is None:
            raise NetlabError(f"a lab needs the program '{tool}': install it with: apt install {package}")


def new_lab_name() -> str:
    """A name for the namespaces of a lab: says which process holds it, and when that began, as numbers of processes
    are used again.
    """
    return f"mi-{os.getpid()}-{began(os.getpid())}-{next(_labs)}"


def sweep() -> None:
    """Remove the namespaces of labs whose process is dead, with everything that runs in them."""
    for name, pid, began_then in _NAMESPACE.findall(call("ip", "netns", "list")):
        if began(int(pid)) != int(began_then):
            with suppress(NetlabError):  # another lab was faster
                remove_namespace(name)


def began(pid: int) -> int:
    """When a process was started, in ticks since the machine was; 0 if it is dead."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(fields[18])


def make_namespace(name: str) -> None:
    """Raises NetlabError where the system forbids it."""
    try:
        call("ip", "netns", "add", name)
    except NetlabError as error:
        raise NetlabError(f"{error}; is this a container? Start it with --privileged") from None


def remove_namespace(name: str) -> None:
    """Kill everything in a namespace and remove it. Raises NetlabError if there is none."""
    deadline = time.monotonic() + TIMEOUT_S
    while pids := call("ip", "netns", "pids", name).split():
        if time.monotonic() > deadline:
            raise NetlabError(f"processes {', '.join(pids)} in {name} do not end")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.005)
    call("ip", "netns", "delete", name)


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """The command that runs another one in a namespace; it becomes that command, so there is one process."""
    return ["ip", "netns", "exec", namespace, *command]


def run_script(namespace: str, script: str) -> None:
    """Run shell commands in a namespace. Raises NetlabError if one fails."""
    call(*inside(namespace, ["sh", "-ec", script]))


def link_local(namespace: str) -> str:
    """The link-local address of a namespace's `eth0`, empty where the machine has no IPv6."""
    if not Path("/proc/net/if_inet6").exists():
        return ""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found = json.loads(call("ip", "-n", namespace, "-j", "-6", "address", "show", "dev", "eth0") or "[]")
        for address in (address for device in found for address in device.get("addr_info", [])):
            if address["scope"] == "link" and not address.get("tentative"):
                return str(address["local"])
        time.sleep(0.01)
    raise NetlabError(f"{namespace} got no IPv6 address in {TIMEOUT_S:.0f} s")


def working_firewall(namespace: str) -> str:
    """The first iptables that this kernel can do. Raises NetlabError if there is none."""
    problems = []
    for firewall in (firewall for firewall in FIREWALLS if shutil.which(f"{firewall}-restore")):
        try:
            set_firewall(namespace, firewall, [])
        except NetlabError as error:
            problems.append(str(error))
        else:
            return firewall
    raise NetlabError(f"no iptables works with this kernel: {'; '.join(problems)}")


def set_firewall(namespace: str, firewall: str, dropped: list[str]) -> None:
    """Drop what comes in and fits one of these rules; nothing else is dropped."""
    lines = ["*filter", ":INPUT ACCEPT", *(f"-A INPUT {rule} -j DROP" for rule in dropped), "COMMIT", ""]
    call(*inside(namespace, [f"{firewall}-restore", "--wait", "5"]), stdin="\n".join(lines))


def call(*command: str, stdin: str = "") -> str:
    """What a program prints. Raises NetlabError with its complaint if it fails."""
    result = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if result.returncode:
        complaint = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise NetlabError(f"{' '.join(command[:4])}: {complaint}")
    return result.stdout
