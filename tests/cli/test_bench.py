"""`meshinfer bench` on a real model, with numbers so small that they mean nothing."""

from __future__ import annotations

import json

import pytest

from meshinfer.config import Folders
from tests.cli.calls import complaint, meshinfer, succeeded

TINY = ("--prompt-tokens", "8", "--decode-tokens", "8", "--rounds", "1")


def test_every_contender_is_measured(tiny_home: Folders) -> None:
    options = ("--stages", "1,2", "--sequences", "1,2", "--json")
    result = json.loads(succeeded(meshinfer(tiny_home, "bench", "stage", "tiny", *TINY, *options)))
    assert result["model"] == "tiny"
    assert result["options"]["stages"] == [1, 2] and result["options"]["threads"] == 1
    measured = {(row["contender"], row["sequences"]) for row in result["rows"]}
    everywhere = {"plain loop", "genai batching"} | {
        f"{stages}, {kv}" for stages in ("1 stage", "2 stages") for kv in ("paged", "stateful")
    }
    assert measured == {(name, count) for name in everywhere for count in (1, 2)} | {("genai LLMPipeline", 1)}
    for row in result["rows"]:
        assert 0 < row["lowest"] <= row["median"] <= row["highest"]
        assert row["against_plain_loop"] > 0 and row["against_genai"] > 0


def test_the_table_keeps_its_names_in_a_narrow_terminal(tiny_home: Folders) -> None:
    options = ("--stages", "1", "--sequences", "1", "--kv", "paged")
    table = succeeded(meshinfer(tiny_home, "bench", "stage", "tiny", *TINY, *options))
    lines = table.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "plain loop",
        "genai LLMPipeline",
        "genai batching",
        "1 stage, paged",
    ]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonesuch"], "no model 'nonesuch' here (have: tiny)"),
        (["tiny", "--stages", "99"], "tiny has 4 shards: 1 to 4 stages, not 99"),
        (["tiny", "--prompt-tokens", "500"], "the context of tiny holds 512 tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_said_in_one_line(tiny_home: Folders, arguments: list[str], said: str) -> None:
    assert said in complaint(meshinfer(tiny_home, "bench", "stage", *arguments))


@pytest.mark.parametrize("option", [("--stages", "1,x"), ("--sequences", "0"), ("--kv", "paper")])
def test_lists_that_are_none_are_usage_errors(tiny_home: Folders, option: tuple[str, str]) -> None:
    result = meshinfer(tiny_home, "bench", "stage", "tiny", *option)
    assert result.returncode == 2 and f"'{option[1]}'" in result.stderr
