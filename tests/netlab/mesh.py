"""Meshes of real agents in the hosts of a lab: each with a home of its own, asked through its API as a user would."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from meshinfer.agent.runtime import read_runtime
from meshinfer.cli.client import Answer, Client
from meshinfer.config import Folders
from meshinfer.errors import MeshinferError, NotReadyError
from meshinfer.negotiation.problem import model_spec
from meshinfer.planning.cost import stage_bytes
from meshinfer.planning.specs import Demand
from meshinfer.security.identity import forget_node, load_identity
from meshinfer.shards.manifest import FileRef, Manifest
from meshinfer.shards.store import Store
from tests.cli.calls import command
from tests.netlab.sockets import inside
from tools.netlab import Host, Netlab

KEPT_BACK_BYTES = 64 << 20
"""What planning keeps back of a node's memory."""
LOG_LINES = 80
READY_S = 60.0
POLL_S = 0.05
PATIENCE_S = 10.0
STOP_S = 5.0

Status = dict[str, Any]


T = TypeVar("T")


def until(what: str, look: Callable[[], T], timeout_s: float = 15.0) -> T:
    """Look until there is something true; its value. Fails with what was seen last."""
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; at the end: {seen!r}")
        time.sleep(POLL_S)
    return seen


class Node:
    """One agent, its home and its log; `host` is where it runs."""

    def __init__(self, host: Host, name: str, folders: Folders) -> None:
        self.host, self.name, self.folders = host, name, folders
        self.log_path = folders.home.with_name(f"{name}.log")
        self.process: subprocess.Popen[bytes] | None = None
        self.options: tuple[str, ...] = ()
        self.began_at = 0.0
        self._log_start = 0

    # --- its process --------------------------------------------------------------------------------------------

    def start(self, *options: str) -> Self:
        """Run `meshinfer up`; without options with those that it had before."""
        assert self.process is None or self.process.poll() is not None
        self.options = options or self.options
        self._log_start = len(self.log())
        words = command(self.folders, "up", "--name", self.name, "--threads", "1", *self.options)
        with self.log_path.open("ab") as log:
            self.began_at = time.monotonic()
            self.process = self.host.popen(
                words, core=(self.host.number - 1) % (os.cpu_count() or 1), stdin=subprocess.DEVNULL, stderr=log
            )
        return self

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send its process a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_S)

    def stop(self, timeout_s: float = 3 * STOP_S) -> tuple[int, float]:
        """Ask it to stop; its exit code and the seconds that took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.terminate()
        return self.process.wait(timeout_s), time.monotonic() - began

    def close(self) -> None:
        """End it, whatever it takes."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(2 * STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_S)

    def meshinfer(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command with this home, in the same host."""
        done = self.host.run(command(self.folders, *arguments), capture_output=True, text=True, timeout=READY_S)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, done.stderr)

    # --- what it says -------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """What it says of the mesh. Raises MeshinferError while it does not answer."""
        with inside(self.host):
            return Client.of(self.folders).status()

    def look(self) -> Status:
        """Its status, empty while it does not answer."""
        try:
            return self.status()
        except MeshinferError:
            return {}

    def stage(self) -> str:
        """What it says that the mesh is doing."""
        return str(self.look().get("stage", ""))

    def use(self, model: str) -> None:
        """Choose the model of the mesh here."""
        with inside(self.host):
            Client.of(self.folders).use(model)

    def http(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One plain request to its API, as a program of the user makes it."""
        with inside(self.host):
            return httpx.request(
                method, read_runtime(self.folders).api + path, trust_env=False, timeout=READY_S, **options
            )

    @contextmanager
    def stream(self, prompt: str, **options: Any) -> Iterator[Answer]:
        """An answer as it comes, over a connection of its own; the likeliest tokens unless `options` say otherwise."""
        runtime = read_runtime(self.folders)
        with inside(self.host):
            chat = Client(runtime.api, runtime.token).chat(
                [{"role": "user", "content": prompt}], {"temperature": 0} | options
            )
            answer = chat.__enter__()
        try:
            yield answer
        finally:
            chat.__exit__(None, None, None)

    def ask(self, prompt: str, **options: Any) -> str:
        """A whole answer; like a patient program it asks again while the mesh plans."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.stream(prompt, **options) as answer:
                    return "".join(answer)
            except NotReadyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace") if self.log_path.exists() else ""

    def logged_at(self, text: str) -> float:
        """When the first line with a text was written since the last start, in seconds since the epoch."""
        for line in self.log()[self._log_start :].splitlines():
            if text in line and (stamp := re.match(r"time=(\S+)", line)):
                return datetime.fromisoformat(stamp[1]).timestamp()
        raise AssertionError(f"{self.name} has not logged {text!r}")

    def ranges(self) -> set[tuple[int, int]]:
        """The first and last shards of the stages that it had since its start."""
        plans = re.findall(r"plan \d+ holds: ([^\"\n]*)", self.log()[self._log_start :])
        stages = [re.findall(rf"{self.name} (\d+)-(\d+)", plan) for plan in plans]
        return {(int(first), int(last)) for plan in stages for first, last in plan}

    # --- what it has --------------------------------------------------------------------------------------------

    def blobs(self) -> dict[str, int]:
        """The files of its store, with their sizes."""
        found = {}
        for path in self.folders.blobs.glob("*"):
            with suppress(FileNotFoundError):
                found[path.name] = path.stat().st_size
        return found


class Mesh:
    """Nodes of one mesh; number n runs in host n, and node 1 has the smallest id: it leads while it is there."""

    def __init__(self, lab: Netlab, folder: Path, model_home: Folders | None = None) -> None:
        """`model_home` is what node 1 starts with; the others start with nothing."""
        self.lab, self.folder = lab, folder
        self.nodes: list[Node] = []
        self.code = ""
        self._model_home = model_home

    def __enter__(self) -> Self:
        MESHES.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all agents. Their logs stay for the report of a test that fails because of it."""
        for node in self.nodes:
            if node.running:
                node.signal(signal.SIGCONT)
                node.signal(signal.SIGTERM)
        for node in self.nodes:
            node.close()
        MESHES.remove(self)

    def node(self, number: int | None = None, home: Path | None = None) -> Node:
        """A node that does not run yet, in host `number`, else in the next one."""
        number = number or len(self.nodes) + 1
        folders = Folders(home or self.folder / f"pc-{number}")
        if self._model_home is not None and not self.nodes:
            give_models(self._model_home, folders)
        self.code = known_node(folders, f"{number:x}", self.code or None)
        made = Node(self.lab.hosts[number - 1], f"pc-{number}", folders)
        self.nodes.append(made)
        return made

    def start(self, count: int, first: Sequence[str], rest: Sequence[str] = ()) -> Self:
        """Start so many nodes: node 1 with `first`, all with `rest`."""
        while len(self.nodes) < count:
            self.node()
        for node in self.nodes[:count]:
            node.start(*(first if node is self.nodes[0] else ()), *rest)
        return self

    def ready(self, nodes: Sequence[Node] | None = None, timeout_s: float = READY_S) -> list[Status]:
        """Wait until each of the nodes can answer, and all of the plan are there; what they say."""
        wanted = [node for node in self.nodes if node.running] if nodes is None else list(nodes)

        def look() -> list[Status]:
            seen = [node.look() for node in wanted]
            good = all(s.get("ready") and len(s["nodes"]) == len(wanted) for s in seen)
            epochs = {s["plan"]["epoch"] for s in seen if s.get("plan")}
            return seen if good and len(epochs) == 1 else []

        try:
            return until("all nodes are ready", look, timeout_s)
        except AssertionError as error:
            said = {node.name: node.look().get("stage", "no answer") for node in wanted}
            raise AssertionError(f"{error}; {said}") from None

    def logs(self) -> str:
        return "\n".join(
            f"--- {node.name}, {'running' if node.running else 'ended'}\n"
            + "\n".join(node.log().splitlines()[-LOG_LINES:])
            for node in self.nodes
        )


MESHES: list[Mesh] = []
"""Those that are there, for the report of a test that fails."""


def ask_all(questions: Sequence[tuple[Node, str, Mapping[str, Any]]]) -> list[str]:
    """Ask at once: the answers, each to the question in its place."""
    with ThreadPoolExecutor(len(questions)) as pool:
        waiting = [pool.submit(node.ask, prompt, **options) for node, prompt, options in questions]
        return [each.result() for each in waiting]


def give_models(source: Folders, target: Folders) -> None:
    """Put the models of a home into another one, as hard links where that can be."""
    for folder, wanted in ((source.models, target.models), (source.blobs, target.blobs)):
        shutil.copytree(folder, wanted, copy_function=_link_or_copy, dirs_exist_ok=True)


def known_node(folders: Folders, digit: str, code: str | None) -> str:
    """Give a home an identity whose id begins with a digit; the join code of its mesh."""
    while not (identity := load_identity(folders, code)).id.startswith(digit):
        forget_node(folders)
    return identity.join_code


def manifest_of(folders: Folders) -> Manifest:
    """The manifest of the one model of a home."""
    store = Store(folders)
    (name,) = store.names()
    return store.load(name)


def memory_to_split(manifest: Manifest, nodes: int, demand: Demand) -> str:
    """The memory that lets a model fit on so many nodes and on no fewer, as an option."""
    costs = model_spec(manifest, 4)

    def least(count: int) -> int:
        """The largest part of the best split into so many."""
        shards = len(costs.shards)
        return min(
            max(stage_bytes(costs, a, b, demand) for a, b in itertools.pairwise((0, *cuts, shards)))
            for cuts in itertools.combinations(range(1, shards), count - 1)
        )

    enough = least(nodes)
    if nodes > 1:
        assert enough < least(nodes - 1), "the model does not have to be split like this"
    return f"--memory={enough + KEPT_BACK_BYTES}"


def files_of_node(manifest: Manifest, node: Node) -> dict[str, int]:
    """The files that a node needed for its parts of all the plans that held since its start, with their sizes."""
    refs: list[FileRef] = list(manifest.tokenizer)
    for first, last in node.ranges():
        refs += [ref for spec in manifest.range(first, last + 1) for ref in (spec.graph, spec.weights)]
        refs += [manifest.golden[index] for index in (first - 1, last) if index >= 0]
    return {ref.sha256: ref.size_bytes for ref in refs}


def of_node(status: Status, node: Node) -> Status:
    """What a status says of a node."""
    return next((said for said in status["nodes"] if said["name"] == node.name), {})


def carriers(status: Status) -> list[str]:
    """The names of the nodes with layers, in the order of the ring."""
    return [stage["node"] for stage in status["plan"]["stages"]] if status.get("plan") else []


def _link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
