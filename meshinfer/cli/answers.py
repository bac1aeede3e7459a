"""What the commands that ask the mesh share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from meshinfer.errors import InputError, NotReadyError

if TYPE_CHECKING:
    from meshinfer.cli.client import Client

POLL_S = 0.3


def answer_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of sampling, handed on as one mapping `options` of OpenAI's fields, and `wait` in seconds."""

    @click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Longest answer.")
    @click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
    @click.option(
        "--top-p", default=1.0, show_default=True, help="Keep the likeliest tokens of this total probability."
    )
    @click.option("--top-k", default=0, show_default=True, help="Keep this many of the likeliest tokens; 0 keeps all.")
    @click.option("--seed", default=0, show_default=True, help="Draws depend on the seed and the position only.")
    @click.option(
        "--wait", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait for the mesh."
    )
    @wraps(command)
    def collected(
        *args: Any,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        wait: float,
        **others: Any,
    ) -> None:
        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
        }
        command(*args, options=options, wait=wait, **others)

    return collected


def wait_until_ready(client: Client, seconds: float) -> dict[str, Any]:
    """The status of a mesh that can answer. Raises NotReadyError, saying what it is doing, after so many seconds."""
    from meshinfer.cli.show import spinner

    deadline = time.monotonic() + seconds
    status = client.status()
    if status["ready"]:
        return status
    with spinner("waiting for the mesh") as say:
        while not status["ready"] and status["model"] is not None and time.monotonic() < deadline:
            say(f"waiting for the mesh: {status['stage']}")
            time.sleep(POLL_S)
            status = client.status()
    if not status["ready"]:
        raise NotReadyError(f"the mesh is not ready: {status['stage']}")
    return status


def prompt_text(given: str | None, example: str, missing: str = "no prompt") -> str:
    """A prompt, from stdin where it is not given. Raises InputError where there is none, and says it is `missing`."""
    if given is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError(f"{missing}: give one, as in: {example}")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig") if given is None else given
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on stdin is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise InputError(f"the prompt is empty: give one, as in: {example}")
    return text
