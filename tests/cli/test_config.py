"""`meshinfer config`: what is set, where from, and nothing secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshinfer.cli.main import main
from meshinfer.settings import KEYS

ALL = [
    *("--model", "m", "--name", "n", "--api", "0.0.0.0:1", "--port", "0", "--join", "JOIN-CODE", "--peer", "a"),
    *("--peer", "b:1", "--memory", "6GB", "--device", "cpu", "--exact", "--interface", "eth0", "--threads", "2"),
    *("--context", "9", "--users", "2", "--api-key", "API-KEY", "--no-mdns"),
]


def config(home: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["--home", str(home), "config", *options])


def as_json(home: Path, *options: str) -> dict[str, Any]:
    result = config(home, "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_option_is_a_key_and_arrives(tmp_path: Path) -> None:
    shown = as_json(tmp_path, *ALL)
    assert list(shown) == list(KEYS)
    assert {entry["from"] for entry in shown.values()} == {"command line"}
    values = {key: entry["value"] for key, entry in shown.items()}
    assert values["api"] == "0.0.0.0:1" and values["peer"] == ["a:7420", "b:1"] and values["interface"] == ["eth0"]
    assert values["port"] == 0 and values["memory"] == 6_000_000_000
    assert values["exact"] is True and values["mdns"] is False


def test_options_that_are_not_given_leave_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('exact = true\nmdns = false\npeer = ["a"]\nusers = 3\n')
    shown = as_json(tmp_path)
    assert {key for key, entry in shown.items() if entry["from"] == str(file)} == {"exact", "mdns", "peer", "users"}
    shown = as_json(tmp_path, "--no-exact", "--mdns", "--peer", "b")
    assert [shown[key]["value"] for key in ("exact", "mdns", "peer", "users")] == [False, True, ["b:7420"], 3]
    other = tmp_path / "other.toml"
    other.write_text("users = 4")
    assert as_json(tmp_path, "--config", str(other))["users"] == {"value": 4, "from": str(other)}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_secrets_are_hidden(tmp_path: Path, form: list[str]) -> None:
    result = config(tmp_path, *ALL, *form)
    assert result.exit_code == 0 and result.stdout.count("********") == 2
    assert "JOIN-CODE" not in result.output and "API-KEY" not in result.output


def test_the_table(tmp_path: Path) -> None:
    lines = [line.split() for line in config(tmp_path, "--memory", "6GB", "--exact").stdout.splitlines()]
    assert lines[0] == ["key", "value", "from"] and len(lines) == len(KEYS) + 1
    assert ["memory", "6.0", "GB", "command", "line"] in lines
    assert ["exact", "true", "command", "line"] in lines
    assert ["peer", "-", "default"] in lines


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    result = config(tmp_path, "--memory", "lots")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --memory: 'lots' is not a size: say 6GB, 800MB, 6GiB, or a number of bytes\n"
