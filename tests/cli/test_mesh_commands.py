"""The commands of a mesh, against agents that are real processes on loopback."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshinfer.agent.runtime import read_runtime
from meshinfer.cli import chat
from meshinfer.cli.demo import needing_all
from meshinfer.cli.local_mesh import LocalMesh, home_of, homes, running
from meshinfer.cli.processes import alive
from meshinfer.config import Folders
from meshinfer.errors import InputError
from meshinfer.shards.lend import lend
from meshinfer.shards.store import Store
from tests.cli.calls import Result, command, complaint, meshinfer, succeeded
from tests.signals import hear_control_c

PATIENCE_S = 30.0
NOWHERE = "127.0.0.1:9"


def silent(_: str) -> None:
    """Nobody wants to know."""


@contextmanager
def agents(root: Path, count: int, options: list[str]) -> Iterator[LocalMesh]:
    mesh = LocalMesh(root, options)
    try:
        mesh.start(count, silent)
        yield mesh
    finally:
        mesh.close()


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """The home of an agent that has no model and was told of a node that is not there."""
    with agents(tmp_path_factory.mktemp("lone"), 1, ["--peer", NOWHERE]) as mesh:
        yield mesh.agents[0].folders


@pytest.fixture(scope="module")
def mesh(tiny_home: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    """Two agents that serve `tiny`, both of which are needed."""
    root = tmp_path_factory.mktemp("mesh")
    store = Store(tiny_home)
    manifest = store.load("tiny")
    lend(manifest, store, Store(home_of(root, 1)))
    options, _ = needing_all(manifest, 2, exact=False)
    with agents(root, 2, options) as mesh:
        said = succeeded(meshinfer(mesh.agents[0].folders, "use", "tiny", "--wait", "60"))
        assert re.search(r"tiny is ready: [\d.]+ tokens/s for one user", said)
        wait_for(lambda: all(status["ready"] and set(phases(status)) == {"serving"} for status in mesh.statuses()))
        yield mesh


@pytest.fixture
def first(mesh: LocalMesh) -> Folders:
    return mesh.agents[0].folders


@pytest.fixture
def second(mesh: LocalMesh) -> Folders:
    return mesh.agents[1].folders


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def phases(status) -> list[str]:
    return [node["phase"] for node in status["nodes"]]


def failed(result: Result) -> str:
    """The last line of a command that could not do its work, without a traceback."""
    assert result.returncode == 1 and "Traceback" not in result.stderr, result
    return result.stderr.splitlines()[-1]


# --- without a mesh, without a model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["status"], ["peers"], ["plan"], ["use", "tiny"], ["down"], ["ask", "Hi"], ["chat"]])
def test_without_an_agent_one_line_says_how_to_start_one(words: list[str], tmp_path: Path) -> None:
    said = complaint(meshinfer(Folders(tmp_path), *words, stdin="Hi\n"))
    assert said == f"error: no agent runs with {tmp_path}: start one with meshinfer up"


@pytest.mark.parametrize("words", [["ask", "Hi"], ["chat"], ["plan"]])
def test_without_a_model_one_line_says_how_to_choose_one(words: list[str], lone: Folders) -> None:
    assert "no model is chosen yet: meshinfer use MODEL" in failed(meshinfer(lone, *words, stdin="Hi\n"))


def test_status_without_a_model(lone: Folders) -> None:
    said = succeeded(meshinfer(lone, "status"))
    assert said.startswith("no model: no model is chosen yet") and "pc-1 (here)  CPU" in said
    assert read_runtime(lone).api in said and "meshinfer up --join" in said


def test_a_model_that_nobody_knows_is_refused(lone: Folders) -> None:
    assert "unknown model source 'nonesuch'" in complaint(meshinfer(lone, "use", "nonesuch"))
    assert succeeded(meshinfer(lone, "status")).count("unknown model source 'nonesuch'") == 1


def test_a_lone_node_says_why_and_whom_it_cannot_reach(lone: Folders) -> None:
    said = succeeded(meshinfer(lone, "peers"))
    assert "pc-1 is alone in its mesh" in said and "the nodes it was told of cannot be reached" in said
    assert re.search(rf"{NOWHERE} +nobody listens there", said)
    told = json.loads(succeeded(meshinfer(lone, "peers", "--json")))
    assert told["peers"] == [] and told["unreachable"][0]["port"] == 9 and told["other_meshes"] is None


# --- two agents ------------------------------------------------------------------------------------------------------


def test_status_shows_both_nodes_and_their_layers(first: Folders, second: Folders) -> None:
    said = succeeded(meshinfer(second, "status"))
    assert said.startswith("tiny (fast): ready\npredicted: ")
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith("pc-")}
    assert "pc-2 (here)" in rows["pc-2"] and all("serving" in row for row in rows.values())
    assert sorted(re.findall("embedding|head", "".join(rows.values()))) == ["embedding", "head"]
    told = json.loads(succeeded(meshinfer(first, "status", "--json")))
    assert told["ready"] and told["model"] == "tiny" and len(told["nodes"]) == 2 and told["trouble"] == ""


def test_peers_shows_the_link(second: Folders) -> None:
    (line,) = [row for row in succeeded(meshinfer(second, "peers")).splitlines() if row.startswith("pc-1")]
    assert re.search(r"127\.0\.0\.1:\d+ +[\d.]+ ms +[\d.]+ MB/s +\+0\.0 s  meshinfer .*, openvino ", line)


def test_plan_shows_stages_and_reasons(first: Folders) -> None:
    said = succeeded(meshinfer(first, "plan", "--why"))
    assert "tiny, room for 2 requests of 512 tokens\npredicted: " in said
    assert len(re.findall(r"^pc-\d +shards \d to \d: .* ms for a token", said, re.MULTILINE)) == 2
    plan = json.loads(succeeded(meshinfer(first, "plan", "--json")))["plan"]
    assert [stage["first"] for stage in plan["stages"]] == [0, plan["stages"][0]["last"] + 1]


def test_every_node_answers_alike(first: Folders, second: Folders) -> None:
    answers = [succeeded(meshinfer(home, "ask", "hello", "--max-tokens", "8")) for home in (first, second)]
    assert answers[0] == answers[1] and answers[0].strip()
    told = meshinfer(first, "ask", "hello", "--max-tokens", "8", "--stats")
    assert re.search(r"^8 tokens, the first after [\d.]+ s, then [\d.]+ tokens/s$", told.stderr, re.MULTILINE)


def test_a_chat_through_a_pipe_answers_each_line(second: Folders) -> None:
    result = meshinfer(second, "chat", "--max-tokens", "4", "--stats", stdin="hello\n\n/reset\nhello\n/quit\nhello\n")
    once, again = result.stderr.split("what was said is forgotten\n")
    assert once.startswith("4 tokens") and again.startswith("4 tokens") and again.count("\n") == 1
    assert len(set(succeeded(result).rstrip("\n").split("\n"))) == 1


def test_a_chat_that_is_too_long_is_refused(first: Folders) -> None:
    said = complaint(meshinfer(first, "chat", stdin="x " * 600))
    assert "the context of this model holds 512" in said


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_control_c_stops_an_answer_everywhere_and_leaves_at_the_prompt(mesh: LocalMesh, second: Folders) -> None:
    with terminal(command(second, "chat", "--max-tokens", "480")) as talk:
        talk.read_until("> ")
        talk.type("hello\n")
        talk.read_until("hello\r\n")
        wait_for(lambda: any(status["requests"] for status in mesh.statuses()))
        talk.type("\x03")
        assert "480 tokens" not in talk.read_until("(stopped)")
        wait_for(lambda: not any(node["requests"] for status in mesh.statuses() for node in status["nodes"]))
        talk.read_until("> ")
        talk.type("x " * 600 + "\n")
        talk.read_until("the context of this model holds 512; /reset forgets what was said")
        talk.type("/nonesuch\n")
        talk.read_until("there is no /nonesuch")
        talk.type("/help\n")
        talk.read_until("at the prompt, leave")
        talk.read_until("> ")
        wait_for(talk.interrupted)
        assert talk.process.returncode == 0


def test_another_model_can_be_chosen_while_one_is_served(mesh: LocalMesh, second: Folders) -> None:
    assert "unknown model source 'nonesuch'" in complaint(meshinfer(second, "use", "nonesuch"))
    assert "ready" in succeeded(meshinfer(second, "use", "tiny"))
    assert "is chosen" in succeeded(meshinfer(second, "use", "tiny", "--wait", "0"))


# --- plans for nodes that are not there -------------------------------------------------------------------------------

TWO_NODES = """
[model]
name = "tiny"
[demand]
users = 1
[[node]]
name = "pc"
count = 2
memory = "{memory}"
layer_ms = 1
head_ms = 1
"""


def test_a_plan_for_nodes_that_are_not_there(tiny_home: Folders, tmp_path: Path) -> None:
    file = tmp_path / "office.toml"
    file.write_text(TWO_NODES.format(memory="100MB"), "utf-8")
    said = succeeded(meshinfer(tiny_home, "plan", "--dry-run", str(file), "--why"))
    assert "tiny, room for 1 request of 4096 tokens" in said and re.search(r"^pc-2 +left out: ", said, re.MULTILINE)
    plan = json.loads(succeeded(meshinfer(tiny_home, "plan", "--dry-run", str(file), "--json")))["plan"]
    assert plan["stages"][0]["first"] == 0 and plan["stages"][-1]["last"] == 3
    file.write_text(TWO_NODES.format(memory="1MB"), "utf-8")
    assert failed(meshinfer(tiny_home, "plan", "--dry-run", str(file))).startswith("error: no plan: the model and its")
    assert "no model 'tiny' here" in complaint(meshinfer(Folders(tmp_path), "plan", "--dry-run", str(file)))
    file.write_text(TWO_NODES.format(memory="1 elephant"), "utf-8")
    assert f"{file}: node[0].memory: '1 elephant' is not" in complaint(
        meshinfer(tiny_home, "plan", "--dry-run", str(file))
    )
    assert "there is no such file" in complaint(meshinfer(tiny_home, "plan", "--dry-run", str(tmp_path / "nonesuch")))


# --- chat by itself --------------------------------------------------------------------------------------------------


class FakeClient:
    """Answers with two words, and then does what it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.then: BaseException | None = None

    def status(self) -> dict[str, object]:
        return {"ready": True}

    @contextmanager
    def chat(self, messages, options):
        self.asked.append([message["content"] for message in messages])

        def words():
            yield "two "
            if self.then is not None:
                raise self.then
            yield "words"

        yield words()


