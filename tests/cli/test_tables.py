"""What an agent says, in words."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from meshinfer.cli.panel import drawn
from meshinfer.cli.tables import doing, layers, node_rows, predicted, reason_rows, why_alone

JOIN = "others join with: meshinfer up --join abcd"


def node(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "name": name,
        "self": False,
        "device": "CPU",
        "memory_bytes": 8_000_000_000,
        "phase": "idle",
        "done_bytes": 0,
        "total_bytes": 0,
        "requests": 0,
        "first": None,
        "last": None,
    } | changes


def status(**changes: Any) -> dict[str, Any]:
    return {
        "version": "1",
        "name": "pc-1",
        "api": "http://127.0.0.1:8000",
        "join_code": "abcd",
        "model": None,
        "ready": False,
        "stage": "no model is chosen yet",
        "trouble": "",
        "plan": None,
        "timing": None,
        "requests": 0,
        "answered": 1,
        "peers": [],
        "unreachable": [],
        "other_meshes": {},
        "nodes": [node("pc-1", self=True)],
    } | changes


PLAN = {
    "model": "tiny",
    "users": 2,
    "tokens_per_s": 10.0,
    "tokens_per_s_together": 15.0,
    "stages": [
        {"node": "pc-2", "id": "b", "first": 0, "last": 10},
        {"node": "pc-1", "id": "a", "first": 11, "last": 31},
    ],
    "reasons": [
        {"node": "pc-1", "id": "a", "reason": "shards 11 to 31"},
        {"node": "pc-2", "id": "b", "reason": "shards 0 to 10"},
        {"node": "pc-3", "id": "c", "reason": "left out"},
    ],
}


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (0, 31, "embedding, 0-29, head"),
        (0, 10, "embedding, 0-9"),
        (11, 20, "10-19"),
        (21, 31, "20-29, head"),
        (0, 0, "embedding"),
        (31, 31, "head"),
        (5, 5, "4"),
        (0, 1, "embedding, 0"),
    ],
)
def test_shards_are_called_what_they_are(first: int, last: int, said: str) -> None:
    assert layers(first, last, 32) == said


def test_what_a_node_is_doing() -> None:
    assert doing(node("a", phase="fetching", done_bytes=10**6, total_bytes=4 * 10**6)) == "fetching 25 % of 4.0 MB"
    assert doing(node("a", phase="serving", requests=2)) == "serving, 2 requests"
    busy = status(plan=PLAN, nodes=[node("pc-1", first=11, last=31, self=True), node("pc-4", device="")])
    assert node_rows(busy) == [
        ("pc-1 (here)", "CPU", "8.0 GB", "10-29, head", "idle"),
        ("pc-4", "-", "8.0 GB", "-", "idle"),
    ]


def test_reasons_are_in_the_order_of_the_ring_then_the_others() -> None:
    names = [name for name, _ in reason_rows(PLAN, {"a": "pc-1", "c": "pc-3", "d": "pc-4"})]
    assert names == ["pc-2", "pc-1", "pc-3", "pc-4"]
    assert predicted(PLAN) == "10.0 tokens/s for one user, 15.0 for 2 together"
    assert predicted(PLAN | {"users": 1}) == "10.0 tokens/s for one user"


def test_why_a_node_is_alone() -> None:
    assert why_alone(status()) == [
        "nobody else is heard by multicast: where the network blocks that (UDP port 5353), give --peer HOST:PORT",
        JOIN,
    ]
    off = why_alone(status(other_meshes=None))
    assert off[0].startswith("it does not listen for others (--no-mdns), and knows no address")
    heard = why_alone(status(other_meshes={"f": 2}))
    assert heard[0].startswith("2 nodes of another mesh are heard: to join it, start this one with --join CODE")
    told = why_alone(status(other_meshes=None, unreachable=[{"host": "10.0.0.1", "port": 1, "reason": "no answer"}]))
    assert told == ["the nodes it was told of cannot be reached", JOIN]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_into_any_terminal(width: int) -> None:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(drawn(status(plan=PLAN, ready=True, model="tiny", stage="ready", trouble="[red] no such thing")))
    lines = captured.get().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "pc-1" in captured.get() and "[red]" in captured.get()
