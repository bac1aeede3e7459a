"""Meshes of one to four hosts: the tokens of the unsplit model at every one of them, soon, and whoever leaves."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from meshinfer.agent.runtime import NoAgentError
from meshinfer.config import Folders
from meshinfer.errors import RequestLostError
from meshinfer.planning.specs import Demand
from tests.cli.calls import meshinfer, succeeded
from tests.netlab.conftest import MakeMesh
from tests.netlab.mesh import (
    Mesh,
    Node,
    ask_all,
    carriers,
    files_of_node,
    give_models,
    manifest_of,
    memory_to_split,
    of_node,
    until,
)
from tools.netlab import Netlab

pytestmark = pytest.mark.netlab

MODEL = "smollm2-135m"
PROMPT = "What is the capital of France?"
TOKENS = 24
DEMAND = Demand(context_tokens=512, sequences=4)
FIRST_TOKEN_S = 60.0
"""Asserted; what is measured is recorded, and is far less."""
LONG = 160
LINK_S, DEAD_S = 2.0, 2.5
ALONE = {"max_tokens": TOKENS}
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def wanted(demand: Demand) -> tuple[str, ...]:
    """The options that ask for room for so much."""
    return "--exact", f"--context={demand.context_tokens}", f"--users={demand.sequences}"


def first_token_s(node: Node) -> tuple[float, set[str]]:
    """Seconds from the start of a node until it gave a token, and why it did not before."""
    why: set[str] = set()

    def answered() -> bool:
        try:
            response = node.http("POST", "/v1/chat/completions", json=BODY | {"max_tokens": 1})
        except (NoAgentError, httpx.TransportError):
            return False
        if response.status_code == 503:
            assert int(response.headers["Retry-After"]) > 0
            assert node.http("GET", "/ready").status_code in (503, 200)
            assert node.http("GET", "/health").status_code == 200
            why.add(response.json()["error"]["message"])
        return response.status_code == 200

    until(f"{node.name} gives a token", answered, FIRST_TOKEN_S)
    return time.monotonic() - node.began_at, why


@pytest.fixture(scope="session")
def unsplit(smollm2_home: Folders) -> str:
    """What the model says in one process, in one piece."""
    words = ("run", MODEL, PROMPT, "--exact", "--max-tokens", str(TOKENS))
    return succeeded(meshinfer(smollm2_home, *words)).removesuffix("\n")


@pytest.fixture(scope="module")
def trio(lab_works: None, smollm2_home: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Three hosts that only together hold the model, which the first one had."""
    memory = memory_to_split(manifest_of(smollm2_home), 3, DEMAND)
    with Netlab(3) as lab, Mesh(lab, tmp_path_factory.mktemp("trio"), smollm2_home) as mesh:
        yield mesh.start(3, ("--model", MODEL, *wanted(DEMAND)), (memory,))


# --- three hosts -----------------------------------------------------------------------------------------------------


def test_a_cold_start_says_what_it_does_and_gives_a_token_soon(trio: Mesh, record_property: Any) -> None:
    took, why = first_token_s(trio.nodes[-1])
    record_property("cold_start_first_token_s", round(took, 1))
    print(f"cold start: first token after {took:.1f} s")
    assert any("no model is chosen yet" in text for text in why), why
    assert any("pc-" in text for text in why), why


def test_nodes_link_soon(trio: Mesh, record_property: Any) -> None:
    trio.ready()
    began = max(node.logged_at(f"node {node.name}, API") for node in trio.nodes)
    linked = max(node.logged_at("nodes: pc-1, pc-2, pc-3") for node in trio.nodes)
    record_property("discovery_to_link_s", round(linked - began, 2))
    print(f"discovery to link: {linked - began:.2f} s")
    assert linked - began < LINK_S


def test_every_node_gives_the_answer_of_the_unsplit_model(trio: Mesh, unsplit: str) -> None:
    (status, *_) = trio.ready()
    assert sorted(carriers(status)) == ["pc-1", "pc-2", "pc-3"]
    assert "Paris" in unsplit
    assert [node.ask(PROMPT, max_tokens=TOKENS) for node in trio.nodes] == [unsplit] * 3


