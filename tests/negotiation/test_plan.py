"""From reports to a plan, with the real planner."""

from __future__ import annotations

import msgspec
import pytest

from meshinfer.negotiation.events import MakePlan, PlanMade
from meshinfer.negotiation.plan import make_plan
from meshinfer.negotiation.problem import UNLINKED, UNMEASURED, model_spec, problem
from meshinfer.planning.plan import Plan, RingPlan
from meshinfer.planning.specs import Demand
from meshinfer.shards.manifest import FileRef, Manifest, ShardKind, ShardSpec, TensorSpec, Verification
from meshinfer.types import NodeId, Sha256
from meshinfer.wire.messages import LinkReport, Report
from tests.negotiation.office import Office, choice

MB = 1 << 20
LAYERS = 8
A, B, C = NodeId("pc-00"), NodeId("pc-01"), NodeId("pc-02")


def model(layer_mb: int = 100) -> Manifest:
    """Eight layers, an embedding and a head of two layers' size each."""
    hidden = TensorSpec("hidden_states", "f32", (-1, -1, 512))
    layers: list[ShardKind] = ["layer"] * LAYERS
    kinds: list[ShardKind] = ["embedding", *layers, "head"]
    shards = tuple(
        ShardSpec(
            index,
            kind,
            FileRef("graph.xml", Sha256("0" * 64), 1 * MB),
            FileRef("weights.bin", Sha256("0" * 64), (1 if kind == "layer" else 2) * layer_mb * MB),
            (hidden,),
            (hidden,),
            1024 if kind == "layer" else 0,
        )
        for index, kind in enumerate(kinds)
    )
    checked = (Verification(1, "paged", 16, 0.0, True, 1.0, 20.0),)
    return Manifest("model", "source", "", "int8", 2048, shards, (), None, {}, checked)


MODEL = model()
DEMAND = Demand(256, 4)


def report(
    name: str, memory_mb: int = 2000, layer_ms: float = 1.0, probe: float = 1e10, links: dict[str, float] | None = None
) -> Report:
    return Report(
        name=name,
        memory_bytes=memory_mb * MB,
        device="CPU",
        device_name="CPU",
        threads=4,
        probe_bytes_s=probe,
        fingerprint=MODEL.fingerprint() if layer_ms else "",
        layer_s=layer_ms / 1e3,
        head_s=2 * layer_ms / 1e3,
        links=tuple(LinkReport(NodeId(peer), rtt, 1e8) for peer, rtt in (links or {}).items()),
    )


def linked(memory_mb: int = 700, names: tuple[str, ...] = (A, B, C), rtt: float = 0.001) -> dict[NodeId, Report]:
    return {
        NodeId(name): report(name, memory_mb, links={other: rtt for other in names if other != name}) for name in names
    }


def plan_of(made: PlanMade) -> Plan:
    assert made.ring is not None
    return Plan(1, A, choice(), "paged", made.codec, (made.ring,))


def order(
    reports: dict[NodeId, Report], kept: Plan | None = None, left_out: dict[NodeId, str] | None = None
) -> MakePlan:
    return MakePlan(7, choice(), reports, kept, left_out or {})


def test_a_plan_covers_the_model_and_says_why() -> None:
    made = make_plan(order(linked()), MODEL)
    assert made.number == 7 and made.ring is not None and made.kv == "paged" and made.codec == "f32"
    stages = made.ring.stages
    assert [stages[0].start, stages[-1].stop] == [0, LAYERS + 2]
    assert all(a.stop == b.start for a, b in zip(stages, stages[1:], strict=False))
    assert made.reasons.keys() == {A, B, C} and all("shards" in why for why in made.reasons.values())


def test_a_layer_of_average_weights_is_the_unit_of_work() -> None:
    assert {shard.work for shard in model_spec(MODEL, 4).shards} == {1.0}


def test_a_model_that_does_not_fit_gives_numbers_and_who_is_left_out() -> None:
    made = make_plan(order(linked(300), left_out={C: "its device is gone"}), MODEL)
    assert made.ring is None
    assert "GB" in made.shortage and "pc-02 is left out: its device is gone" in made.shortage


def test_without_any_usable_node_there_is_a_reason_too() -> None:
    made = make_plan(order({A: report(A)}, left_out={A: "no memory"}), MODEL)
    assert made.ring is None and "no node is usable" in made.shortage
    assert make_plan(order({}), MODEL).shortage == "no node is usable"


def test_the_plan_that_holds_is_compared_although_a_node_of_it_is_left_out_of_new_ones() -> None:
    reports = linked()
    kept = plan_of(make_plan(order(reports), MODEL))
    made = make_plan(order(linked(2000), kept, {C: "two stages are too much for it"}), MODEL)
    assert made.kept is not None and made.kept.stages == kept.ring.stages and made.kept.tokens_per_s_together > 0
    assert made.ring is not None and C not in {stage.node for stage in made.ring.stages}


