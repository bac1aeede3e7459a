"""Print the command of a marked block in README.md: `python tools/readme_command.py test`.

A block is marked by a comment line with its name right before its fence.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def marked_block(text: str, mark: str) -> str:
    """The content of the one fenced block after `<!-- mark -->`. Raises ValueError unless there is exactly one."""
    found = re.findall(rf"^<!-- {re.escape(mark)} -->\n+```[a-z]*\n(.+?)\n```$", text, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"{len(found)} blocks are marked '{mark}', not one")
    return str(found[0])


if __name__ == "__main__":
    sys.stdout.reconfigure(newline="\n")
    print(marked_block(README.read_text("utf-8"), sys.argv[1]))
