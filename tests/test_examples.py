"""Every example runs and does what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshinfer.config import Folders
from tests.tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60


def run(home: Folders, name: str, *arguments: str) -> str:
    """What an example prints."""
    environment = os.environ | {"MESHINFER_HOME": str(home.home), "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout


def test_list_shards(tiny_home: Folders) -> None:
    lines = run(tiny_home, "list_shards.py", str(tiny_home.home.parent / "tiny.gguf")).splitlines()
    assert lines[0].startswith("tiny: 4 shards, fingerprint ")
    assert [line.split()[1] for line in lines[1:]] == ["embedding", "layer", "layer", "head"]
    assert lines[1].endswith("gives hidden_states [-1, -1, 256]")


def test_two_stages(smollm2_home: Folders) -> None:
    assert "Paris" in run(smollm2_home, "two_stages.py")


def test_four_at_once(smollm2_home: Folders) -> None:
    lines = run(smollm2_home, "four_at_once.py").splitlines()
    assert len(lines) == 4 and lines[0].startswith("The capital of France is Paris")
    assert all(len(line) > 20 for line in lines)


def test_save_answers(smollm2_home: Folders, tmp_path: Path) -> None:
    questions, answers = tmp_path / "questions.txt", tmp_path / "answers.json"
    questions.write_text("What is the capital of France?\nName a fruit.\n", "utf-8")
    assert run(smollm2_home, "save_answers.py", str(questions), str(answers)) == f"2 answers in {answers}\n"
    saved = json.loads(answers.read_text("utf-8"))
    assert "Paris" in saved[0]["answer"] and saved[1]["answer"]
    assert all(0 < entry["tokens"] <= 32 for entry in saved)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_run_by_a_test(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES
    assert f"def test_{path.stem}(" in Path(__file__).read_text("utf-8")
