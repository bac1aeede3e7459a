"""What goes wrong in an office: ports, codes, firewalls, disks, cables. The mesh copes, or says what is wrong."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshinfer.config import Folders
from meshinfer.planning.specs import Demand
from meshinfer.security.identity import load_identity
from tests.cli.calls import flip_byte
from tests.netlab.conftest import MakeMesh
from tests.netlab.mesh import (
    KEPT_BACK_BYTES,
    Mesh,
    Node,
    carriers,
    give_models,
    manifest_of,
    memory_to_split,
    until,
)
from tests.netlab.sockets import inside
from tools.netlab import Netlab

pytestmark = pytest.mark.netlab

DEMAND = Demand(context_tokens=1024, sequences=2)
SERVE = ("--model", "office", "--exact")
ROOM = ("--context", "1024", "--users", "2")
NO_LAYERS = f"--memory={KEPT_BACK_BYTES + 1000}"
"""Room for no shard."""
PROMPT, SHORT = "once upon", {"max_tokens": 16}


def halved(model_home: Folders, nodes: int = 2) -> str:
    """The memory that makes so many nodes carry the model together."""
    return memory_to_split(manifest_of(model_home), nodes, DEMAND)


def says(node: Node, words: str) -> str:
    """What a node says that the mesh is doing, if these words are in it."""
    return stage if words in (stage := node.stage()) else ""


def linked(*nodes: Node) -> bool:
    """Whether these nodes, and no others, know each other."""
    return all(len(node.look().get("nodes", ())) == len(nodes) for node in nodes)


def answers_alike(mesh: Mesh) -> str:
    """The answer that every node gives."""
    mesh.ready()
    (answer,) = {node.ask(PROMPT, **SHORT) for node in mesh.nodes if node.running}
    assert answer
    return answer


@pytest.fixture(scope="module")
def pair(lab_works: None, office_home: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two hosts that only together hold a model, and a third host where no agent runs."""
    with Netlab(3) as lab, Mesh(lab, tmp_path_factory.mktemp("pair"), office_home) as mesh:
        yield mesh.start(2, SERVE, (*ROOM, halved(office_home)))


# --- ports and codes -------------------------------------------------------------------------------------------------