def test_every_node_has_its_own_files_and_no_others(trio: Mesh, smollm2_home: Folders) -> None:
    manifest = manifest_of(smollm2_home)
    fetched = [status["fetched_bytes"] for status in trio.ready()]
    assert fetched[0] == 0
    for node, count in zip(trio.nodes[1:], fetched[1:], strict=True):
        needed = files_of_node(manifest, node)
        assert node.blobs() == needed
        assert count == sum(needed.values()) < manifest.size_bytes
    given = [node.status()["given_bytes"] for node in trio.nodes]
    assert given[0] > 0 and sum(given) == sum(fetched)


def test_two_users_are_served_at_once(trio: Mesh) -> None:
    trio.ready()
    questions = [
        (trio.nodes[1], "Write a story about a fox.", {"max_tokens": 48}),
        (trio.nodes[2], "Explain how rain is made.", {"max_tokens": 48}),
    ]
    alone = [node.ask(prompt, **options) for node, prompt, options in questions]
    assert alone[0] != alone[1]
    head = next(node for node in trio.nodes if node.name == carriers(node.status())[0])
    before, began = head.status()["timing"]["steps"], time.monotonic()
    assert ask_all(questions) == alone
    took, timing = time.monotonic() - began, head.status()["timing"]
    in_flight = (timing["steps"] - before) * timing["total_ms"] / 1e3 / took
    print(f"steps in flight on average: {in_flight:.2f}")
    assert in_flight > 1.2


def test_many_users_with_seeds_of_their_own_do_not_mix(trio: Mesh) -> None:
    trio.ready()
    questions = [
        (node, f"Tell me about the number {number}.", {"max_tokens": 8, "temperature": 1.0, "seed": number})
        for number, node in enumerate(trio.nodes * 3)
    ]
    alone = [node.ask(prompt, **options) for node, prompt, options in questions]
    assert len(set(alone)) > 6
    assert ask_all(questions) == alone


def test_clients_that_leave_free_their_place_at_once(trio: Mesh) -> None:
    trio.ready()
    for _ in range(DEMAND.sequences):  # all places of the ring
        with trio.nodes[2].stream("Count from one to a thousand.", max_tokens=400) as answer:
            next(iter(answer))
            asked = trio.nodes[2].status()["requests"]
    assert asked
    began = time.monotonic()
    with trio.nodes[1].stream(PROMPT, max_tokens=2) as answer:
        next(iter(answer))
        assert time.monotonic() - began < 1.0
    until("no request is open anywhere", lambda: not any(n.status()["requests"] for n in trio.nodes), 1.0)


OPENAI = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
asked = {"model": sys.argv[2], "messages": [{"role": "user", "content": sys.argv[3]}], "temperature": 0}
asked["max_tokens"] = int(sys.argv[4])
whole = client.chat.completions.create(**asked)
pieces = [event.choices[0].delta.content or "" for event in client.chat.completions.create(stream=True, **asked)
          if event.choices]
found = {"models": [model.id for model in client.models.list()], "whole": whole.choices[0].message.content,
         "pieces": pieces, "tokens": whole.usage.completion_tokens}
