"""From what nodes report to what the planner takes.

A node that has no shard of the model yet cannot have measured it. Its speed is then that of a node that has,
by the ratio of their probes; where nobody has, by what the probe says a layer's bytes take.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from meshinfer.planning.specs import Demand, LinkSpec, ModelSpec, Network, NodeSpec, ShardCost
from meshinfer.shards.manifest import Manifest
from meshinfer.types import NodeId
from meshinfer.wire.messages import Report

UNMEASURED = LinkSpec(rtt_s=0.001, goodput_bytes_s=50e6)
"""A link of an office, until it is measured."""
UNLINKED = LinkSpec(rtt_s=60.0, goodput_bytes_s=1e3)
"""Nodes without a link cannot pass anything on."""
_SLOWEST_PROBE = 1e6
WORKING_BYTES = 64 << 20
"""What a stage takes besides weights and KV cache: activations, compiled code."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything `planning.partition.best_ring` is given."""

    model: ModelSpec
    nodes: tuple[NodeSpec, ...]
    network: Network
    demand: Demand


def model_spec(manifest: Manifest, bytes_per_value: int) -> ModelSpec:
    """A model as the planner sees it; `bytes_per_value` of a hidden state on the wire."""
    average = _layer_bytes(manifest)
    width = sum(tensor.shape[-1] for tensor in manifest.shards[0].outputs)
    shards = tuple(
        ShardCost(
            shard.size_bytes,
            shard.kv_bytes_per_token,
            shard.fixed_state_bytes,
            shard.weights.size_bytes / average if shard.kind == "layer" and average else 1.0,
        )
        for shard in manifest.shards
    )
    return ModelSpec(manifest.name, shards, width * bytes_per_value)


def problem(manifest: Manifest, reports: Mapping[NodeId, Report], demand: Demand, bytes_per_value: int) -> Problem:
    """Nodes, links and model as they are known now."""
    fingerprint = manifest.fingerprint()
    measured = [report for report in reports.values() if report.fingerprint == fingerprint and report.layer_s > 0]
    nodes = tuple(_node(node, report, manifest, fingerprint, measured) for node, report in sorted(reports.items()))
    return Problem(model_spec(manifest, bytes_per_value), nodes, _network(reports), demand)


def _node(node: NodeId, report: Report, manifest: Manifest, fingerprint: str, measured: list[Report]) -> NodeSpec:
    own = report if report.fingerprint == fingerprint else None
    probe = max(report.probe_bytes_s, _SLOWEST_PROBE)
    ratios = [other for other in measured if other.probe_bytes_s > 0]
    layer_bytes = _layer_bytes(manifest)
    head_bytes = manifest.shards[-1].weights.size_bytes
    layer_s = own.layer_s if own else 0.0
    if layer_s <= 0:
        by_ratio = [other.layer_s * other.probe_bytes_s / probe for other in ratios]
        layer_s = statistics.median(by_ratio) if by_ratio else layer_bytes / probe
    head_s = own.head_s if own else 0.0
    if head_s <= 0:
        heads = [other.head_s / other.layer_s for other in ratios if other.head_s > 0]
        head_s = layer_s * (statistics.median(heads) if heads else head_bytes / max(layer_bytes, 1))
    memory = max(0, report.memory_bytes - WORKING_BYTES)
    return NodeSpec(node, report.name, memory, layer_s, head_s)


def _layer_bytes(manifest: Manifest) -> float:
    """The weights of an average layer."""
    return statistics.mean([shard.weights.size_bytes for shard in manifest.shards if shard.kind == "layer"] or [0])


def _network(reports: Mapping[NodeId, Report]) -> Network:
    """Both ends measure a link: the worse value counts. A pair where one end has no link has none."""
    seen = {node: {link.peer: link for link in report.links} for node, report in reports.items()}
    links: dict[frozenset[NodeId], LinkSpec] = {}
    names = sorted(reports)
    for place, a in enumerate(names):
        for b in names[place + 1 :]:
            ends = [seen[a].get(b), seen[b].get(a)]
            there = [end for end in ends if end is not None]
            if not there:
                links[frozenset((a, b))] = UNLINKED
                continue
            rtt = max(end.rtt_s for end in there)
            goodput = min((end.goodput_bytes_s for end in there if end.goodput_bytes_s > 0), default=0.0)
            links[frozenset((a, b))] = LinkSpec(rtt or UNMEASURED.rtt_s, goodput or UNMEASURED.goodput_bytes_s)
    return Network(UNMEASURED, links)