def test_a_taken_port_for_nodes_is_no_trouble(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(2)
    with inside(mesh.lab.hosts[1]):
        taken = [socket.create_server(("0.0.0.0", port)) for port in (7420, 7421)]
    mesh.start(2, ())
    one, two = mesh.nodes
    until("the nodes are linked", lambda: linked(one, two))
    assert (one.status()["port"], two.status()["port"]) == (7420, 7422)
    for each in taken:
        each.close()


@pytest.mark.parametrize(
    ("options", "port", "said"),
    [
        (("--port", "7420"), 7420, "port 7420 for other nodes is in use: choose another with --port"),
        ((), 8000, "port 8000 on 127.0.0.1 is in use: choose another with --api HOST:PORT"),
        (("--join", "0000-0000-0000-0000-0000-0000-0001"), 0, "this join code is mistyped: its checksum does not fit"),
    ],
    ids=["port for nodes", "port of the API", "join code"],
)
def test_what_cannot_be_started_says_why(make_mesh: MakeMesh, options: tuple[str, ...], port: int, said: str) -> None:
    node = make_mesh(1).node()
    with inside(node.host):
        taken = socket.create_server(("0.0.0.0", port))
    with taken:
        result = node.meshinfer("up", *options)
    assert result.returncode == 2
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said in error
    assert not (node.folders.home / "agent.json").exists()


def test_two_meshes_on_one_network_stay_apart(make_mesh: MakeMesh, office_home: Folders) -> None:
    ours = make_mesh(2, office_home, "ours")
    theirs = make_mesh(ours.lab, office_home, "theirs")
    one, two = ours.node(1), theirs.node(2)
    for node in (one, two):
        node.start(*SERVE, *ROOM)
    assert one.folders != two.folders and ours.code != theirs.code
    assert answers_alike(ours) == answers_alike(theirs)
    heard = until("the other mesh is heard", lambda: one.status()["other_meshes"])
    assert heard == {two.status()["mesh"]: 1}
    assert linked(one) and linked(two) and one.status()["peers"] == []
    said = one.meshinfer("peers").stdout
    assert "alone in its mesh" in said and "1 node of another mesh is heard" in said


# --- what else is on the network -------------------------------------------------------------------------------------

GARBAGE = """
import asyncio, sys
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

TYPE = "_meshinfer._tcp.local."
LIKE = {"v": "1", "mesh": sys.argv[1], "id": "f" * 32, "name": "ghost", "memory": "1", "devices": "CPU"}
RECORDS = [{}, {"v": "one"}, {b"\\xff": b"\\xfe" * 200}, {"v": "1", "mesh": "x", "id": "", "name": "\\n"}, LIKE,
           LIKE | {"id": "0" * 32, "memory": "9" * 200}, LIKE | {"name": "a" * 200}]

async def main():
    aio = AsyncZeroconf(interfaces=[sys.argv[2]])
    for number, properties in enumerate(RECORDS):
        await (await aio.async_register_service(AsyncServiceInfo(
            TYPE, f"garbage-{number}.{TYPE}", port=9 if number else 0, properties=properties,
            server=f"garbage-{number}.local.", parsed_addresses=[sys.argv[2]])))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


BRIDGE = """
ip link add docker0 type bridge forward_delay 0
ip link add container0 type veth peer name container1
ip link set container0 master docker0 up
ip link set container1 up
ip address add 172.17.0.1/16 dev docker0
ip link set docker0 up
"""


@pytest.fixture(scope="module")
def strange(lab_works: None, office_home: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two hosts of one name, with Docker's bridge at one address, that hear strange adverts of a third host."""
    with Netlab(3) as lab, Mesh(lab, tmp_path_factory.mktemp("strange"), office_home) as mesh:
        nodes, stranger = (mesh.node(), mesh.node()), lab.hosts[2]
        for host in lab.hosts:
            host.run(["sh", "-ec", BRIDGE], check=True)
        fingerprint = load_identity(nodes[0].folders).mesh_fingerprint
        words = [sys.executable, "-c", GARBAGE, fingerprint, stranger.address]
        garbage = stranger.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert garbage.stdin and garbage.stdout
        assert garbage.stdout.readline() == b"ready\n"
        yield mesh.start(2, SERVE, (*ROOM, halved(office_home), "--name", "desktop"))
        garbage.kill()
        garbage.communicate()


def test_strange_adverts_are_no_trouble(strange: Mesh) -> None:
    answers_alike(strange)
    (ghost,) = until("the ghost is looked for", lambda: strange.nodes[0].status()["unreachable"])
    assert ghost == {"host": strange.lab.hosts[2].address, "port": 9, "reason": "nobody listens there"}


def test_equal_host_names_are_no_trouble(strange: Mesh) -> None:
    answers_alike(strange)
    nodes = strange.nodes[1].status()["nodes"]
    assert [node["name"] for node in nodes] == ["desktop", "desktop"]
    assert len({node["id"] for node in nodes}) == 2


def test_a_bridge_for_containers_leads_nowhere(strange: Mesh) -> None:
    answers_alike(strange)
    for node, other in (strange.nodes, strange.nodes[::-1]):
        (peer,) = node.status()["peers"]
        assert peer["address"] in ("came in", f"{other.host.address}:7420")


def test_firewalls_that_let_nobody_in_from_one_side_are_no_trouble(make_mesh: MakeMesh, office_home: Folders) -> None:
    mesh = make_mesh(3, office_home)
    one, two, three = mesh.lab.hosts
    for source, target in ((one, two), (two, three), (three, one)):
        mesh.lab.block(source, target, connections_only=True)
    mesh.start(3, SERVE, (*ROOM, halved(office_home, 3)))
    answers_alike(mesh)
    for node, caller in zip(mesh.nodes, ("pc-2", "pc-3", "pc-1"), strict=True):
        assert {peer["name"] for peer in node.status()["peers"] if peer["address"] == "came in"} == {caller}
    assert all(node.status()["fetched_bytes"] > 0 for node in mesh.nodes[1:])


def test_without_multicast_nodes_meet_through_one_they_were_told_of(make_mesh: MakeMesh, office_home: Folders) -> None:
    mesh = make_mesh(3, office_home)
    mesh.lab.multicast(False)
    nodes = [mesh.node() for _ in range(3)]
    memory = halved(office_home, 3)
    nodes[0].start(*SERVE, *ROOM, memory, "--peer", mesh.lab.hosts[2].address)
    nodes[1].start(*ROOM, memory, "--peer", f"{mesh.lab.hosts[2].address}:7420")
    nodes[2].start(*ROOM, memory)
    answers_alike(mesh)
    assert len(nodes[0].status()["peers"]) == len(nodes[1].status()["peers"]) == 2


def test_a_copied_home_becomes_a_node_of_its_own(make_mesh: MakeMesh, office_home: Folders) -> None:
    mesh = make_mesh(2, office_home)
    one, two = mesh.node(), mesh.node()
    shutil.copytree(one.folders.identity, two.folders.identity, dirs_exist_ok=True)
    assert load_identity(one.folders).id == load_identity(two.folders).id
    for node in (one, two):
        node.start(*(SERVE if node is one else ()), *ROOM, halved(office_home))
    answers_alike(mesh)
    assert load_identity(one.folders).id != load_identity(two.folders).id
    assert sum("this one becomes a new node" in node.log() for node in (one, two)) == 1


# --- memory, disks, files --------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_says_what_would(make_mesh: MakeMesh, office_home: Folders) -> None:
    mesh = make_mesh(2, office_home)
    memory = halved(office_home)
    one = mesh.node().start(*SERVE, *ROOM, memory)
    said = until("it says what is missing", partial(says, one, "need"), 30)
    assert "the model and its KV cache need 0.02 GB, the nodes have 0.01 GB" in said
    assert "1 at once with 512 tokens each would fit" in said or "1 at once with 1024 tokens each would fit" in said
    asked = one.meshinfer("ask", "Hello", "--wait", "0")
    assert asked.returncode != 0 and said in asked.stderr
    mesh.node().start(*ROOM, memory)
    answers_alike(mesh)


def corrupt(node: Node) -> None:
    """Change a byte in every layer and both ends of the model in a node's store, which shares its files with others."""
    manifest = manifest_of(node.folders)
    for spec in manifest.shards:
        path = node.folders.blobs / spec.weights.sha256
        changed = path.with_name("changed")
        shutil.copyfile(path, changed)
        flip_byte(changed)
        os.replace(changed, path)


def test_a_source_with_wrong_bytes_is_avoided(make_mesh: MakeMesh, office_home: Folders) -> None:
    mesh = make_mesh(3, office_home)
    one, two, three = (mesh.node() for _ in range(3))
    give_models(office_home, two.folders)
    corrupt(two)
    memory = halved(office_home)
    one.start(*SERVE, *ROOM, memory)
    two.start(*ROOM, NO_LAYERS)
    three.start(*ROOM, memory)
    (status, *_) = mesh.ready()
    assert sorted(carriers(status)) == ["pc-1", "pc-3"]
    answers_alike(mesh)
    assert "gave wrong bytes" in three.log()
    assert two.status()["given_bytes"] > 0
    for name in three.blobs():
        assert (three.folders.blobs / name).read_bytes() == (office_home.blobs / name).read_bytes()


def test_a_model_whose_only_source_has_wrong_bytes_says_so(make_mesh: MakeMesh, office_home: Folders) -> None:
    mesh = make_mesh(2, office_home)
    one, two = mesh.node(), mesh.node()
    corrupt(one)
    one.start(*SERVE, *ROOM, NO_LAYERS)
    two.start(*ROOM)
    for node in (one, two):
        until("it says why", partial(says, node, "wrong bytes"), 30)
    asked = two.meshinfer("ask", "Hello", "--wait", "0")
    assert asked.returncode != 0 and "wrong bytes" in asked.stderr
    assert all(node.look()["ready"] is False for node in (one, two))


def test_a_node_with_a_full_disk_is_left_out(
    small_disk: Callable[[int], Path], make_mesh: MakeMesh, office_home: Folders
) -> None:
    disk = small_disk(18)
    mesh = make_mesh(3, office_home)
    memory = halved(office_home)
    mesh.node().start(*SERVE, *ROOM, memory)
    mesh.node(home=disk).start(*ROOM, memory)
    one, two = mesh.nodes
    why = until("it says why", partial(says, one, str(disk)), 30)
    assert "not enough space" in why
    three = mesh.node().start(*ROOM, memory)
    (status, *_) = mesh.ready()
    assert sorted(carriers(status)) == ["pc-1", "pc-3"]
    assert three.ask(PROMPT, **SHORT) == one.ask(PROMPT, **SHORT)
    (reason,) = [entry["reason"] for entry in status["plan"]["reasons"] if entry["node"] == "pc-2"]
    assert "left out" in reason and str(disk) in reason
    assert two.running


# --- one mesh and its network ----------------------------------------------------------------------------------------

HELLO_AND_SILENCE = [
    b"",
    b"GET /link HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\x16\x03\x01\xff\xff" + b"\xff" * 60_000,
    bytes(range(256)) * 40,
]


def test_connections_that_make_no_sense_are_no_trouble(pair: Mesh) -> None:
    answer = answers_alike(pair)
    stranger = pair.lab.hosts[2]
    with ExitStack() as ends:
        sockets = []
        for target in pair.nodes:
            for said in HELLO_AND_SILENCE * 10:
                with inside(stranger):
                    end = ends.enter_context(socket.create_connection((target.host.address, 7420), 5))
                end.settimeout(0.01)
                with suppress(ConnectionError, TimeoutError):
                    end.sendall(said)
                sockets.append(end)
        pair.nodes[1].stop()
        pair.nodes[1].start()
        assert answers_alike(pair) == answer
        open_ends = list(sockets)

        def all_closed() -> bool:
            open_ends[:] = [end for end in open_ends if not _closed(end)]
            return not open_ends

        until("every one of them is closed", all_closed, 10)


def _closed(end: socket.socket) -> bool:
    try:
        while end.recv(4096):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_node_that_died_is_found_at_its_new_port(pair: Mesh) -> None:
    answer = answers_alike(pair)
    one, two = pair.nodes
    options = two.options
    two.kill()
    two.start(*options, "--port", "7500")
    until("it is back", lambda: linked(one, two) and two.look().get("port") == 7500)
    assert answers_alike(pair) == answer
    assert one.status()["peers"][0]["id"] == two.status()["id"]
    two.options = options


def test_a_slow_way_works(pair: Mesh) -> None:
    answer = answers_alike(pair)
    pair.lab.delay(20)
    until("the nodes are linked", lambda: linked(*pair.nodes))
    assert answers_alike(pair) == answer
    until("the round trip is measured", lambda: pair.nodes[0].status()["peers"][0]["rtt_ms"] > 39)
    pair.lab.delay(0)
    until("the round trip is measured", lambda: pair.nodes[0].status()["peers"][0]["rtt_ms"] < 20)


def test_a_cable_that_was_out_is_no_loss(pair: Mesh) -> None:
    answer = answers_alike(pair)
    one, two = pair.nodes
    began = time.monotonic()
    pair.lab.link(two.host, up=False)
    until("its loss is seen", lambda: linked(one) and linked(two), 4.0)
    print(f"the loss was seen after {time.monotonic() - began:.2f} s")
    assert one.http("GET", "/ready").status_code == 503
    until("some seconds have passed", lambda: time.monotonic() - began > 5.0)
    pair.lab.link(two.host, up=True)
    began = time.monotonic()
    until("it is back", lambda: linked(one, two), 15)
    assert answers_alike(pair) == answer
    print(f"all was well {time.monotonic() - began:.2f} s after the cable was in again")


def test_shards_on_a_slow_link_let_tokens_pass(
    make_mesh: MakeMesh, office_home: Folders, annex_home: Folders, record_property: Any
) -> None:
    mesh = make_mesh(2, office_home)
    one, two = mesh.start(2, SERVE, (*ROOM, halved(office_home))).nodes
    give_models(annex_home, one.folders)
    (status, *_) = mesh.ready()
    assert len(carriers(status)) == 2
    undisturbed = two.ask(PROMPT, max_tokens=300)
    before = two.status()["fetched_bytes"]
    mesh.lab.rate(one.host, 10)
    came: list[float] = []
    said = ""
    with two.stream(PROMPT, max_tokens=300) as answer:
        for text in answer:
            said += text
            came.append(time.monotonic())
            if len(came) == 20:
                one.use("annex")
    gaps = [later - earlier for earlier, later in itertools.pairwise(came[20:])]
    print(f"longest wait for a token: {max(gaps):.2f} s; the answer went on for {came[-1] - came[20]:.1f} s")
    record_property("longest_gap_s", round(max(gaps), 3))
    assert undisturbed.startswith(said[: len(undisturbed) // 2])
    assert len(gaps) > 50 and max(gaps) < 2.0
    until("the other model is there", lambda: two.look().get("model") == "annex" and two.look()["ready"], 30)
    assert two.status()["fetched_bytes"] - before > 1e6
