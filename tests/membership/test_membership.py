"""Stories of nodes that come, go, hang, hide and restart: in the end all see the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.membership.events import (
    Address,
    AddressesHinted,
    AdvertWithdrawn,
    Dial,
    DialFailed,
    LinkId,
    LinkLost,
    LinkOpened,
    Peer,
    TimePassed,
)
from meshinfer.membership.state import DEAD_AFTER_S, Membership
from meshinfer.types import NodeId
from tests.membership.lan import Lan

NAMES = [f"pc-{n}" for n in range(6)]

happenings = st.sampled_from(["kill", "restart", "cut", "mend", "wait"])
stories = st.lists(st.tuples(happenings, st.integers(0, 5), st.integers(0, 5)), max_size=12)


def office(count: int, seed: int = 0) -> Lan:
    lan = Lan(seed)
    for name in NAMES[:count]:
        lan.add(name)
    return lan


def agree(lan: Lan) -> None:
    """Every living node sees all living ones, over one link each."""
    living = sorted(name for name, node in lan.nodes.items() if node.alive)
    assert lan.views() == dict.fromkeys(living, living)
    for name in living:
        ends = [other for other, _ in lan.nodes[name].links.values() if lan.nodes[other].alive]
        assert sorted(ends) == [other for other in living if other != name]


@pytest.mark.parametrize("seed", range(5))
def test_all_that_hear_of_each_other_are_linked_within_two_seconds(seed: int) -> None:
    lan = office(6, seed)
    lan.everyone_hears_of_everyone()
    lan.run(2)
    agree(lan)


def test_one_known_address_is_enough_to_meet_everybody() -> None:
    lan = office(5)
    for name in NAMES[1:5]:
        lan.hint(name, NAMES[0], with_id=False)
    lan.run(4)
    agree(lan)


def test_a_dead_node_is_gone_within_two_seconds_and_stays_away() -> None:
    lan = office(4)
    lan.everyone_hears_of_everyone()
    lan.run(3)
    lan.kill(NAMES[1])
    lan.run(2)
    agree(lan)
    lan.run(60)
    agree(lan)


def test_a_node_that_started_again_takes_its_place() -> None:
    lan = office(4)
    lan.everyone_hears_of_everyone()
    lan.run(3)
    lan.restart(NAMES[2])
    lan.hint(NAMES[2], NAMES[0])
    lan.run(4)
    agree(lan)


def test_where_only_one_side_can_dial_there_is_a_link_all_the_same() -> None:
    for blocked in [(NAMES[0], NAMES[1]), (NAMES[1], NAMES[0])]:
        lan = office(2)
        lan.deaf.add(blocked)
        lan.everyone_hears_of_everyone()
        lan.run(4)
        agree(lan)


def test_two_halves_meet_again() -> None:
    lan = office(6)
    lan.everyone_hears_of_everyone()
    lan.run(3)
    left, right = NAMES[:3], NAMES[3:]
    lan.blocked = {(a, b) for a in left for b in right} | {(b, a) for a in left for b in right}
    lan.run(5)
    assert lan.views() == {name: left if name in left else right for name in NAMES}
    lan.run(100)
    lan.blocked = set()
    lan.run(50)
    agree(lan)


def test_a_node_that_finds_itself_leaves_it_at_that() -> None:
    lan = office(1)
    lan.hint(NAMES[0], NAMES[0], with_id=False)
    lan.run(5)
    assert lan.nodes[NAMES[0]].links == {} and lan.nodes[NAMES[0]].twins == []
    again = lan.nodes[NAMES[0]].state.handle(AddressesHinted((lan.nodes[NAMES[0]].address,)), lan.now)
    assert again == []


def test_one_of_two_twins_becomes_another_node() -> None:
    lan = Lan()
    lan.add("first", id="same", incarnation=5)
    lan.add("second", id="same", incarnation=9)
    lan.hint("first", "second", with_id=False)
    lan.run(3)
    assert [peer.name for peer in lan.nodes["second"].twins] == ["first"] and lan.nodes["first"].twins == []


def test_who_says_goodbye_is_not_called_again() -> None:
    me = Peer(NodeId("a"), "a", 1, ())
    other = Peer(NodeId("b"), "b", 2, (Address("10.0.0.2", 7000),))
    state = Membership(me, lambda: 0.5)
    state.handle(LinkOpened(LinkId(1), other, None), 0.0)
    assert [peer.name for peer in state.members] == ["a", "b"]
    state.handle(LinkLost(LinkId(1), left=True), 1.0)
    assert not any(isinstance(i, Dial) for t in range(100) for i in state.handle(TimePassed(), 1.0 + t))


def test_a_node_nobody_advertises_is_forgotten_in_the_end() -> None:
    state = Membership(Peer(NodeId("a"), "a", 1, ()), lambda: 0.5)
    pending = state.handle(AddressesHinted((Address("10.0.0.2", 7000),), NodeId("b")), 0.0)
    state.handle(AdvertWithdrawn(NodeId("b")), 0.0)
    dials = 0
    for second in range(2000):
        for instruction in [*pending, *state.handle(TimePassed(), float(second))]:
            if isinstance(instruction, Dial):
                dials += 1
                state.handle(DialFailed(instruction.addresses), float(second))
        pending = []
    assert 5 < dials < 20


def test_heartbeats_go_out_though_nothing_else_does() -> None:
    lan = office(2)
    lan.everyone_hears_of_everyone()
    lan.run(2)
    for _ in range(20):
        lan.run(DEAD_AFTER_S)
        agree(lan)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 30),
    story=st.lists(
        st.tuples(st.sampled_from(["kill", "restart", "cut", "mend", "wait"]), st.integers(0, 5), st.integers(0, 5)),
        max_size=12,
    ),
)
def test_whatever_happened_those_left_agree_when_it_is_over(seed: int, story: list[tuple[str, int, int]]) -> None:
    lan = office(6, seed)
    lan.everyone_hears_of_everyone()
    for what, one, other in story:
        if what == "kill" and sum(node.alive for node in lan.nodes.values()) > 2:
            lan.kill(NAMES[one])
        elif what == "restart":
            lan.restart(NAMES[one])
            lan.hint(NAMES[one], *(name for name in NAMES if name != NAMES[one]))
        elif what == "cut":
            lan.blocked |= {(NAMES[one], NAMES[other]), (NAMES[other], NAMES[one])}
        elif what == "mend":
            lan.blocked = set()
        lan.run(0.7)
    lan.blocked = set()
    lan.run(120)
    agree(lan)
