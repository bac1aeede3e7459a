"""What a node believes of its speed, and how that follows what it sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshinfer.agent.capacity import Capacity
from meshinfer.config import Folders
from meshinfer.engine.calibrate import Calibration
from meshinfer.planning.cost import StagePlan
from meshinfer.settings import Settings
from meshinfer.shards.manifest import FileRef, Manifest, ShardKind, ShardSpec, TensorSpec
from meshinfer.shards.store import Store
from meshinfer.types import NodeId, Sha256

ME = NodeId("me")
SHARDS = 6
HEAD_RATIO = 3.0


@pytest.fixture
def capacity() -> Capacity:
    return Capacity(Settings("here", device="cpu", threads=1))


def manifest() -> Manifest:
    hidden = TensorSpec("hidden_states", "f32", (-1, -1, 16))

    def shard(index: int) -> ShardSpec:
        kind: ShardKind = "embedding" if index == 0 else "head" if index == SHARDS - 1 else "layer"
        graph, weights = (FileRef(f"f{n}", Sha256(f"{n:064x}"), 100) for n in (2 * index, 2 * index + 1))
        return ShardSpec(index, kind, graph, weights, (hidden,), (hidden,), 0)

    return Manifest("m", "", "", "int4", 2048, tuple(map(shard, range(SHARDS))), (), None, {}, ())


def test_a_stage_without_the_head_teaches_what_a_layer_takes(capacity: Capacity) -> None:
    capacity.learn(0.006, manifest(), StagePlan(ME, 0, 4), None)
    assert capacity.layer_s == pytest.approx(0.002) and capacity.head_s == 0.0


def test_a_stage_with_the_head_teaches_only_where_others_know_what_a_head_is_worth(capacity: Capacity) -> None:
    capacity.learn(0.010, manifest(), StagePlan(ME, 3, 6), None)
    assert capacity.layer_s == 0.0
    capacity.learn(0.010, manifest(), StagePlan(ME, 3, 6), HEAD_RATIO)
    assert capacity.layer_s == pytest.approx(0.002) and capacity.head_s == pytest.approx(0.006)


def test_what_was_measured_is_not_learned_again(capacity: Capacity) -> None:
    capacity.layer_s = 0.001
    capacity.learn(0.1, manifest(), StagePlan(ME, 0, 4), HEAD_RATIO)
    assert capacity.layer_s == 0.001


def test_a_stage_that_is_much_slower_than_measured_corrects_the_measure(capacity: Capacity) -> None:
    capacity.layer_s, capacity.head_s = 0.001, 0.003
    part = StagePlan(ME, 3, 6)  # two layers and the head: 5 ms
    assert not capacity.adapt(0.0055, manifest(), part)
    assert capacity.layer_s == 0.001
    assert capacity.adapt(0.010, manifest(), part)
    assert capacity.layer_s == pytest.approx(0.002) and capacity.head_s == pytest.approx(0.006)
    assert not capacity.adapt(0.010, manifest(), part)


def test_nothing_is_corrected_that_was_never_measured(capacity: Capacity) -> None:
    assert not capacity.adapt(0.010, manifest(), StagePlan(ME, 0, 1))


def test_a_memory_budget_is_what_the_user_says_or_less_than_what_is_free(capacity: Capacity) -> None:
    assert Capacity(Settings("here", device="cpu", memory_bytes=5_000_000)).memory_bytes() == 5_000_000
    assert 0 <= capacity.memory_bytes() < capacity.device.total_memory_bytes


def test_a_device_that_is_gone_carries_nothing(capacity: Capacity) -> None:
    capacity.device = replace(capacity.device, name="GPU.7")
    assert capacity.memory_bytes() == 0


def test_a_measure_of_a_model_that_is_chosen_no_more_is_not_believed(
    capacity: Capacity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*_: object) -> Calibration:
        capacity.fingerprint = "another"
        return Calibration(0.5, 0.5)

    monkeypatch.setattr("meshinfer.agent.capacity.calibrate", slowly)
    monkeypatch.setattr(Store, "has", lambda *_: True)
    assert not capacity.calibrate(Store(Folders(tmp_path)), manifest(), "stateful", "fast")
    assert capacity.layer_s == 0.0


def test_the_probe_is_measured_once(capacity: Capacity, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "home")
    capacity.measure(folders)
    first = capacity.probe_bytes_s
    assert first > 1e8
    again = Capacity(Settings("here", device="cpu", threads=1))
    again.measure(folders)
    assert again.probe_bytes_s == first
    folders.probes.write_text("{broken")
    again.measure(folders)
    assert again.probe_bytes_s > 1e8
