"""Labs for tests, skipped with a reason where a lab cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tools.netlab import Netlab
from tools.netlab_system import NetlabError, require_tools

MakeLab = Callable[[int], Netlab]


@pytest.fixture
def make_lab() -> Iterator[MakeLab]:
    """Makes labs of so many hosts that are gone after the test."""
    try:
        require_tools()
    except NetlabError as error:
        pytest.skip(str(error))
    with ExitStack() as labs:
        yield lambda hosts: labs.enter_context(Netlab(hosts))
