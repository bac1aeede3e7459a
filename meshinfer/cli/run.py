"""`meshinfer run`: one answer from a model in this process, streamed."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

import click

from meshinfer.cli.answers import prompt_text
from meshinfer.cli.show import progress_bars, spinner
from meshinfer.cli.words import plural
from meshinfer.config import Folders


@click.command("run")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--stages", default=1, show_default=True, help="Stages to split the model into.")
@click.option("--kv", type=click.Choice(["paged", "stateful"]), help="KV back end.  [default: the model's best]")
@click.option("--exact", is_flag=True, help="f32 everywhere: the tokens of the unsplit model, whatever the split.")
@click.option("--max-tokens", default=512, show_default=True, help="Longest answer.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", default=1.0, show_default=True, help="Keep the likeliest tokens of this total probability.")
@click.option("--top-k", default=0, show_default=True, help="Keep this many of the likeliest tokens; 0 keeps all.")
@click.option("--seed", default=0, show_default=True, help="Draws depend on the seed and the position only.")
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--device", default="cpu", show_default=True, help="Device to compile for; auto takes the best one.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Inference threads.  [default: all cores]")
@click.option("--kv-budget", type=click.IntRange(1, 1 << 30), help="MB of KV cache.  [default: what is needed]")
@click.option("--stats", is_flag=True, help="Print speed on stderr.")
@click.pass_obj
def command(
    folders: Folders,
    model: str,
    prompt: str | None,
    stages: int,
    kv: str | None,
    exact: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    system: str | None,
    raw: bool,
    device: str,
    threads: int | None,
    kv_budget: int | None,
    stats: bool,
) -> None:
    """Ask MODEL one question and stream its answer. The PROMPT is read from stdin where it is not given.

    A known alias is added first where it is not here yet.
    """
    from meshinfer.engine.sampling import Sampling
    from meshinfer.models.chat import Chat, ChatOptions
    from meshinfer.types import kv_backend

    text = prompt_text(prompt, 'meshinfer run smollm2-135m "Why?"', f"no prompt for the model '{model}'")
    options = ChatOptions(
        stages=stages,
        kv=kv_backend(kv) if kv else None,
        precision="exact" if exact else "fast",
        device=device,
        threads=threads,
        kv_budget_bytes=kv_budget * 1_000_000 if kv_budget else None,
    )
    sampling = Sampling(temperature, top_k, top_p, seed)
    with progress_bars() as progress:
        chat = Chat.prepare(folders, model, options, progress)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    started = time.monotonic()
    with ExitStack() as stack:
        with spinner(f"compiling {plural(stages, 'stage')}"):
            answer = stack.enter_context(chat.answer(messages, sampling, max_tokens, raw=raw))
        ready = time.monotonic()
        first = ready
        for piece in answer:
            first = time.monotonic() if first == ready else first
            click.echo(piece, nl=False)
        click.echo()
        ended = time.monotonic()
    if answer.tokens >= answer.room and sys.stderr.isatty():
        click.echo(f"(stopped after {plural(answer.tokens, 'token')}: --max-tokens, or the model's context)", err=True)
    if stats:
        tokens = answer.tokens
        rate = (tokens - 1) / (ended - first) if tokens > 1 and ended > first else 0.0
        click.echo(
            f"{answer.prompt_tokens} prompt tokens, {tokens} answer tokens; loading {ready - started:.2f} s, "
            f"first token {first - ready:.3f} s, then {rate:.1f} tokens/s",
            err=True,
        )
