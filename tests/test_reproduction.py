"""The runner of the claims works; what its tiny numbers say means nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshinfer.config import Folders
from meshinfer.engine.devices import core
from meshinfer.models.check import unsplit_graph
from meshinfer.shards.store import Store
from reproduction.run import CLAIMS, variants
from tests.tree import ROOT

TINY = ("--rounds", "2", "--decode-tokens", "8")


def run(home: Folders, out: Path, claim: str, *options: str) -> dict[str, Any]:
    """The JSON that a measurement of the tiny model writes."""
    source = home.home.parent / "tiny.gguf"
    command = [sys.executable, str(ROOT / "reproduction" / "run.py"), claim, "--source", str(source), "--out", str(out)]
    environment = os.environ | {"MESHINFER_HOME": str(home.home), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([*command, *TINY, *options], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    written = json.loads((out / f"{claim}.json").read_text("utf-8"))
    assert written["claim"] == claim and written["model"]["name"] == "tiny"
    assert isinstance(written["rows"], list)
    return written


def test_the_reorder_claim(tiny_home: Folders, tmp_path: Path) -> None:
    rows = run(tiny_home, tmp_path, "reorder", "--contexts", "16,64")["rows"]
    assert [row["context_tokens"] for row in rows] == [16, 64]
    assert all(row["speedup"] > 0 and set(row["ms_a_token"]) == {"with", "without"} for row in rows)


def test_the_stages_claim(tiny_home: Folders, tmp_path: Path) -> None:
    written = run(tiny_home, tmp_path, "stages", "--stages", "1,2")
    assert written["settings"]["stages"] == [1, 2]
    assert {"plain loop", "1 stage, paged", "2 stages, stateful"} <= {row["contender"] for row in written["rows"]}


def test_the_gather_is_taken_out_and_put_back(tiny_home: Folders) -> None:
    def gathers(path: Path) -> int:
        model = core().read_model(path)
        inputs = [p for p in model.get_parameters() if "beam_idx" in p.output(0).get_names()]
        return sum(len(p.output(0).get_target_inputs()) for p in inputs)

    store = Store(tiny_home)
    with unsplit_graph(store, store.load("tiny")) as graph, variants(graph) as paths:
        assert {name: gathers(path) for name, path in paths.items()} == {"without": 0, "with": 4}


def test_every_measured_claim_has_its_command() -> None:
    text = (ROOT / "reproduction" / "CLAIMS.md").read_text("utf-8")
    named = set(re.findall(r"`python reproduction/run.py (\w+)`", text))
    assert named == set(CLAIMS)
