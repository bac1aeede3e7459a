"""The paths of the API that are for the user of this node alone: status, plan, choosing a model, stopping."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from meshinfer.agent.agent import Agent
from meshinfer.agent.status import node_status, plan_status, timing_status
from meshinfer.errors import InputError, MeshinferError, SourceError
from meshinfer.ring.runner import RingRunner

log = logging.getLogger(__name__)

CHOSEN_AT_ONCE_S = 1.0
"""How long the choice of a model may take before the answer is that it is being added."""


def status_of(agent: Agent, about: dict[str, Any]) -> dict[str, Any]:
    """Everything that this node knows of the mesh; `about` is what only its shell knows.

    `other_meshes`: how many nodes of each are heard by multicast; None where multicast is not used.
    """
    negotiation = agent.negotiation
    choice, plan = negotiation.choice, negotiation.committed
    ready = agent.readiness()
    names = {node: agent.name_of(node) for node in {*negotiation.members, *(plan.nodes if plan else ())}}
    runner = agent.runner
    return {
        **about,
        "id": agent.me.id,
        "name": agent.me.name,
        "ready": ready.ready,
        "stage": ready.stage,
        "trouble": agent.reporter.trouble,
        "model": choice.name if choice else None,
        "fingerprint": choice.fingerprint if choice else None,
        "precision": choice.precision if choice else None,
        "leader": agent.name_of(negotiation.leader),
        "nodes": [
            node_status(node, negotiation.reports.get(node), agent.me.id, plan, choice) for node in negotiation.members
        ],
        "plan": plan_status(plan, names),
        "preparing": plan_status(negotiation.preparing, names),
        "timing": timing_status(runner.timings) if runner else None,
        "scheduler": _scheduler(runner),
        "requests": agent.origin.open_requests,
        "answered": agent.origin.answered,
        "given_bytes": agent.exchange.given_bytes,
        "fetched_bytes": agent.exchange.fetched_bytes,
        "peers": _peers(agent),
        "unreachable": [
            {"host": address.host, "port": address.port, "reason": reason}
            for address, reason in (agent.links.failures.items() if agent.links else ())
        ],
    }


def _scheduler(runner: RingRunner | None) -> dict[str, int] | None:
    """At the head of the ring: what runs and waits there."""
    if runner is None or runner.scheduler is None:
        return None
    scheduler = runner.scheduler
    return {
        "running": scheduler.running,
        "waiting": scheduler.waiting,
        "steps_in_flight": scheduler.steps_in_flight,
        "free_blocks": scheduler.free_blocks,
        "blocks": scheduler.pool.blocks,
    }


def _peers(agent: Agent) -> list[dict[str, Any]]:
    links = agent.links.all if agent.links else ()
    return [
        {
            "id": link.hello.peer.id,
            "name": link.hello.peer.name,
            "address": f"{link.dialled.host}:{link.dialled.port}" if link.dialled else "came in",
            "rtt_ms": round(link.health.rtt_s * 1e3, 3),
            "goodput_mb_s": round(link.health.goodput_bytes_s / 1e6, 1),
            "clock_offset_s": round(link.clock_offset_s, 1),
            "versions": dict(link.hello.versions),
        }
        for link in links
    ]


def admin_routes(agent: Agent, status: Callable[[], dict[str, Any]], stop: Callable[[], None]) -> list[web.RouteDef]:
    """Routes below /mesh/; the API lets nobody in without the node's token."""
    choosing: set[asyncio.Task[None]] = set()

    def chosen(task: asyncio.Task[None]) -> None:
        choosing.discard(task)
        if not task.cancelled():
            task.exception()  # it is in the status, and in the log

    async def get_status(request: web.Request) -> web.Response:
        said = status() | {"choosing": bool(choosing)}
        if "seconds" in request.query and agent.runner is not None:
            since = time.monotonic() - _seconds(request.query["seconds"])
            said["timing"] = timing_status([t for t in agent.runner.timings if t.at >= since])
        return web.json_response(said)

    async def post_down(_: web.Request) -> web.Response:
        stop()
        return web.json_response({"stopping": True})

    async def post_use(request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError:
            raise InputError("the body is no JSON") from None
        name = body.get("model") if isinstance(body, dict) else None
        if not isinstance(name, str) or not name:
            raise InputError("model: the name or the source of a model")
        if choosing:
            raise InputError("a model is being added already: see meshinfer status")
        task = asyncio.create_task(_choose(agent, name), name="choose a model")
        choosing.add(task)
        task.add_done_callback(chosen)
        done, _ = await asyncio.wait([task], timeout=CHOSEN_AT_ONCE_S)
        if done:
            try:
                task.result()
            except SourceError as error:  # what was named here is at fault, and not what this node has
                raise InputError(str(error)) from error
        return web.json_response({"model": name, "chosen": bool(done)})

    return [
        web.get("/mesh/status", get_status),
        web.post("/mesh/down", post_down),
        web.post("/mesh/use", post_use),
    ]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"seconds: '{text}' is no number") from None


async def _choose(agent: Agent, name: str) -> None:
    agent.reporter.trouble = ""
    try:
        await agent.choose(name, anew=True)
    except MeshinferError as error:
        agent.reporter.trouble = str(error)
        log.error("cannot use %s: %s", name, error)
        raise
    except Exception as error:
        agent.reporter.trouble = f"adding {name} failed: {error!r}"
        log.exception("cannot use %s", name)
        raise