def test_what_was_said_is_remembered_also_of_an_answer_that_was_stopped(capsys, monkeypatch) -> None:
    client = FakeClient()
    monkeypatch.setattr(chat.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    talk = chat.Talk(client, "Be brief.", {}, 1.0, False)
    talk.turn("one")
    client.then = KeyboardInterrupt()
    talk.turn("two")
    client.then = InputError("no")
    talk.turn("three")
    client.then = None
    talk.turn("/reset")
    talk.turn("four")
    before = ["Be brief.", "one", "two words", "two"]
    assert client.asked[1:] == [before, [*before, "two ", "three"], ["Be brief.", "four"]]
    printed = capsys.readouterr()
    assert printed.out == "two words\ntwo  (stopped)\ntwo \ntwo words\n" and "error: no\n" in printed.err


# --- the end ---------------------------------------------------------------------------------------------------------


def test_down_waits_until_the_agent_is_gone(tmp_path: Path) -> None:
    with agents(tmp_path, 1, []) as mesh:
        home = mesh.agents[0].folders
        pid = read_runtime(home).pid
        assert succeeded(meshinfer(home, "down")) == "pc-1 has stopped\n"
        assert not alive(pid) and running(tmp_path) == []
        assert "no agent runs with" in complaint(meshinfer(home, "down"))


# --- demo ------------------------------------------------------------------------------------------------------------


def test_demo_asks_every_node_and_leaves_nothing_running(tiny_home: Folders, copy_home) -> None:
    home = copy_home(tiny_home)
    said = succeeded(meshinfer(home, "demo", "--model", "tiny", "--nodes", "2", "--keep"))
    assert said.count("> What is the capital of France?") == 2 and "predicted: " in said
    assert len(re.findall(r"^pc-\d  .*\d+ of [\d.]+ ms for a token", said, re.MULTILINE)) == 2
    root = home.home / "demo"
    assert len(running(root)) == 2 and all(read_runtime(node).api in said for node in homes(root))
    assert "a demo is running already" in complaint(meshinfer(home, "demo", "--model", "tiny"))
    assert succeeded(meshinfer(home, "demo", "--stop")) == "2 agents stopped\n"
    assert running(root) == []
    assert succeeded(meshinfer(home, "demo", "--stop")) == "no demo is running\n"
    blob = Store(tiny_home).load("tiny").shards[0].weights.sha256
    assert os.path.samefile(home.blobs / blob, homes(root)[0].blobs / blob)


@pytest.mark.skipif(os.name == "nt", reason="a process alone cannot be sent Ctrl-C on Windows")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_agents_of_a_demo_end_with_it(tiny_home: Folders, copy_home, end: signal.Signals) -> None:
    home = copy_home(tiny_home)
    words = command(home, "demo", "--model", "tiny", "--nodes", "2")
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, preexec_fn=hear_control_c, **pipes) as demo:
        wait_for(lambda: running(home.home / "demo"))
        demo.send_signal(end)
        _, errors = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == (130 if end == signal.SIGINT else -end) and "Traceback" not in errors
    wait_for(lambda: not running(home.home / "demo"))


