"""Hosts to run agents on: network namespaces with a core each, by the lab of a checkout of meshinfer."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from meshinfer.errors import InputError

CHECKOUT = Path(__file__).parent.parent.parent


class Host(Protocol):
    """A host of the lab; see `tools/netlab.py`."""

    name: str

    def popen(self, command: Sequence[str], core: int | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program on the host."""

    def run(self, command: Sequence[str], core: int | None = None, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a program on the host to its end."""


@contextmanager
def lab_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """So many hosts. Raises InputError where this machine cannot make them, saying what is missing."""
    if not (CHECKOUT / "tools" / "netlab.py").exists():
        raise InputError("bench ring runs tools/netlab.py: install meshinfer from a checkout, with pip install -e .")
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    netlab = importlib.import_module("tools.netlab")
    try:
        lab = netlab.Netlab(hosts=count)
        entered = lab.__enter__()
    except netlab.NetlabError as error:
        raise InputError(f"bench ring cannot make hosts: {error}") from error
    try:
        yield tuple(entered.hosts)
    finally:
        lab.__exit__(None, None, None)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
