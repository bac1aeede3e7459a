"""Stories of an office that has to agree: in the end all serve one plan."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshinfer.negotiation.events import RingBroken
from meshinfer.negotiation.state import EXCLUDED_S, NO_MODEL, PATIENCE_S, Negotiation, common_pool
from meshinfer.planning.plan import Pool
from meshinfer.types import NodeId
from meshinfer.wire.messages import Accept, Chosen, Commit, Prepare, Prepared, Propose
from tests.negotiation.office import Office, choice, office

FIRST_S = 12.0
AGAIN_S = 25.0
"""After any trouble: to notice it, to wait for who does not answer, to plan and to prepare."""


def settled(count: int, seed: int = 0, memory: int = 4) -> Office:
    """An office that serves, and has done so for a while."""
    mesh = office(count, seed, memory)
    mesh.run_until(mesh.agreed, within=FIRST_S)
    mesh.run(20)
    assert mesh.agreed(), mesh.describe()
    return mesh


@pytest.mark.parametrize("count", [2, 3, 5, 16])
@pytest.mark.parametrize("seed", range(4))
def test_all_serve_one_plan_and_then_nothing_happens(count: int, seed: int) -> None:
    mesh = settled(count, seed, memory=8)
    assert len(mesh.carriers) == min(count, 12)
    before = mesh.plan.epoch, sum(n for kind, n in mesh.messages.items() if kind != "Report")
    start = mesh.now
    mesh.run(60)
    assert mesh.plans_since(start) == 0
    assert before == (mesh.plan.epoch, sum(n for kind, n in mesh.messages.items() if kind != "Report"))


def test_an_office_needs_few_plans_to_begin() -> None:
    assert max(len(settled(5, seed).plans) for seed in range(8)) <= 4


def test_numbers_that_waver_are_no_reason_to_plan_again() -> None:
    for seed in range(4):
        mesh = Office(seed)
        mesh.wavering = 0.1
        for number in range(4):
            mesh.add(f"pc-{number:02}", 1499)  # 1500 would be rounded another way
        mesh.use("pc-00", choice())
        mesh.run(30)
        start = mesh.now
        mesh.run(60)
        assert mesh.agreed() and mesh.plans_since(start) == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_cannot_prepare_is_left_out_until_it_can(seed: int) -> None:
    mesh = Office(seed)
    for number in range(4):
        mesh.add(f"pc-{number:02}", 6)
    mesh.broken[NodeId("pc-02")] = "its device is gone"
    mesh.use("pc-00", choice())
    took = mesh.run_until(mesh.agreed, within=AGAIN_S)
    assert mesh.carriers == {"pc-00", "pc-01", "pc-03"} and took < EXCLUDED_S
    mesh.broken.clear()
    mesh.run_until(lambda: mesh.agreed() and "pc-02" in mesh.carriers, within=EXCLUDED_S + AGAIN_S)


def test_a_node_that_never_can_is_asked_less_and_less() -> None:
    mesh = Office(1)
    for number in range(4):
        mesh.add(f"pc-{number:02}", 6)
    mesh.broken[NodeId("pc-02")] = "its device is gone"
    mesh.use("pc-00", choice())
    mesh.run(600)
    assert mesh.carriers == {"pc-00", "pc-01", "pc-03"}
    assert 3 <= sum(node == "pc-02" for _, node, _ in mesh.prepared) <= 7
    epoch = mesh.plan.epoch
    mesh.run(200)
    assert {plan.epoch for plan in mesh.nodes[NodeId("pc-00")].served[-2:]} >= {epoch}


def test_a_failed_attempt_at_a_better_ring_does_not_cost_the_one_that_works() -> None:
    mesh = settled(3, memory=4)
    first = mesh.plan
    mesh.broken[NodeId("pc-01")] = "two stages are too much for its memory"
    mesh.add("pc-03", 4)
    mesh.run(15)
    assert mesh.plan == first
    mesh.broken.clear()
    mesh.run_until(lambda: mesh.agreed() and len(mesh.carriers) == 4, within=EXCLUDED_S + AGAIN_S)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("after", [0.5, 2.0, 4.0, 8.0])
def test_a_leader_that_dies_at_any_moment_is_replaced(after: float, seed: int) -> None:
    mesh = office(4, seed, memory=6)
    mesh.run(after)
    if mesh.living[1].state.choice is None:
        mesh.run(1)
    mesh.kill("pc-00")
    mesh.run_until(lambda: mesh.agreed() and mesh.carriers == {"pc-01", "pc-02", "pc-03"}, within=AGAIN_S)


def test_a_dead_node_costs_little_even_where_another_one_cannot_measure_itself() -> None:
    mesh = Office(3)
    mesh.never_measures.add(NodeId("pc-04"))
    for number in range(5):
        mesh.add(f"pc-{number:02}", 6)
    mesh.use("pc-00", choice())
    mesh.run(30)
    plan = mesh.nodes[NodeId("pc-00")].state.committed
    assert plan is not None
    mesh.kill("pc-03")
    start = len(mesh.plans)
    assert mesh.run_until(lambda: len(mesh.plans) > start, within=10) < PATIENCE_S / 2


@pytest.mark.parametrize("seed", range(6))
def test_two_halves_that_meet_again_keep_one_plan(seed: int) -> None:
    mesh = settled(6, seed, memory=6)
    left, right = ["pc-00", "pc-01", "pc-02"], ["pc-03", "pc-04", "pc-05"]
    mesh.cut(left, right)
    mesh.run(25)
    plans = [mesh.nodes[NodeId(name)].state.committed for name in ("pc-00", "pc-03")]
    assert [set(plan.nodes) for plan in plans if plan] == [set(left), set(right)]
    mesh.mend()
    mesh.run_until(mesh.agreed, within=5)
    assert mesh.plan in plans
    mesh.run_until(lambda: mesh.agreed() and len(mesh.carriers) == 6, within=AGAIN_S)


def test_a_plan_that_lost_a_node_does_not_take_the_place_of_one_that_works() -> None:
    mesh = settled(6, memory=4)
    mesh.cut(["pc-00", "pc-01", "pc-02"], ["pc-03", "pc-04", "pc-05"])
    mesh.run(25)
    for _ in range(3):
        mesh.restart("pc-04")
        mesh.run(25)
    mesh.kill("pc-05")
    mesh.run(10)  # what is left of the right half cannot serve
    works, lost = (mesh.nodes[NodeId(name)].state.committed for name in ("pc-00", "pc-03"))
    assert works is not None and lost is not None and lost.epoch > works.epoch
    mesh.mend()
    mesh.run(1.5)
    assert mesh.nodes[NodeId("pc-00")].state.committed == works
    mesh.run_until(mesh.agreed, within=AGAIN_S)


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("name", ["pc-00", "pc-01", "pc-03"])
@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_started_again_gets_a_stage_again(name: str, noticed: bool, seed: int) -> None:
    mesh = settled(4, seed, memory=4)
    mesh.restart(name, noticed=noticed)
    mesh.run_until(lambda: mesh.agreed() and name in mesh.carriers, within=AGAIN_S)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_node_without_layers_that_started_again_knows_the_plan(noticed: bool) -> None:
    mesh = settled(3, memory=4)
    mesh.add("pc-03", 0)
    mesh.run_until(mesh.agreed, within=10)
    mesh.restart("pc-03", noticed=noticed)
    mesh.run(1)
    mesh.run_until(mesh.agreed, within=10)


@pytest.mark.parametrize(("a", "b"), [("pc-00", "pc-01"), ("pc-01", "pc-02")])
def test_a_link_of_the_ring_that_breaks_and_comes_back_makes_a_new_plan(a: str, b: str) -> None:
    """What was on its way over the old link is lost: the steps of that epoch never come round."""
    mesh = settled(3, memory=4)
    epoch = mesh.plan.epoch
    mesh.blink(a, b)
    mesh.run_until(lambda: mesh.agreed() and mesh.plan.epoch > epoch, within=AGAIN_S)
    assert len(mesh.carriers) == 3
    start = mesh.now
    mesh.run(60)
    assert mesh.plans_since(start + 10) == 0


def test_a_stage_that_fails_while_it_serves_is_left_out() -> None:
    mesh = settled(3, memory=12)
    epoch = mesh.plan.epoch
    for _ in range(3):  # it says so again and again
        mesh.happen(mesh.nodes[NodeId("pc-01")], RingBroken(epoch, "its device is gone", stage=True))
        mesh.run(0.25)
    mesh.run_until(lambda: mesh.agreed() and mesh.plan.epoch > epoch, within=10)
    assert mesh.carriers == {"pc-00", "pc-02"}
    mesh.run_until(lambda: mesh.agreed() and len(mesh.carriers) == 3, within=EXCLUDED_S + AGAIN_S)


def test_a_ring_that_is_said_to_be_broken_on_and_on_is_planned_anew_all_the_same() -> None:
    mesh = settled(3, memory=12)
    epoch = mesh.plan.epoch
    for _ in range(40):
        if mesh.nodes[NodeId("pc-01")].serving == epoch:
            mesh.happen(mesh.nodes[NodeId("pc-01")], RingBroken(epoch, "a step does not come round"))
        mesh.run(0.25)
    assert mesh.plan.epoch == epoch + 1 and len(mesh.carriers) == 3


@pytest.mark.parametrize("kind", [Propose, Accept, Prepare, Prepared, Commit, Chosen])
def test_any_one_message_may_be_lost(kind: type[msgspec.Struct]) -> None:
    mesh = Office(2)
    lost: list[NodeId] = []

    def lose(source: NodeId, target: NodeId, message: msgspec.Struct) -> bool:
        if isinstance(message, kind) and not lost and kind is not Chosen:
            lost.append(target)
            return True
        return False

    mesh.lose = lose
    for number in range(3):
        mesh.add(f"pc-{number:02}", 4)
    mesh.use("pc-00", choice())
    mesh.run_until(mesh.agreed, within=AGAIN_S)
    assert lost or kind is Chosen


def test_a_node_without_layers_that_missed_the_plan_is_told_again() -> None:
    mesh = Office(2)
    idle = mesh.add("pc-03", 0).id
    lost: list[msgspec.Struct] = []

    def lose(source: NodeId, target: NodeId, message: msgspec.Struct) -> bool:
        if isinstance(message, Commit) and target == idle and not lost:
            lost.append(message)
            return True
        return False

    for number in range(3):
        mesh.add(f"pc-{number:02}", 4)
    mesh.use("pc-00", choice())
    mesh.lose = lose
    mesh.run_until(lambda: bool(lost), within=FIRST_S)
    mesh.run_until(mesh.agreed, within=5)
    assert len(mesh.nodes[NodeId("pc-00")].served) == 1


@pytest.mark.parametrize("seed", range(6))
def test_all_have_the_time_to_measure_themselves_with_a_new_model(seed: int) -> None:
    mesh = settled(4, seed)
    planned = len(mesh.plans)
    mesh.use("pc-02", choice("second", counter=2, node="pc-02"))
    mesh.run_until(lambda: mesh.agreed() and mesh.plan.choice.name == "second", within=AGAIN_S)
    order = mesh.plans[planned][2]
    assert {report.fingerprint for report in order.reports.values()} == {"second"}


def test_the_last_model_that_was_chosen_wins_everywhere() -> None:
    mesh = settled(4, memory=4)
    mesh.use("pc-03", choice("second", counter=2, node="pc-03"))
    mesh.use("pc-01", choice("third", counter=3, node="pc-01"))
    mesh.run_until(lambda: mesh.agreed() and mesh.plan.choice.name == "third", within=AGAIN_S)
    assert all(node.state.choice == mesh.plan.choice for node in mesh.living)


def test_of_two_choices_at_once_all_take_the_same() -> None:
    mesh = settled(4, memory=4)
    mesh.use("pc-03", choice("second", counter=2, node="pc-03"))
    mesh.use("pc-01", choice("third", counter=2, node="pc-01"))
    mesh.run_until(lambda: mesh.agreed() and mesh.plan.choice.counter == 2, within=AGAIN_S)
    assert mesh.plan.choice.name == "third"


@pytest.mark.parametrize("after", [0.0, 0.2, 1.0, 2.0, 3.0, 4.0])
def test_a_choice_during_a_negotiation_ends_it(after: float) -> None:
    """Whatever is being prepared: nobody wants it any more, and it may take hours."""
    mesh = Office(5)
    for number in range(3):
        mesh.add(f"pc-{number:02}", 4)
    mesh.run(2)
    mesh.slow_to_prepare[NodeId("pc-01")] = 3600.0
    mesh.use("pc-00", choice())
    mesh.run(after)
    mesh.slow_to_prepare.clear()
    mesh.use("pc-02", choice("second", counter=2, node="pc-02"))
    mesh.run_until(lambda: mesh.agreed() and mesh.plan.choice.name == "second", within=AGAIN_S)
    assert all(plan.choice.name == "second" for node in mesh.living for plan in node.served)


def test_everybody_says_why_there_is_no_ring() -> None:
    mesh = Office()
    for number in range(3):
        mesh.add(f"pc-{number:02}", 3)
    mesh.run(3)
    assert {node.state.why for node in mesh.living} == {NO_MODEL}
    mesh.use("pc-01", choice())
    mesh.run(15)
    assert {node.state.why for node in mesh.living} == {"the model needs 12, the nodes have 9"}
    start = mesh.now
    mesh.run(60)
    assert mesh.plans_since(start) <= 3
    mesh.add("pc-03", 3)
    mesh.run_until(mesh.agreed, within=AGAIN_S)
    assert {node.state.why for node in mesh.living} == {""}


def test_a_node_that_joins_makes_a_new_plan_only_for_a_gain() -> None:
    mesh = settled(2, memory=6)
    epoch = mesh.plan.epoch
    mesh.add("pc-02", 0)
    mesh.run(20)
    assert mesh.plan.epoch == epoch
    mesh.add("pc-03", 6)
    mesh.run_until(lambda: mesh.agreed() and mesh.carriers == {"pc-00", "pc-01", "pc-03"}, within=AGAIN_S)


def test_memory_that_shrinks_is_a_reason_only_where_the_stage_no_longer_fits() -> None:
    mesh = settled(3, memory=12)
    epoch = mesh.plan.epoch
    mesh.nodes[NodeId("pc-01")].memory = 5
    mesh.run(15)
    assert mesh.plan.epoch == epoch
    mesh.nodes[NodeId("pc-01")].memory = 2
    mesh.run_until(lambda: mesh.agreed() and mesh.plan.epoch > epoch, within=AGAIN_S)
    part = mesh.plan.stage_of(NodeId("pc-01"))
    assert part is None or part.stop - part.start <= 2


def test_where_nothing_better_is_left_the_plan_that_holds_goes_on() -> None:
    mesh = settled(3, memory=4)
    epoch = mesh.plan.epoch
    mesh.nodes[NodeId("pc-01")].memory = 2
    mesh.run(40)
    assert mesh.plan.epoch == epoch and mesh.nodes[NodeId("pc-02")].state.why == ""


happenings = st.sampled_from(["kill", "restart", "restart quickly", "cut", "mend", "blink", "break", "use", "wait"])
stories = st.lists(st.tuples(happenings, st.integers(0, 6), st.integers(0, 6), st.floats(0, 6)), max_size=10)


MET_WHILE_PREPARING = [("restart", 1, 0, 2.0), ("restart", 0, 0, 1.0), ("restart", 0, 0, 1.625), ("use", 1, 0, 1.0)]
"""Each half had a plan of the same epoch: one was being prepared, the other one held already."""


@example(2, 4408, [*MET_WHILE_PREPARING, ("cut", 1, 0, 1.0), ("wait", 0, 0, 1.0)])
@given(st.integers(2, 7), st.integers(0, 1 << 20), stories)
@settings(max_examples=40)
def test_after_any_story_all_that_are_left_serve_one_plan(
    count: int, seed: int, story: list[tuple[str, int, int, float]]
) -> None:
    mesh = office(count, seed, memory=12)
    counter = 1
    for what, a, b, pause in story:
        living = sorted(node.id for node in mesh.living)
        one, other = living[a % len(living)], living[b % len(living)]
        match what:
            case "kill" if len(living) > 2:
                mesh.kill(one)
            case "restart":
                mesh.restart(one)
            case "restart quickly":
                mesh.restart(one, noticed=False)
            case "cut":
                mesh.cut(living[: a % len(living)], living[a % len(living) :])
            case "mend":
                mesh.mend()
            case "blink" if one != other:
                mesh.blink(one, other)
            case "break":
                mesh.broken[one] = "it cannot"
            case "use":
                counter += 1
                mesh.use(one, choice(f"model-{counter}", counter, one))
        mesh.run(pause)
    mesh.broken.clear()
    mesh.mend()
    if all(node.state.choice is None for node in mesh.living):
        mesh.use(mesh.living[0].id, choice(node=mesh.living[0].id))
    mesh.run_until(mesh.agreed, within=60)
    mesh.run(700)  # whoever was left out is asked again in the end
    assert mesh.plan.nodes <= {node.id for node in mesh.living}
    assert mesh.carriers == {node.id for node in mesh.living}
    start = mesh.now
    mesh.run(30)
    assert mesh.plans_since(start) == 0
    by_number: dict[tuple[int, NodeId], object] = {}
    for node in mesh.nodes.values():
        for plan in node.served:
            assert by_number.setdefault((plan.epoch, plan.leader), plan) == plan


@given(st.integers(2, 6), st.integers(0, 1 << 20), st.lists(st.tuples(st.integers(0, 5), st.floats(0, 8)), max_size=5))
@settings(max_examples=25)
def test_no_two_plans_have_one_epoch_where_the_mesh_was_never_cut(
    count: int, seed: int, deaths: list[tuple[int, float]]
) -> None:
    mesh = office(count, seed, memory=12)
    for place, pause in deaths:
        mesh.run(pause)
        if len(mesh.living) > 2:
            mesh.kill(mesh.living[place % len(mesh.living)].id)
    mesh.run(30)
    by_epoch: dict[int, object] = {}
    for node in mesh.nodes.values():
        for plan in node.served:
            assert by_epoch.setdefault(plan.epoch, plan) == plan


def test_the_ring_has_blocks_that_every_stage_can_make() -> None:
    assert common_pool([Pool(100, 16), Pool(30, 32)]) == Pool(30, 32)
    assert common_pool([Pool(101, 16), Pool(90, 32)]) == Pool(50, 32)
    assert common_pool([Pool(100, 16), Pool(100, 24)]) == Pool(33, 48)


def test_a_node_alone_says_what_is_missing() -> None:
    assert Negotiation(NodeId("one")).why == NO_MODEL
