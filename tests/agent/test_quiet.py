"""An agent that has nothing to do takes nothing: no memory, and hardly any time."""

from __future__ import annotations

import numpy as np

from meshinfer.links.health import Health
from meshinfer.membership.state import Membership
from tests.membership.lan import Lan

HOUR_S = 3600.0


def remembered(state: Membership) -> int:
    """How much a node's membership holds, as the length of it written down."""
    return len(repr({name: value for name, value in vars(state).items() if name != "_draw"}))


def test_an_hour_of_membership_leaves_nothing_behind() -> None:
    lan = Lan(seed=3)
    for name in "abcd":
        lan.add(name)
    lan.everyone_hears_of_everyone()
    random = np.random.default_rng(1)

    def a_while(seconds: float) -> int:
        """Adverts come again and again, and now and then another node dies and starts again; what `a` holds then."""
        end = lan.now + seconds
        while lan.now < end:
            lan.everyone_hears_of_everyone()
            if random.random() < 0.1:
                lan.restart("bcd"[random.integers(3)])
            lan.run(20.0)
        lan.run(60.0)
        assert all(names == ["a", "b", "c", "d"] for names in lan.views().values())
        return remembered(lan.nodes["a"].state)

    before = a_while(HOUR_S / 4)
    assert before > 200, "what is measured is there"
    assert a_while(HOUR_S) <= before * 1.05


def test_stamps_that_nobody_echoes_are_forgotten() -> None:
    health = Health()
    for second in range(10_000):
        health.stamp(float(second))
    assert len(health._sent) < 100
