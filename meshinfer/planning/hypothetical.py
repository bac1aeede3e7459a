"""A mesh that is not there: nodes, links and a model as a TOML file describes them, and the plan they would get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from meshinfer.errors import InputError
from meshinfer.planning.explain import Shortage, reasons, shortage
from meshinfer.planning.partition import Ring, best_ring
from meshinfer.planning.specs import Demand, LinkSpec, ModelSpec, Network, NodeSpec, ShardCost
from meshinfer.settings import size_bytes
from meshinfer.types import NodeId

BYTES_PER_VALUE = 2
"""Of a hidden state on the wire: f16."""
_MB = 1_000_000

Amount = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Size = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Nodes = Annotated[int, msgspec.Meta(ge=1, le=256)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    name: Name | None = None
    layers: Layers | None = None
    layer_mb: Amount | None = None
    embedding_mb: Size = 0.0
    head_mb: Size = 0.0
    hidden: Count | None = None
    kv_bytes_per_token_per_layer: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] | None = None


class _Demand(msgspec.Struct, forbid_unknown_fields=True):
    context: Count = 4096
    users: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 8


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    memory: str | int
    layer_ms: Amount
    head_ms: Size
    count: Nodes = 1
    """So many alike: NAME-1, NAME-2, ..."""


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    a: Name
    b: Name
    rtt_ms: Amount
    goodput_mb_s: Amount


class _Link(msgspec.Struct, forbid_unknown_fields=True):
    rtt_ms: Amount = 1.0
    goodput_mb_s: Amount = 50.0
    pair: list[_Pair] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model: _Model
    node: Annotated[list[_Node], msgspec.Meta(min_length=1, max_length=256)]
    demand: _Demand = msgspec.field(default_factory=_Demand)
    link: _Link = msgspec.field(default_factory=_Link)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What a planner is asked; `model` is the name of a stored model, or the model itself."""

    model: ModelSpec | str
    nodes: tuple[NodeSpec, ...]
    network: Network
    demand: Demand


@dataclass(frozen=True, slots=True)
class Outcome:
    """The ring that a hypothesis gets with a reason for every node, or what is missing."""

    ring: Ring | None
    reasons: Mapping[NodeId, str]
    shortage: Shortage | None = None


def parse(data: Mapping[str, object], place: str) -> Hypothesis:
    """From the tables of a TOML file called `place`. Raises InputError, which names the file and the key."""
    try:
        file = msgspec.convert(dict(data), _File)
        nodes = _nodes(file.node)
        return Hypothesis(
            _model(file.model), nodes, _network(file.link, nodes), Demand(file.demand.context, file.demand.users)
        )
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`").lstrip(".")
        raise InputError(f"{place}: {key}: {what}" if key else f"{place}: {what}") from error
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def outcome(model: ModelSpec, asked: Hypothesis, why: bool = True) -> Outcome:
    """The plan that these nodes would get for a model; the reasons, which take longer, only if asked for."""
    world = (model, asked.nodes, asked.network, asked.demand)
    ring = best_ring(*world)
    if ring is None:
        return Outcome(None, {}, shortage(*world))
    return Outcome(ring, reasons(*world, ring) if why else {})


def _model(given: _Model) -> ModelSpec | str:
    sizes = (given.layers, given.layer_mb, given.hidden, given.kv_bytes_per_token_per_layer)
    if given.name is not None and all(size is None for size in sizes):
        return given.name
    layers, layer_mb, hidden, kv_bytes = sizes
    if layers is None or layer_mb is None or hidden is None or kv_bytes is None:
        needed = ("layers", "layer_mb", "hidden", "kv_bytes_per_token_per_layer")
        missing = ", ".join(key for key, size in zip(needed, sizes, strict=True) if size is None)
        raise InputError(f"model: {missing} is missing; or give the name of a model here, and nothing else")
    embedding, head = (ShardCost(int(size_mb * _MB)) for size_mb in (given.embedding_mb, given.head_mb))
    layer = ShardCost(int(layer_mb * _MB), kv_bytes)
    return ModelSpec(given.name or "the model", (embedding, *[layer] * layers, head), hidden * BYTES_PER_VALUE)


def _nodes(given: list[_Node]) -> tuple[NodeSpec, ...]:
    found: dict[str, NodeSpec] = {}
    for place, node in enumerate(given):
        try:
            memory = size_bytes(str(node.memory))
        except InputError as error:
            raise InputError(f"node[{place}].memory: {error}") from error
        for name in [node.name] if node.count == 1 else [f"{node.name}-{n + 1}" for n in range(node.count)]:
            if name in found:
                raise InputError(f"node[{place}].name: there are two nodes called '{name}'")
            found[name] = NodeSpec(NodeId(name), name, memory, node.layer_ms / 1e3, node.head_ms / 1e3)
    return tuple(found.values())


def _network(given: _Link, nodes: tuple[NodeSpec, ...]) -> Network:
    names = {node.name for node in nodes}
    links: dict[frozenset[NodeId], LinkSpec] = {}
    for place, pair in enumerate(given.pair):
        for key, name in (("a", pair.a), ("b", pair.b)):
            if name not in names:
                raise InputError(f"link.pair[{place}].{key}: there is no node '{name}'")
        if pair.a == pair.b:
            raise InputError(f"link.pair[{place}].b: a link joins two nodes, not '{pair.a}' with itself")
        links[frozenset((NodeId(pair.a), NodeId(pair.b)))] = _link(pair.rtt_ms, pair.goodput_mb_s)
    return Network(_link(given.rtt_ms, given.goodput_mb_s), links)


def _link(rtt_ms: float, goodput_mb_s: float) -> LinkSpec:
    return LinkSpec(rtt_ms / 1e3, goodput_mb_s * _MB)
