"""`meshinfer run` on real models."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from meshinfer.config import Folders
from meshinfer.shards.store import Store
from tests.cli.calls import command, complaint, flip_byte, listing, meshinfer, succeeded
from tests.signals import hear_control_c

QUESTION = "What is the capital of France?"
MODEL = "smollm2-135m"


@pytest.mark.parametrize("mode", [[], ["--exact"]], ids=["fast", "exact"])
@pytest.mark.parametrize("kv", ["paged", "stateful"])
def test_three_stages_know_the_capital_of_france(smollm2_home: Folders, kv: str, mode: list[str]) -> None:
    result = meshinfer(smollm2_home, "run", MODEL, QUESTION, "--stages", "3", "--kv", kv, *mode)
    assert "Paris" in succeeded(result) and result.stdout.endswith("\n")
    assert result.stderr == ""


def test_exact_mode_gives_the_same_answer_however_it_is_split(smollm2_home: Folders) -> None:
    answers = {
        succeeded(
            meshinfer(smollm2_home, "run", MODEL, "Name a fruit.", "--exact", "--max-tokens", "24", "--stages", stages)
        )
        for stages in ("1", "4")
    }
    assert len(answers) == 1 and len(answers.pop()) > 20


def test_stats_are_one_line_on_stderr(tiny_home: Folders) -> None:
    result = meshinfer(tiny_home, "run", "tiny", "hello", "--raw", "--max-tokens", "5", "--stats")
    assert succeeded(result)
    assert re.fullmatch(
        r"\d+ prompt tokens, 5 answer tokens; loading \d+\.\d\d s, first token \d+\.\d{3} s, then \d+\.\d tokens/s\n",
        result.stderr,
    )


def test_the_prompt_may_come_from_stdin(tiny_home: Folders) -> None:
    options = ("run", "tiny", "--max-tokens", "8", "--exact")
    given = succeeded(meshinfer(tiny_home, *options, "hello 数"))
    assert given == succeeded(meshinfer(tiny_home, *options, stdin="hello 数"))
    assert given != succeeded(meshinfer(tiny_home, *options, stdin="other"))


def test_raw_continues_the_prompt_and_a_system_message_is_heard(tiny_home: Folders) -> None:
    base = ("run", "tiny", "hello", "--max-tokens", "8", "--exact")
    answers = [succeeded(meshinfer(tiny_home, *base, *more)) for more in ([], ["--raw"], ["--system", "be brief"])]
    assert len(set(answers)) == 3


def test_a_seed_makes_draws_that_can_be_repeated(tiny_home: Folders) -> None:
    def draw(seed: str, *more: str) -> str:
        options = ("--max-tokens", "12", "--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--seed", seed)
        return succeeded(meshinfer(tiny_home, "run", "tiny", "hello", "--exact", *options, *more))

    assert draw("1") == draw("1", "--stages", "3") != draw("2")


def test_a_temperature_next_to_nothing_takes_the_likeliest_token(tiny_home: Folders) -> None:
    options = ("run", "tiny", "hello", "--exact", "--max-tokens", "8", "--temperature")
    coldest = meshinfer(tiny_home, *options, "1e-320")
    assert succeeded(coldest) == succeeded(meshinfer(tiny_home, *options, "0")) and coldest.stderr == ""


def test_an_answer_stops_where_the_context_ends(tiny_home: Folders) -> None:
    result = meshinfer(tiny_home, "run", "tiny", "a" * 500, "--raw", "--max-tokens", "100", "--stats")
    succeeded(result)
    prompt, answer = map(int, re.findall(r"(\d+) (?:prompt|answer) tokens", result.stderr))
    assert prompt >= 500 and prompt + answer <= 512


# --- interrupted -----------------------------------------------------------------------------------------------------


@contextmanager
def streaming(folders: Folders) -> Iterator[subprocess.Popen[bytes]]:
    """A long answer of which the beginning has been printed."""
    words = command(folders, "run", MODEL, "Tell a long story.", "--max-tokens", "2000")
    hears = None if os.name == "nt" else hear_control_c
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(words, preexec_fn=hears, **pipes) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(1)
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(os.name == "nt", reason="a process alone cannot be sent Ctrl-C on Windows")
def test_control_c_ends_a_stream_quietly(smollm2_home: Folders) -> None:
    with streaming(smollm2_home) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().strip() == ""


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe looks different on Windows")
def test_a_reader_that_goes_away_ends_a_stream_quietly(smollm2_home: Folders) -> None:
    with streaming(smollm2_home) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "hi", "--stages", "0"], "tiny has 4 shards: 1 to 4 stages, not 0"),
        (["tiny", "hi", "--stages", "99"], "tiny has 4 shards: 1 to 4 stages, not 99"),
        (["tiny", "hi", "--max-tokens", "0"], "max-tokens is 1 or more, not 0"),
        (["tiny", "hi", "--max-tokens", "-3"], "max-tokens is 1 or more, not -3"),
        (["tiny", "hi", "--temperature", "-0.5"], "temperature is 0 to 100, not -0.5"),
        (["tiny", "hi", "--temperature", "nan"], "temperature is 0 to 100, not nan"),
        (["tiny", "hi", "--top-p", "0"], "top-p is above 0 and at most 1, not 0.0"),
        (["tiny", "hi", "--top-k", "-1"], "top-k is 0 (off) or more, not -1"),
        (["tiny", "hi", "--seed", "-1"], "the seed is 0 to 18446744073709551615, not -1"),
        (["tiny", "hi", "--seed", str(1 << 64)], f"the seed is 0 to 18446744073709551615, not {1 << 64}"),
        (["tiny", "hi", "--device", "toaster"], "no device 'toaster' here; found: CPU ("),
        (["tiny", ""], "the prompt is empty"),
        (["tiny", " \n"], "the prompt is empty"),
        (["tiny", "", "--raw"], "the prompt is empty"),
        (["tiny"], "the prompt is empty"),
        (["nonesuch", "hi"], "no model 'nonesuch' here (have: tiny); add one with: meshinfer model add"),
        (["no such model", "hi"], "'no such model' is no model name: 1 to 64 of a-z, 0-9,"),
        (["./m.gguf", "hi"], "'./m.gguf' is a source, not the name of a model here: meshinfer model add ./m.gguf"),
        (["tiny", "hi", "--kv", "paged", "--kv-budget", "1000000000"], "of KV cache failed: not enough memory"),
        (["con", "hi"], "'con' is no model name: Windows keeps 'con' for itself"),
        (["", "hi"], "'' is no model name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_in_one_line(tiny_home: Folders, arguments: list[str], said: str) -> None:
    before = listing(tiny_home)
    assert said in complaint(meshinfer(tiny_home, "run", *arguments))
    assert listing(tiny_home) == before


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(tiny_home: Folders) -> None:
    said = complaint(meshinfer(tiny_home, "run", "tiny", "--raw", stdin="a" * 600))
    assert said == "error: the prompt has 601 tokens, the context of this model holds 512"


def test_a_prompt_that_is_no_text_is_refused(tiny_home: Folders) -> None:
    assert "the prompt on stdin is not UTF-8" in complaint(meshinfer(tiny_home, "run", "tiny", stdin=b"\xff\xfe"))


@pytest.mark.parametrize("kv", ["paged", "stateful"])
@pytest.mark.parametrize(("budget", "stages", "room"), [("3", "1", r"[1-9]\d*"), ("1", "3", r"\d+")])
def test_a_kv_budget_that_is_too_small_says_what_is_needed(
    smollm2_home: Folders, budget: str, stages: str, room: str, kv: str
) -> None:
    arguments = ("run", MODEL, "hi", "--max-tokens", "200", "--kv", kv, "--stages", stages)
    said = complaint(meshinfer(smollm2_home, *arguments, "--kv-budget", budget))
    found = re.search(rf"of \d+ tokens needs (\d+\.\d) MB of KV cache, the budget has room for {room} tokens", said)
    assert found, said
    succeeded(meshinfer(smollm2_home, *arguments, "--kv-budget", str(math.ceil(float(found[1]) * 1.05))))


def test_a_damaged_shard_is_named_with_its_hash(tiny_home: Folders, copy_home: Callable[[Folders], Folders]) -> None:
    folders = copy_home(tiny_home)
    store = Store(folders)
    ref = store.load("tiny").shards[1].weights
    flip_byte(store.path(ref))
    said = complaint(meshinfer(folders, "run", "tiny", "hi"))
    assert ref.sha256 in said and ref.name in said and "damaged" in said


def test_a_damaged_tokenizer_is_named(tiny_home: Folders, copy_home: Callable[[Folders], Folders]) -> None:
    folders = copy_home(tiny_home)
    store = Store(folders)
    for ref in store.load("tiny").tokenizer:
        flip_byte(store.path(ref))
        said = complaint(meshinfer(folders, "run", "tiny", "hi"))
        assert ref.name in said and ref.sha256 in said
        flip_byte(store.path(ref))


def test_a_missing_shard_is_named(tiny_home: Folders, copy_home: Callable[[Folders], Folders]) -> None:
    folders = copy_home(tiny_home)
    store = Store(folders)
    ref = store.load("tiny").shards[2].graph
    store.path(ref).unlink()
    assert f"{ref.name} is missing" in complaint(meshinfer(folders, "run", "tiny", "hi"))
