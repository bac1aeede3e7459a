"""What an agent says of its mesh, in words: for the panel and for the commands that show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshinfer.cli.words import plural, size

Status = Mapping[str, Any]
"""See `agent.admin.status_of`."""

NODES = ("node", "device", "memory", "layers", "doing")
PEERS = ("node", "address", "round trip", "goodput", "clock", "versions")
STAGES = ("node", "shards", "which are")


def headline(status: Status) -> str:
    """The model, and whether it can be asked."""
    model = f"{status['model']} ({status['precision']})" if status["model"] else "no model"
    return f"{model}: {status['stage']}"


def node_rows(status: Status) -> list[tuple[str, ...]]:
    """Of each node its name, device, memory, layers, and what it is doing."""
    shards = shard_count(status["plan"])
    return [
        (
            f"{node['name']} (here)" if node["self"] else node["name"],
            node["device"] or "-",
            size(node["memory_bytes"]),
            layers(node["first"], node["last"], shards) if node["first"] is not None else "-",
            doing(node),
        )
        for node in status["nodes"]
    ]


def doing(node: Mapping[str, Any]) -> str:
    """What a node is doing, and how far it is."""
    words = str(node["phase"])
    if node["total_bytes"]:
        words += f" {node['done_bytes'] * 100 // node['total_bytes']} % of {size(node['total_bytes'])}"
    if node["requests"]:
        words += f", {plural(node['requests'], 'request')}"
    return words


def shard_count(plan: Mapping[str, Any] | None) -> int:
    """How many shards the model of a plan has."""
    return plan["stages"][-1]["last"] + 1 if plan else 0


def layers(first: int, last: int, shards: int) -> str:
    """Which layers the shards `first` to `last` are, counted from 0 as in the model: the first shard is the embedding
    and the last one the head."""
    low, high = max(first, 1) - 1, min(last, shards - 2) - 1
    parts = ["embedding"] if first == 0 else []
    if low <= high:
        parts.append(f"{low}-{high}" if low < high else str(low))
    return ", ".join([*parts, "head"] if last == shards - 1 else parts)


def stage_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of each stage its node, its shards, and which layers they are."""
    shards = shard_count(plan)
    return [
        (stage["node"], f"{stage['first']}-{stage['last']}", layers(stage["first"], stage["last"], shards))
        for stage in plan["stages"]
    ]


def predicted(plan: Mapping[str, Any]) -> str:
    """How fast a plan should be."""
    words = f"{plan['tokens_per_s']:.1f} tokens/s for one user"
    users = plan["users"]
    return words if users == 1 else f"{words}, {plan['tokens_per_s_together']:.1f} for {users} together"


def measured(timing: Mapping[str, float]) -> str:
    """Where the time of a step went, as the head measured it."""
    total, inference, network = (timing[f"{part}_ms"] for part in ("total", "inference", "network"))
    other = max(0.0, total - inference - network)
    return f"{total:.1f} ms a step: inference {inference:.1f}, network {network:.1f}, other {other:.1f}"


def peer_rows(status: Status) -> list[tuple[str, ...]]:
    """Of each link who is at its other end, how good it is, and what runs there."""
    return [
        (
            peer["name"],
            peer["address"],
            f"{peer['rtt_ms']:.1f} ms" if peer["rtt_ms"] else "-",
            f"{peer['goodput_mb_s']:.1f} MB/s" if peer["goodput_mb_s"] else "-",
            f"{peer['clock_offset_s'] + 0.0:+.1f} s",
            ", ".join(f"{what} {version}" for what, version in peer["versions"].items()),
        )
        for peer in status["peers"]
    ]


def why_alone(status: Status) -> list[str]:
    """Why there may be no other node, and what can be done about it."""
    lines = []
    heard = status["other_meshes"]
    for count in (heard or {}).values():
        lines.append(
            f"{plural(count, 'node')} of another mesh {'is' if count == 1 else 'are'} heard: to join it, start this "
            "one with --join CODE; meshinfer status shows the code there"
        )
    if status["unreachable"]:
        lines.append("the nodes it was told of cannot be reached")
    elif heard is None:
        lines.append("it does not listen for others (--no-mdns), and knows no address: give --peer HOST:PORT")
    elif not heard:
        lines.append(
            "nobody else is heard by multicast: where the network blocks that (UDP port 5353), give --peer HOST:PORT"
        )
    lines.append(f"others join with: meshinfer up --join {status['join_code']}")
    return lines


def reason_rows(plan: Mapping[str, Any], nodes: Mapping[str, str]) -> list[tuple[str, str]]:
    """Of each node, `nodes` by id among them, what it does in a plan and why."""
    known = {entry["id"]: (entry["node"], entry["reason"]) for entry in plan["reasons"]}
    order = [stage["id"] for stage in plan["stages"]]
    rows = [known.pop(node) for node in order if node in known] + list(known.values())
    asked = {entry["id"] for entry in plan["reasons"]}
    return rows + [(name, "came after this plan was made") for node, name in nodes.items() if node not in asked]
