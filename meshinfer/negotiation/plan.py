"""The leader's plan: the best ring for what the nodes report, and why it is that one."""

from __future__ import annotations

from collections.abc import Mapping

from meshinfer.negotiation.events import MakePlan, PlanMade
from meshinfer.negotiation.problem import Problem, problem
from meshinfer.planning.cost import predict, stage_bytes
from meshinfer.planning.explain import reasons, shortage
from meshinfer.planning.partition import Ring, best_ring
from meshinfer.planning.plan import Choice, Plan, RingPlan
from meshinfer.planning.specs import Demand
from meshinfer.shards.manifest import Manifest
from meshinfer.types import NodeId, Precision

CODECS: dict[Precision, tuple[str, int]] = {"exact": ("f32", 4), "fast": ("f16", 2)}
"""How hidden states travel in each precision, and in how many bytes a value."""
TOLERANCE = 0.1
"""By how much a stage that runs may be over its node's budget, which wavers, and still be kept."""


def make_plan(order: MakePlan, manifest: Manifest) -> PlanMade:
    """Do what `MakePlan` asks for. It takes up to a second of CPU for many nodes."""
    codec, bytes_per_value = CODECS[order.choice.precision]
    demand = demand_of(order.choice, manifest)
    usable = {node: report for node, report in order.reports.items() if node not in order.left_out}
    kv = manifest.kv_backends[0] if manifest.kv_backends else "stateful"
    asked = problem(manifest, usable, demand, bytes_per_value)
    ring = best_ring(asked.model, asked.nodes, asked.network, demand) if asked.nodes else None
    if ring is None:
        missing = str(shortage(asked.model, asked.nodes, asked.network, demand)) if asked.nodes else "no node is usable"
        left = "; ".join(f"{order.reports[node].name} is left out: {why}" for node, why in order.left_out.items())
        return PlanMade(order.number, None, {}, kv, codec, f"{missing}; {left}" if left else missing)
    why = explained(asked, ring, order.left_out)
    everybody = problem(manifest, order.reports, demand, bytes_per_value)
    kept = _kept(order.kept, everybody)
    kept_why = explained(everybody, kept, order.left_out) if kept else {}
    kept_plan = ring_plan(kept, demand) if kept else None
    return PlanMade(order.number, ring_plan(ring, demand), why, kv, codec, kept=kept_plan, kept_reasons=kept_why)


def demand_of(choice: Choice, manifest: Manifest) -> Demand:
    """What is wanted of a plan; no request can be longer than the model's context."""
    return Demand(min(choice.context_tokens, manifest.context_tokens), choice.sequences)


def ring_plan(ring: Ring, demand: Demand) -> RingPlan:
    """A ring as nodes agree on it, with its predicted speed."""
    return RingPlan(ring.stages, ring.prediction.tokens_per_s(1), ring.prediction.tokens_per_s(demand.sequences))


def explained(asked: Problem, ring: Ring, left_out: Mapping[NodeId, str]) -> dict[NodeId, str]:
    """Of each node what it does in a ring and why, or why it was left out."""
    why = reasons(asked.model, asked.nodes, asked.network, asked.demand, ring)
    return why | {node: f"left out for now: {reason}" for node, reason in left_out.items()}


def _kept(plan: Plan | None, asked: Problem) -> Ring | None:
    """The ring there was, with the speed it is predicted to have by what is known now; None where it is too large."""
    memory = {node.id: node.memory_bytes * (1 + TOLERANCE) for node in asked.nodes}
    if plan is None or any(
        stage_bytes(asked.model, stage.start, stage.stop, asked.demand) > memory.get(stage.node, 0)
        for stage in plan.ring.stages
    ):
        return None
    return Ring(plan.ring.stages, predict(asked.model, asked.nodes, asked.network, plan.ring.stages))
