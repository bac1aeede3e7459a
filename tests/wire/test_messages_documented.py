"""docs/wire.md names every message, and none that does not exist."""

from __future__ import annotations

import re
from typing import get_args

from meshinfer.wire.messages import AnyMessage
from tests.tree import ROOT


def test_the_table_of_messages_is_complete() -> None:
    text = (ROOT / "docs" / "wire.md").read_text("utf-8")
    table = text.split("## Messages", 1)[1].split("## A step", 1)[0]
    named = {tag for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for tag in re.findall(r"`([\w-]+)`", row)}
    assert named == {kind.__struct_config__.tag for kind in get_args(AnyMessage)}
