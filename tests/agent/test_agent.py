"""What an agent does with models and stages, whatever happens to them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from meshinfer.agent.agent import Agent
from meshinfer.agent.capacity import Capacity
from meshinfer.config import Folders
from meshinfer.errors import NoSpaceError
from meshinfer.membership.events import Peer
from meshinfer.negotiation.events import Event, ManifestKnown, StageFailed
from meshinfer.planning.cost import StagePlan
from meshinfer.planning.plan import Choice, Plan, RingPlan
from meshinfer.settings import Settings
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import Emit, Submit
from tests.agent.test_capacity import ME, manifest


def agent_in(home: Path) -> Agent:
    settings = Settings("here", device="cpu", threads=1)
    return Agent(settings, Store(Folders(home)), Capacity(settings), Peer(ME, "here", 1, ()))


def plan_of(epoch: int, stop: int) -> Plan:
    choice = Choice("m", manifest().fingerprint(), "fast", 128, 1, 1, ME)
    return Plan(epoch, ME, choice, "stateful", "f16", (RingPlan((StagePlan(ME, 0, stop),)),))


def test_a_model_that_a_command_added_while_the_agent_ran_is_found(tmp_path: Path) -> None:
    agent = agent_in(tmp_path)
    agent.models.look_for_models()
    Store(Folders(tmp_path)).save(manifest())

    async def use() -> None:
        choice = await agent.choose("m", anew=True)
        assert agent.models.local(choice.fingerprint) == manifest()
        await agent.close()

    asyncio.run(use())


def test_a_stage_whose_preparation_fails_in_a_way_nobody_foresaw_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_in(tmp_path)
    agent.models.know(manifest(), manifest().fingerprint())
    plan = plan_of(1, 6)
    told: list[Event] = []

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    async def prepare() -> None:
        monkeypatch.setattr(agent.stages, "prepare", broken)
        monkeypatch.setattr(agent, "_handle", told.append)
        await agent._prepare(plan)

    asyncio.run(prepare())
    failed = [event for event in told if isinstance(event, StageFailed)]
    assert [event.epoch for event in failed] == [1] and "nobody foresaw this" in failed[0].reason


def test_a_model_is_had_as_soon_as_what_was_in_its_way_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, tries = agent_in(tmp_path), 0
    choice = Choice("m", manifest().fingerprint(), "fast", 128, 1, 1, ME)
    told: list[Event] = []

    async def full_at_first(_: Sha256) -> Manifest:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise NoSpaceError(str(tmp_path), 10, 1)
        return manifest()

    async def served(*_: object) -> None:
        return None

    monkeypatch.setattr("meshinfer.agent.agent.ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(agent.exchange, "manifest", full_at_first)
    monkeypatch.setattr(agent.models, "serve", served)
    monkeypatch.setattr(agent, "_handle", told.append)
    agent._measured.set()
    asyncio.run(agent._adopt(choice))
    assert tries == 3 and ManifestKnown(choice.fingerprint) in told


def test_stages_are_compiled_one_after_the_other_and_those_nobody_wants_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_in(tmp_path)
    plans = [plan_of(epoch, stop) for epoch, stop in ((1, 4), (2, 5))]
    compiling, most, closed = 0, 0, 0
    begun, go_on = threading.Event(), threading.Event()

    class Compiled:
        kv_blocks, block_tokens = 4, 16

        def close(self) -> None:
            nonlocal closed
            closed += 1

    def compiled(*_: object) -> Compiled:
        nonlocal compiling, most
        compiling += 1
        most = max(most, compiling)
        begun.set()
        go_on.wait(10.0)
        compiling -= 1
        return Compiled()

    async def nothing(_: object) -> None:
        return None

    async def story() -> None:
        monkeypatch.setattr(agent.stages, "_fetch", nothing)
        monkeypatch.setattr(agent.stages, "_open", compiled)
        first, second = (asyncio.create_task(agent.stages.prepare(p, p.ring.stages[0], manifest())) for p in plans)
        await asyncio.to_thread(begun.wait, 10.0)
        first.cancel()
        await asyncio.sleep(0.02)
        assert not second.done()
        go_on.set()
        assert (await second).blocks == 4 and first.cancelled()

    asyncio.run(story())
    assert (most, closed) == (1, 1)


def test_what_comes_for_a_ring_that_nobody_proposed_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, answers = agent_in(tmp_path), list[object]()
    monkeypatch.setattr(agent, "post", lambda node, message, payloads=(): answers.append(message) or True)
    submit = Submit(epoch=7, number=1, tokens=b"", sampling=None, max_tokens=1)
    agent.received(NodeId("pc-2"), submit, memoryview(b""))
    assert agent._early == [] and isinstance(answers[0], Emit) and answers[0].retry
    agent.negotiation.committed = plan_of(7, 6)
    agent.received(NodeId("pc-2"), submit, memoryview(b""))
    assert len(agent._early) == 1 and len(answers) == 1
