"""What an agent knows of the models that are here."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshinfer.agent.agent import Agent
from meshinfer.agent.capacity import Capacity
from meshinfer.config import Folders
from meshinfer.membership.events import Peer
from meshinfer.settings import Settings
from meshinfer.shards.store import Store
from meshinfer.types import NodeId
from tests.agent.test_capacity import manifest


def test_a_model_that_a_command_added_while_the_agent_ran_is_found(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    settings = Settings("here", device="cpu", threads=1)
    agent = Agent(settings, Store(folders), Capacity(settings), Peer(NodeId("me"), "here", 1, ()))
    agent.models.look_for_models()
    Store(folders).save(manifest())

    async def use() -> None:
        choice = await agent.choose("m", anew=True)
        assert agent.models.local(choice.fingerprint) == manifest()
        await agent.close()

    asyncio.run(use())