print(json.dumps(found))
"""


def test_a_client_of_openai_works_at_every_node(trio: Mesh, unsplit: str) -> None:
    trio.ready()
    node = trio.nodes[1]
    words = [sys.executable, "-c", OPENAI, node.status()["api"], MODEL, PROMPT, str(TOKENS)]
    result = node.host.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["models"] == [MODEL]
    assert found["whole"] == "".join(found["pieces"]) == unsplit
    assert len(found["pieces"]) > 3 and 3 < found["tokens"] <= TOKENS


WRONG: dict[str, tuple[int, dict[str, Any], str]] = {
    "no messages": (400, {"json": {"messages": []}}, "messages"),
    "unknown model": (404, {"json": BODY | {"model": "gpt-4"}}, f"the mesh serves '{MODEL}'"),
    "no JSON": (400, {"content": b"{'messages'"}, ""),
    "huge": (413, {"content": b"x" * (5 << 20)}, "larger than"),
    "too long": (400, {"json": {"messages": [{"role": "user", "content": "word " * 600}]}}, "512"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(trio: Mesh, case: str) -> None:
    status, sent, said = WRONG[case]
    trio.ready()
    response = trio.nodes[1].http("POST", "/v1/chat/completions", **sent)
    assert response.status_code == status
    assert said in response.json()["error"]["message"]
    assert trio.nodes[1].http("POST", "/v1/chat/completions", json=BODY).status_code == 200


def test_a_warm_start_fetches_nothing_that_is_there(trio: Mesh, unsplit: str, record_property: Any) -> None:
    trio.ready()
    held = [node.blobs() for node in trio.nodes]
    for node in trio.nodes:
        node.signal(signal.SIGTERM)
    assert [node.stop()[0] for node in trio.nodes] == [0, 0, 0]
    for node in trio.nodes:
        node.start(*(option for option in node.options if option not in ("--model", MODEL)))
    took, _ = first_token_s(trio.nodes[-1])
    record_property("warm_start_first_token_s", round(took, 1))
    print(f"warm start: first token after {took:.1f} s")
    assert [node.ask(PROMPT, max_tokens=TOKENS) for node in trio.nodes] == [unsplit] * 3
    for node, had in zip(trio.nodes, held, strict=True):
        news = {name: size for name, size in node.blobs().items() if name not in had}
        assert node.status()["fetched_bytes"] == sum(news.values())


# --- other numbers of hosts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_any_number_of_hosts_gives_the_answer_of_the_unsplit_model(
    hosts: int, make_mesh: MakeMesh, smollm2_home: Folders, unsplit: str
) -> None:
    memory = memory_to_split(manifest_of(smollm2_home), hosts, DEMAND)
    mesh = make_mesh(hosts, smollm2_home).start(hosts, ("--model", MODEL, *wanted(DEMAND)), (memory,))
    (status, *_) = mesh.ready()
    assert len(carriers(status)) == hosts
    assert [node.ask(PROMPT, max_tokens=TOKENS) for node in mesh.nodes] == [unsplit] * hosts


# --- the model -------------------------------------------------------------------------------------------------------


def test_a_mesh_without_a_model_says_what_to_do_and_takes_one_anywhere(
    make_mesh: MakeMesh, office_home: Folders, tiny_home: Folders
) -> None:
    mesh = make_mesh(2, office_home).start(2, (), ("--context=256", "--users=1"))
    one, two = mesh.nodes
    until("the nodes are linked", lambda: len(one.look().get("nodes", ())) == len(two.look().get("nodes", ())) == 2)
    asked = two.meshinfer("ask", "Hello", "--wait", "0")
    assert asked.returncode == 1 and asked.stdout == ""
    assert "no model is chosen yet: meshinfer use MODEL" in asked.stderr
    assert "meshinfer use MODEL" in two.stage()
    assert two.http("GET", "/ready").status_code == 503
    assert two.http("GET", "/health").status_code == 200
    assert two.http("GET", "/v1/models").json()["data"] == []
    refused = two.http("POST", "/v1/chat/completions", json=BODY)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
    assert "meshinfer use MODEL" in refused.json()["error"]["message"]

    two.use("office")
    mesh.ready()
    assert {node.status()["model"] for node in mesh.nodes} == {"office"}
    first = two.ask("Hello", **ALONE)
    assert one.ask("Hello", **ALONE) == first

    two.use(str(tiny_home.home.with_name("tiny.gguf")))
    until("the other model is served", lambda: all(n.look().get("model") == "tiny" for n in mesh.nodes), 30)
    mesh.ready()
    assert one.http("GET", "/v1/models").json()["data"][0]["id"] == "tiny"
    assert one.ask("Hello", **ALONE) == two.ask("Hello", **ALONE) != first


def test_an_answer_ends_with_an_error_when_its_model_goes(
    make_mesh: MakeMesh, office_home: Folders, annex_home: Folders
) -> None:
    mesh = make_mesh(1, office_home).start(1, ("--model", "office", *wanted(Demand(2048, 2))))
    give_models(annex_home, mesh.nodes[0].folders)
    (node,) = mesh.nodes
    mesh.ready()
    with pytest.raises(RequestLostError, match="the mesh serves another model now: annex"):
        goes_on(node, lambda: node.use("annex"), max_tokens=1900)
    until("the other model is served", lambda: node.status()["model"] == "annex" and node.status()["ready"])


# --- nodes that go ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def office(lab_works: None, office_home: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Three hosts, any two of which hold the model."""
    demand = Demand(context_tokens=2048, sequences=2)
    memory = memory_to_split(manifest_of(office_home), 2, demand)
    with Netlab(3) as lab, Mesh(lab, tmp_path_factory.mktemp("office-mesh"), office_home) as mesh:
        yield mesh.start(3, ("--model", "office", *wanted(demand)), (memory,))


