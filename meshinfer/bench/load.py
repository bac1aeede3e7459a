"""Users of one agent, in a process of their own on its host: `python -m meshinfer.bench.load HOME USERS TOKENS`.

Every user streams one completion. Printed as JSON are the tokens/s of all of them together while all of them stream,
and the agent's status afterwards. With 0 users it is the status alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

SKIPPED = 4
"""Tokens of each user before the clock starts: the first ones of a shape are slow."""


async def measure(api: str, users: int, tokens: int) -> float:
    """Tokens/s of all users together."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        arrivals = await asyncio.gather(*(_stream(session, api, user, tokens) for user in range(users)))
    shortest = min(len(times) for times in arrivals)
    if shortest <= SKIPPED + 1:
        raise SystemExit(f"an answer ended after {shortest} tokens: there is nothing to measure")
    begin = max(times[SKIPPED] for times in arrivals)
    end = min(times[-1] for times in arrivals)
    count = sum(begin < at <= end for times in arrivals for at in times)
    return count / (end - begin)


async def _stream(session: aiohttp.ClientSession, api: str, user: int, tokens: int) -> list[float]:
    """When each token came."""
    prompt = f"Chapter {user + 1}. Once upon a time, in a land far away, there was a"
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    times = []
    async with session.post(f"{api}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(event["error"]["message"])
                times.append(time.perf_counter())
    return times


async def status(api: str, token: str, seconds: float) -> dict[str, Any]:
    """The status of an agent; its timing is that of the last so many seconds."""
    headers = {"X-Meshinfer-Token": token}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{api}/mesh/status", params={"seconds": str(seconds)}) as response,
    ):
        response.raise_for_status()
        return dict(await response.json())


async def _main(home: Path, users: int, tokens: int) -> None:
    agent = json.loads((home / "agent.json").read_bytes())
    began = time.monotonic()
    rate = await measure(agent["api"], users, tokens) if users else 0.0
    said = await status(agent["api"], agent["token"], time.monotonic() - began)
    print(json.dumps({"rate": rate, "status": said}))


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