@pytest.mark.skipif(os.name == "nt", reason="sends a signal of POSIX")
def test_a_demo_shows_the_log_of_an_agent_that_died(tiny_home: Folders, copy_home) -> None:
    home = copy_home(tiny_home)
    root = home.home / "demo"
    words = command(home, "demo", "--model", "tiny", "--nodes", "2")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as demo:
        wait_for(lambda: running(root) and "join code" in (home_of(root, 1).home / "agent.log").read_text("utf-8"))
        os.kill(read_runtime(home_of(root, 1)).pid, signal.SIGKILL)
        _, errors = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 1 and re.search(r"^  .*join code for other machines", errors, re.MULTILINE)
    assert re.search(r"^error: pc-1 ended with exit code -9: see .*agent\.log$", errors, re.MULTILINE)
    wait_for(lambda: not running(root))


# --- a terminal ------------------------------------------------------------------------------------------------------


class Terminal:
    """A process with a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupted(self) -> bool:
        """Press Ctrl-C, which readline misses if it comes just after the prompt; whether the process has ended."""
        with suppress(OSError):
            self.type("\x03")
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        return self.process.returncode is not None

    def read_until(self, text: str) -> str:
        """What is on the screen up to a text, which has to come."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self._seen
            self._seen += os.read(self._master, 1 << 16).decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before


@contextmanager
def terminal(words: list[str]) -> Iterator[Terminal]:
    import fcntl
    import termios

    master, slave = os.openpty()

    def take_the_terminal() -> None:
        hear_control_c()
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = os.environ | {"TERM": "dumb", "INPUTRC": os.devnull}
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_the_terminal, env=environment
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
