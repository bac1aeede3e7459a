"""Plans for nodes that are only described."""

from __future__ import annotations

import time
import tomllib
from typing import Any

import pytest

from meshinfer.errors import InputError
from meshinfer.planning.hypothetical import outcome, parse
from meshinfer.planning.specs import Demand, ModelSpec
from meshinfer.types import NodeId
from tests.tree import ROOT

MODEL = {"layers": 80, "layer_mb": 450, "embedding_mb": 1000, "head_mb": 600, "hidden": 8192}
KV = {"kv_bytes_per_token_per_layer": 4096}


def office(**changes: Any) -> dict[str, Any]:
    pcs = {"name": "pc", "count": 64, "memory": "8GB", "layer_ms": 9.0, "head_ms": 14}
    return {"model": MODEL | KV, "node": [pcs], **changes}


def complaint(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse(office(**changes), "office.toml")
    return str(caught.value)


def test_the_example_is_a_plan_with_a_reason_for_every_node() -> None:
    asked = parse(tomllib.loads((ROOT / "examples" / "office.toml").read_text("utf-8")), "office.toml")
    assert isinstance(asked.model, ModelSpec) and asked.demand == Demand(4096, 4)
    found = outcome(asked.model, asked)
    assert found.ring is not None and found.reasons.keys() == {node.id for node in asked.nodes}
    assert len(asked.nodes) == 8 and any(reason.startswith("left out: ") for reason in found.reasons.values())


def test_64_nodes_and_80_layers_take_less_than_a_second() -> None:
    asked = parse(office(), "office.toml")
    assert isinstance(asked.model, ModelSpec) and len(asked.nodes) == 64 and asked.nodes[63].id == "pc-64"
    began = time.process_time()
    found = outcome(asked.model, asked, why=False)
    assert time.process_time() - began < 1.0
    assert found.ring is not None and found.ring.stages[-1].stop == 82


def test_what_is_missing_is_said_with_what_would_fit() -> None:
    small = [{"name": "pc", "count": 6, "memory": "8GB", "layer_ms": 9.0, "head_ms": 14}]
    asked = parse(office(node=small, demand={"context": 8192, "users": 32}), "office.toml")
    assert isinstance(asked.model, ModelSpec)
    found = outcome(asked.model, asked)
    assert found.ring is None and found.shortage is not None
    assert "would fit" in str(found.shortage) and "the nodes have 48.00 GB" in str(found.shortage)


def test_links_of_pairs_and_models_of_the_store() -> None:
    pair = {"a": "pc-1", "b": "pc-2", "rtt_ms": 30, "goodput_mb_s": 4}
    asked = parse(office(model={"name": "tiny"}, link={"rtt_ms": 0.5, "goodput_mb_s": 100, "pair": [pair]}), "x")
    assert asked.model == "tiny" and asked.demand == Demand(4096, 8)
    assert asked.network.between(NodeId("pc-2"), NodeId("pc-1")).rtt_s == pytest.approx(0.03)
    assert asked.network.between(NodeId("pc-3"), NodeId("pc-1")).goodput_bytes_s == 1e8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node": []}, "office.toml: node: Expected `array` of length >= 1"),
        ({"node": [{"name": "pc"}]}, "office.toml: node[0]: Object missing required field `memory`"),
        ({"model": MODEL}, "office.toml: model: kv_bytes_per_token_per_layer is missing; or give the name of"),
        ({"model": MODEL | KV | {"layers": "many"}}, "office.toml: model.layers: Expected `int | null`, got `str`"),
        ({"model": MODEL | KV | {"layers": 0}}, "office.toml: model.layers: Expected `int` >= 1"),
        ({"modle": {}}, "office.toml: Object contains unknown field `modle`"),
        ({"demand": {"users": 0}}, "office.toml: demand.users: Expected `int` >= 1"),
        ({"link": {"rtt_ms": -1}}, "office.toml: link.rtt_ms: Expected `float` > 0.0"),
        ({"link": {"goodput_mb_s": float("nan")}}, "office.toml: link.goodput_mb_s: Expected `float` > 0.0"),
        (
            {"link": {"pair": [{"a": "pc-1", "b": "pc-99", "rtt_ms": 1, "goodput_mb_s": 1}]}},
            "office.toml: link.pair[0].b: there is no node 'pc-99'",
        ),
        (
            {"link": {"pair": [{"a": "pc-1", "b": "pc-1", "rtt_ms": 1, "goodput_mb_s": 1}]}},
            "office.toml: link.pair[0].b: a link joins two nodes, not 'pc-1' with itself",
        ),
        (
            {"node": [{"name": "pc", "memory": "8 elephants", "layer_ms": 1, "head_ms": 1}]},
            "office.toml: node[0].memory: '8 elephants' is not a size",
        ),
        (
            {"node": [{"name": "pc", "memory": "8GB", "layer_ms": 1, "head_ms": 1}] * 2},
            "office.toml: node[1].name: there are two nodes called 'pc'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_key(changes: dict[str, Any], said: str) -> None:
    assert complaint(**changes).startswith(said)
