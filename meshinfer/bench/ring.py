"""Decode speed of a ring of agents on hosts with a core each, beside that of the unsplit model on one core.

Everything is started once. Each round then measures the unsplit model and every number of users in turn, so that a
drift of the machine's speed meets them alike; the ratios are of medians over rounds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshinfer.bench.lab import Host, cores, lab_hosts
from meshinfer.errors import MeshinferError
from meshinfer.files.progress import Progress
from meshinfer.types import Precision

READY_S = 240.0
CLOSE_S = 20.0
PROMPT_TOKENS = 16
TRIES = 3
SETTLE_S = 45.0
SPOILT = 3
"""Rounds that may be measured again because the ring was changed in them."""
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class RingOptions:
    """What to measure."""

    hosts: int = 2
    users: tuple[int, ...] = (1, 2)
    tokens: int = 64
    rounds: int = 5
    precision: Precision = "fast"


@dataclass(frozen=True, slots=True)
class RingRow:
    """So many users: decode tokens/s of all together, and the ratio of medians to the unsplit model.

    `timing`: medians of where a step's time went, in milliseconds; see `agent.status.timing_status`.
    """

    users: int
    median: float
    lowest: float
    highest: float
    against_unsplit: float
    timing: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RingResult:
    """`stages`: which host ran which shards."""

    unsplit: tuple[float, ...]
    stages: tuple[str, ...]
    rows: tuple[RingRow, ...]


class _Ring:
    """Agents on hosts, each on a core of its own as far as there are enough."""

    def __init__(self, hosts: Sequence[Host], root: Path) -> None:
        self._hosts, self._root = hosts, root
        self._cores = cores()
        self._agents: list[subprocess.Popen[bytes]] = []

    def home(self, number: int) -> Path:
        return self._root / f"pc-{number}"

    def start(self, model: str, options: RingOptions) -> None:
        """Start an agent on every host; the home of the first one has the model."""
        code = ""
        for number, host in enumerate(self._hosts, 1):
            words = [
                sys.executable,
                "-m",
                "meshinfer",
                "--home",
                str(self.home(number)),
                "up",
                "--name",
                f"pc-{number}",
            ]
            words += ["--threads", "1", *(["--exact"] if options.precision == "exact" else [])]
            words += ["--join", code] if code else ["--model", model]
            self.home(number).mkdir(exist_ok=True)
            with (self.home(number) / "agent.log").open("wb") as log:
                self._agents.append(host.popen(words, core=self._core(number), stdout=log, stderr=log))
            if not code:
                self._until(lambda: (self.home(1) / "agent.json").exists(), "pc-1 does not start")
                code = str(self.ask(1)["status"]["join_code"])

    def ready(self, stages: int) -> tuple[str, ...]:
        """Wait until every host runs a stage; who runs what. Raises MeshinferError."""
        said: dict[str, Any] = {}

        def serves() -> bool:
            said.update(self.ask(1)["status"])
            plan = said["plan"]
            return bool(said["ready"]) and plan is not None and len(plan["stages"]) == stages

        self._until(serves, f"no ring of {stages} stages: see {self._root}")
        return tuple(f"{s['node']} {s['first']}-{s['last']}" for s in said["plan"]["stages"])

    def settle(self, options: RingOptions) -> None:
        """Use the ring for a while, so that nodes learn how fast they are, and the leader plans for that."""
        self.ready(len(self._hosts))
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            self.load(self.head(), max(options.users), options.tokens)

    def head(self) -> int:
        """The number of the host that runs the first stage."""
        return int(self.ask(1)["status"]["plan"]["stages"][0]["node"].removeprefix("pc-"))

    def ask(self, number: int, users: int = 0, tokens: int = 0) -> dict[str, Any]:
        """See `meshinfer.bench.load`. Raises MeshinferError."""
        words = [sys.executable, "-m", "meshinfer.bench.load", str(self.home(number)), str(users), str(tokens)]
        done = self._hosts[number - 1].run(words, core=self._core(number), capture_output=True, text=True)
        if done.returncode:
            raise MeshinferError(f"pc-{number}: {done.stderr.strip().splitlines()[-1:] or 'no answer'}")
        return dict(json.loads(done.stdout))

    def load(self, number: int, users: int, tokens: int) -> dict[str, Any]:
        """`ask`, again where the mesh was just changing its ring. Raises MeshinferError."""
        for _ in range(TRIES):
            try:
                return self.ask(number, users, tokens)
            except MeshinferError as error:
                complaint = error
                self.ready(len(self._hosts))
        raise complaint

    def close(self) -> None:
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            try:
                agent.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                agent.kill()

    def _core(self, number: int) -> int:
        return self._cores[(number - 1) % len(self._cores)]

    def _until(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with suppress(MeshinferError):
                if condition():
                    return
            if any(agent.poll() is not None for agent in self._agents):
                raise MeshinferError(f"an agent ended: see {self._root}")
            if time.monotonic() > deadline:
                raise MeshinferError(complaint)
            time.sleep(POLL_S)


def measure(root: Path, model: str, graph: Path, options: RingOptions, progress: Progress) -> RingResult:
    """Measure a ring whose first agent has `model` in the home `root/pc-1`; `graph` is the unsplit IR.

    Raises InputError where no hosts can be made here, MeshinferError where the ring does not come.
    """
    rounds: list[_Round] = []
    with lab_hosts(options.hosts) as hosts, _baseline(graph, options) as decode:
        ring = _Ring(hosts, root)
        try:
            progress("load", 0, 1)
            ring.start(model, options)
            ring.settle(options)
            progress("load", 1, 1)
            for _ in range(options.rounds + SPOILT):
                progress("measure", len(rounds), options.rounds)
                stages = ring.ready(options.hosts)
                taken = _round(ring, decode, options)
                if ring.ready(options.hosts) != stages:  # what was measured is of no one ring
                    rounds.clear()
                    continue
                rounds.append(taken)
                if len(rounds) == options.rounds:
                    break
            progress("measure", len(rounds), options.rounds)
        finally:
            ring.close()
    if not rounds:
        raise MeshinferError("the ring changed again and again: is the machine busy?")
    unsplit = [taken.unsplit for taken in rounds]
    rates = {users: [taken.rates[users] for taken in rounds] for users in options.users}
    timings = rounds[-1].timings
    base = statistics.median(unsplit)
    rows = tuple(
        RingRow(users, m := statistics.median(values), min(values), max(values), m / base, timings[users] or {})
        for users, values in rates.items()
    )
    return RingResult(tuple(unsplit), stages, rows)


@dataclass(frozen=True, slots=True)
class _Round:
    """What every contender did in turn."""

    unsplit: float
    rates: dict[int, float]
    timings: dict[int, dict[str, Any]]


def _round(ring: _Ring, decode: Callable[[], float], options: RingOptions) -> _Round:
    head = ring.head()
    said = {users: ring.load(head, users, options.tokens) for users in options.users}
    rates = {users: float(answer["rate"]) for users, answer in said.items()}
    return _Round(decode(), rates, {users: answer["status"]["timing"] for users, answer in said.items()})


@contextmanager
def _baseline(graph: Path, options: RingOptions) -> Iterator[Callable[[], float]]:
    """Decodes with the unsplit model on one core when called; tokens/s."""
    words = [sys.executable, "-m", "meshinfer.bench.unsplit", str(graph), options.precision, str(cores()[0])]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def decode() -> float:
        stdin.write(f"{PROMPT_TOKENS} {options.tokens}\n")
        stdin.flush()
        return float(stdout.readline())

    try:
        if stdout.readline().strip() != "ready":
            raise MeshinferError("the unsplit model does not start")
        yield decode
    finally:
        stdin.close()
        process.wait(CLOSE_S)
        stdout.close()


def as_json(model: str, options: RingOptions, result: RingResult) -> dict[str, Any]:
    """The result for programs."""
    return {"model": model, "options": asdict(options), **asdict(result)}
