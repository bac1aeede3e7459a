"""A mesh of several agents on this machine: processes with homes of their own that hear each other over loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshinfer.agent.runtime import NoAgentError, read_runtime
from meshinfer.cli.client import Client
from meshinfer.cli.processes import alive, wait_until_gone
from meshinfer.config import Folders
from meshinfer.errors import InputError, MeshinferError, NotReadyError

POLL_S = 0.2
START_S, CLOSE_S = 60.0, 20.0
LAST_LINES = 12
LOOPBACK = "127.0.0.1"
_LOG = "agent.log"

Say = Callable[[str], None]


class AgentDiedError(MeshinferError):
    """An agent of a local mesh ended before it should; `log` has its last lines."""

    def __init__(self, name: str, code: int, path: Path) -> None:
        self.log = _last_lines(path)
        super().__init__(f"{name} ended with exit code {code}: see {path}")


@dataclass(slots=True)
class LocalAgent:
    """One process of a local mesh."""

    name: str
    folders: Folders
    process: subprocess.Popen[bytes]
    _client: Client | None = None

    @property
    def client(self) -> Client:
        """Its API. Raises NoAgentError until it has started."""
        if self._client is None:
            if read_runtime(self.folders).pid != self.process.pid:
                raise NoAgentError(f"{self.name} has not started yet")
            self._client = Client.of(self.folders)
        return self._client

    @property
    def death(self) -> AgentDiedError | None:
        """How it ended, if it did."""
        code = self.process.poll()
        return None if code is None else AgentDiedError(self.name, code, self.folders.home / _LOG)


class LocalMesh:
    """Agents pc-1, pc-2, ... in folders below `root`. `close` ends them.

    Unless it is to be `lasting`, they end as well when this process does, however that ends.
    """

    def __init__(self, root: Path, options: Sequence[str], lasting: bool = False) -> None:
        """`options` of `meshinfer up` for each agent."""
        self.root, self.options, self.lasting = root, options, lasting
        self.agents: list[LocalAgent] = []

    def start(self, count: int, say: Say) -> None:
        """Start agents, and wait until all are linked. Raises AgentDiedError, NotReadyError."""
        first = self._start(1, [])
        say("starting pc-1")
        self._until(lambda: self._answers(first), "pc-1 does not answer")
        status = first.client.status()
        others = ["--join", status["join_code"], "--peer", f"{LOOPBACK}:{status['port']}"]
        for number in range(2, count + 1):
            say(f"starting pc-{number}")
            self._start(number, others)

        def all_linked() -> bool:
            there = all(self._answers(agent) for agent in self.agents)
            return there and all(len(status["nodes"]) == count for status in self.statuses())

        say(f"waiting for {count} nodes to find each other")
        self._until(all_linked, "the nodes do not find each other")

    def statuses(self) -> list[dict[str, Any]]:
        """Of every agent. Raises InputError where one does not answer."""
        return [agent.client.status() for agent in self.agents]

    def death(self, within_s: float = 0.0) -> AgentDiedError | None:
        """The first agent that has ended, or ends in so many seconds."""
        deadline = time.monotonic() + within_s
        while True:
            for agent in self.agents:
                if died := agent.death:
                    return died
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    def close(self) -> None:
        """End all agents, those that do not end by themselves after `CLOSE_S` by force."""
        for agent in self.agents:
            if agent.process.stdin is not None:
                agent.process.stdin.close()
            else:
                with suppress(MeshinferError):
                    agent.client.down()
        deadline = time.monotonic() + CLOSE_S
        for agent in self.agents:
            try:
                agent.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()

    def _start(self, number: int, options: Sequence[str]) -> LocalAgent:
        folders = home_of(self.root, number)
        words = [sys.executable, "-m", "meshinfer", "--home", str(folders.home), "up", "--name", f"pc-{number}"]
        words += ["--no-mdns", "--interface", LOOPBACK, "--port", "0", "--api", f"{LOOPBACK}:0"]
        words += [*self.options, *options, *([] if self.lasting else ["--until-eof"])]
        folders.home.mkdir(parents=True, exist_ok=True)
        with (folders.home / _LOG).open("wb") as log:
            stdin = subprocess.DEVNULL if self.lasting else subprocess.PIPE
            process = subprocess.Popen(words, stdin=stdin, stdout=log, stderr=log, **_apart(self.lasting))
        agent = LocalAgent(f"pc-{number}", folders, process)
        self.agents.append(agent)
        return agent

    def _answers(self, agent: LocalAgent) -> bool:
        with suppress(InputError):
            agent.client.status()
            return True
        return False

    def _until(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if died := self.death():
                raise died
            if time.monotonic() > deadline:
                raise NotReadyError(f"{complaint} after {START_S:.0f} s: see {self.root / 'pc-1' / _LOG}")
            time.sleep(POLL_S)


def home_of(root: Path, number: int) -> Folders:
    """The home of an agent of a local mesh."""
    return Folders(root / f"pc-{number}")


def homes(root: Path) -> list[Folders]:
    """The homes of all agents that a local mesh ever had."""
    return [Folders(path) for path in sorted(root.glob("pc-*")) if path.is_dir()]


def running(root: Path) -> list[Folders]:
    """The homes of the agents of a local mesh that run now."""
    found = []
    for folders in homes(root):
        with suppress(NoAgentError):
            if alive(read_runtime(folders).pid):
                found.append(folders)
    return found


def stop_all(root: Path) -> int:
    """Stop the agents of a local mesh that outlived who started them; how many there were."""
    there = [(folders, read_runtime(folders)) for folders in running(root)]
    for folders, _ in there:
        Client.of(folders).down()
    for folders, runtime in there:
        if not wait_until_gone(folders, runtime.pid, CLOSE_S):
            raise MeshinferError(f"{runtime.name} (process {runtime.pid}) is still there after {CLOSE_S:.0f} s")
    return len(there)


def forget_mesh(root: Path) -> None:
    """What the mesh chose last is forgotten; the files that its nodes have stay."""
    for folders in homes(root):
        shutil.rmtree(folders.mesh, ignore_errors=True)


def _last_lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return []


def _apart(lasting: bool) -> dict[str, Any]:
    """Options of a child that Ctrl-C in this terminal does not reach, nor its end if it is `lasting`."""
    if os.name != "nt":
        return {"start_new_session": True}
    flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    flags |= getattr(subprocess, "DETACHED_PROCESS" if lasting else "CREATE_NO_WINDOW", 0)
    return {"creationflags": flags}
