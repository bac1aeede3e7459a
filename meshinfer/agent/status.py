"""What an agent says of itself and its mesh: plain data for the panel, the commands and programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from meshinfer.planning.plan import Choice, Plan
from meshinfer.ring.timing import StepTiming
from meshinfer.types import NodeId
from meshinfer.wire.messages import Report


def plan_status(plan: Plan | None, names: Mapping[NodeId, str]) -> dict[str, Any] | None:
    """A plan for people: who runs what, how fast it should be, and why."""
    if plan is None:
        return None
    ring = plan.ring
    return {
        "epoch": plan.epoch,
        "leader": _name(plan.leader, names),
        "model": plan.choice.name,
        "precision": plan.choice.precision,
        "kv": plan.kv,
        "codec": plan.codec,
        "context_tokens": plan.choice.context_tokens,
        "users": plan.choice.sequences,
        "tokens_per_s": round(ring.tokens_per_s, 2),
        "tokens_per_s_together": round(ring.tokens_per_s_together, 2),
        "stages": [
            {"node": _name(s.node, names), "id": s.node, "first": s.start, "last": s.stop - 1} for s in ring.stages
        ],
        "reasons": [
            {"node": _name(node, names), "id": node, "reason": reason} for node, reason in plan.reasons.items()
        ],
    }


def node_status(
    node: NodeId, report: Report | None, me: NodeId, plan: Plan | None, choice: Choice | None
) -> dict[str, Any]:
    """One node of the mesh."""
    stage = plan.stage_of(node) if plan else None
    known = report is not None and choice is not None and report.fingerprint == choice.fingerprint
    return {
        "id": node,
        "name": report.name if report else node[:8],
        "self": node == me,
        "device": report.device if report else "",
        "device_name": report.device_name if report else "",
        "memory_bytes": report.memory_bytes if report else 0,
        "phase": report.phase if report else "no word yet",
        "done_bytes": report.done if report else 0,
        "total_bytes": report.total if report else 0,
        "fetched_bytes": report.fetched_bytes if report else 0,
        "shards_held": len(report.shards) if report and known else 0,
        "layer_ms": round(report.layer_s * 1e3, 3) if report and known and report.layer_s else None,
        "head_ms": round(report.head_s * 1e3, 3) if report and known and report.head_s else None,
        "first": stage.start if stage else None,
        "last": stage.stop - 1 if stage else None,
        "requests": report.running if report else 0,
    }


def timing_status(timings: Sequence[StepTiming]) -> dict[str, Any] | None:
    """Medians over the last steps, in milliseconds; a hop's overhead is all but inference, for one hop."""
    steps = [t for t in timings if t.sequences and t.inference_s]
    if not steps:
        return None

    def median(values: list[float]) -> float:
        return round(statistics.median(values) * 1e3, 3)

    return {
        "steps": len(steps),
        "total_ms": median([t.total_s for t in steps]),
        "inference_ms": median([t.inference_s for t in steps]),
        "codec_ms": median([t.codec_s for t in steps]),
        "waiting_ms": median([t.waiting_s for t in steps]),
        "scheduling_ms": median([t.scheduling_s for t in steps]),
        "network_ms": median([t.network_s for t in steps]),
        "stages_ms": [median(list(stage)) for stage in zip(*(t.stages_s for t in steps), strict=True)],
        "hop_overhead_ms": median([(t.total_s - t.inference_s) / t.hops for t in steps]),
    }


def _name(node: NodeId, names: Mapping[NodeId, str]) -> str:
    return names.get(node, node[:8])