def test_the_plan_that_holds_is_not_kept_where_it_does_not_fit_or_has_lost_a_node() -> None:
    reports = linked()
    kept = plan_of(make_plan(order(reports), MODEL))
    assert len(kept.nodes) == 3
    for memory_mb, kept_still in [(700, True), (640, True), (200, False)]:
        shrunk = linked(2000) | {B: report(B, memory_mb, links={A: 0.001, C: 0.001})}
        assert (make_plan(order(shrunk, kept), MODEL).kept is not None) == kept_still, memory_mb
    assert make_plan(order({A: report(A), B: report(B)}, kept), MODEL).kept is None


def test_who_has_not_measured_is_as_fast_as_its_probe_says() -> None:
    nodes = {n.id: n for n in problem(MODEL, {A: report(A), B: report(B, layer_ms=0, probe=2e10)}, DEMAND, 4).nodes}
    assert nodes[B].layer_s == pytest.approx(nodes[A].layer_s / 2)
    assert nodes[B].head_s == pytest.approx(nodes[A].head_s / 2)
    alone = problem(MODEL, {B: report(B, layer_ms=0, probe=1e10)}, DEMAND, 4).nodes[0]
    assert alone.layer_s == pytest.approx(100 * MB / 1e10) and alone.head_s == pytest.approx(200 * MB / 1e10)


def test_what_was_measured_with_another_model_counts_for_nothing() -> None:
    other = msgspec.structs.replace(report(B, layer_ms=50), fingerprint="other")
    nodes = {n.id: n for n in problem(MODEL, {A: report(A), B: other}, DEMAND, 4).nodes}
    assert nodes[B].layer_s == pytest.approx(nodes[A].layer_s)


def test_the_worse_end_of_a_link_counts() -> None:
    reports = {A: report(A, links={B: 0.002}), B: report(B, links={A: 0.03}), C: report(C, links={A: 0.0})}
    network = problem(MODEL, reports, DEMAND, 4).network
    assert network.between(A, B).rtt_s == 0.03
    assert network.between(A, C).rtt_s == UNMEASURED.rtt_s
    assert network.between(B, C) == UNLINKED


def test_nodes_without_a_link_are_no_neighbours() -> None:
    reports = {
        A: report(A, 560, links={B: 0.001, C: 0.001}),
        B: report(B, 560, links={A: 0.001}),
        C: report(C, 560, links={A: 0.001}),
    }
    made = make_plan(order(reports), MODEL)
    assert made.ring is not None and len(made.ring.stages) == 3  # all are needed, and two of them never meet
    assert made.ring.tokens_per_s < 0.1
    plenty = {node: msgspec.structs.replace(r, memory_bytes=800 * MB) for node, r in reports.items()}
    two = make_plan(order(plenty), MODEL).ring
    assert two is not None and A in {stage.node for stage in two.stages} and two.tokens_per_s > 10


def test_a_ring_on_fewer_nodes_is_taken_where_links_are_slow() -> None:
    made = make_plan(order(linked(2000, rtt=0.2)), MODEL)
    assert made.ring is not None and len(made.ring.stages) == 1


def test_an_office_with_the_real_planner_agrees_and_stays() -> None:
    def planner(given: MakePlan) -> PlanMade:
        real = {
            node: msgspec.structs.replace(r, memory_bytes=r.memory_bytes * 100 * MB, fingerprint=MODEL.fingerprint())
            for node, r in given.reports.items()
        }
        return make_plan(with_reports(given, real), MODEL)

    mesh = Office(0, planner)
    for number in range(4):
        mesh.add(f"pc-{number:02}", 6)
    mesh.use("pc-00", choice())
    mesh.run_until(mesh.agreed, within=12)
    mesh.run(15)
    start = mesh.now
    mesh.run(60)
    assert mesh.agreed() and mesh.plans_since(start) == 0
    mesh.kill("pc-00")
    mesh.run_until(mesh.agreed, within=20)


def with_reports(given: MakePlan, reports: dict[NodeId, Report]) -> MakePlan:
    return MakePlan(given.number, given.choice, reports, given.kept, given.left_out)


def test_a_ring_plan_knows_who_comes_after_whom() -> None:
    ring = make_plan(order(linked()), MODEL).ring
    assert isinstance(ring, RingPlan)
    around = [ring.head]
    while (after := ring.after(around[-1])) != ring.head:
        around.append(after)
    assert around == [stage.node for stage in ring.stages] and around[-1] == ring.tail