@pytest.fixture
def spare(office: Mesh) -> tuple[Mesh, Node, Node, str]:
    """A mesh of three, a node with layers but not the model's first holder, a node that stays, and a long answer
    that nothing disturbed.
    """
    for node in office.nodes:
        if not node.running:
            node.start()
    (status, *_) = office.ready()
    names = carriers(status)
    assert len(names) == 2
    victim = next(node for node in office.nodes[1:] if node.name in names)
    stays = next(node for node in office.nodes[1:] if node is not victim)
    return office, victim, stays, stays.ask("once upon", max_tokens=LONG)


def goes_on(node: Node, disturb: Callable[[], object], max_tokens: int = LONG) -> str:
    """A long answer, in the middle of which something happens."""
    with node.stream("once upon", max_tokens=max_tokens) as answer:
        pieces = iter(answer)
        text = "".join(next(pieces) for _ in range(20))
        disturb()
        return text + "".join(pieces)


def test_a_node_that_dies_is_replaced_and_the_answer_goes_on(spare: tuple[Mesh, Node, Node, str]) -> None:
    mesh, victim, stays, undisturbed = spare
    died: list[float] = []

    def die() -> None:
        victim.kill()
        died.append(time.monotonic())
        until("its death is seen", lambda: not of_node(stays.look(), victim), DEAD_S)
        print(f"death seen after {time.monotonic() - died[0]:.2f} s")

    assert goes_on(stays, die) == undisturbed
    (status, *_) = mesh.ready()
    print(f"the answer was whole {time.monotonic() - died[0]:.2f} s after the death")
    assert victim.name not in carriers(status)


def test_a_node_that_stops_ends_cleanly_and_the_others_go_on(spare: tuple[Mesh, Node, Node, str]) -> None:
    mesh, victim, stays, undisturbed = spare
    ended: list[tuple[int, float]] = []
    assert goes_on(stays, lambda: ended.append(victim.stop())) == undisturbed
    (code, took), *_ = ended
    print(f"stopped after {took:.2f} s")
    assert code == 0 and took < 3.0
    assert not (victim.folders.home / "agent.json").exists()
    assert victim.name not in carriers(mesh.ready()[0])
    assert mesh.nodes[0].ask("once upon", max_tokens=LONG) == undisturbed


def test_a_node_that_sleeps_is_replaced_and_comes_back(spare: tuple[Mesh, Node, Node, str]) -> None:
    mesh, victim, stays, undisturbed = spare

    def sleep() -> None:
        victim.signal(signal.SIGSTOP)
        until("it is given up", lambda: not of_node(stays.look(), victim), DEAD_S)

    assert goes_on(stays, sleep) == undisturbed
    victim.signal(signal.SIGCONT)
    mesh.ready()
    assert victim.ask("once upon", max_tokens=LONG) == undisturbed
