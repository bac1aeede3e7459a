"""What a token costs: the arithmetic with stages that take a known time, the rest with real ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from meshinfer.config import Folders
from meshinfer.engine import calibrate as under_test
from meshinfer.engine.calibrate import Calibration, calibrate, probe_rate
from meshinfer.engine.devices import resolve
from meshinfer.engine.stage import StageOptions, open_stage
from meshinfer.engine.step import Entry, Rows, Step
from meshinfer.errors import InputError, KvBudgetError
from meshinfer.shards.manifest import FileRef, Manifest, ShardKind, ShardSpec, TensorSpec
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, Precision, SequenceId, Sha256

CopyHome = Callable[[Folders], Folders]

CALL_S, LAYER_S, HEAD_S = 0.010, 0.002, 0.030
FACTOR = 1.6
TRIES = 3
"""Other programs of a machine may slow down one measurement; not three."""
SHARDS = 12
HEAD = SHARDS - 1


@dataclass
class Clock:
    """Time that passes only where somebody works."""

    now: float = 0.0
    call_s: float = CALL_S
    layer_s: float = LAYER_S

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Works:
    """A stage that takes its time."""

    clock: Clock
    start: int
    stop: int
    options: StageOptions
    block_tokens: int = 32
    kv_blocks: int = 4
    block_bytes: int = 8
    rewinds: bool = False
    held: int = 0
    closed: bool = False

    def forward(self, step: Step) -> tuple[Rows, ...]:
        (entry,) = step.entries
        assert entry.start == self.held and [rows.shape for rows in step.hidden] == [(entry.count, 16)]
        assert len(entry.blocks) * self.block_tokens >= entry.end
        assert entry.rows == ((entry.count - 1,) if self.stop == SHARDS else ())
        self.held = entry.end
        layers = self.stop - self.start
        takes = HEAD_S if self.stop == SHARDS else self.clock.call_s + self.clock.layer_s * layers
        self.clock.now += takes * (3 if entry.start == 20 else 1)
        return ()

    def release(self, _: SequenceId) -> None:
        self.held = 0

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """A store, the manifest of a model of ten layers, and the stages that were opened."""

    store: Store
    manifest: Manifest
    clock: Clock
    opened: list[Works]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(stage.start, stage.stop) for stage in self.opened]

    def place(self, *indices: int) -> None:
        """Put the files of shards into the store."""
        for index in indices:
            for ref in (self.manifest.shards[index].graph, self.manifest.shards[index].weights):
                self.store.path(ref).write_bytes(bytes(ref.size_bytes))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    hidden = TensorSpec("hidden_states", "f32", (-1, -1, 16))

    def shard(index: int) -> ShardSpec:
        kind: ShardKind = "embedding" if index == 0 else "head" if index == HEAD else "layer"
        graph, weights = (FileRef(f"f{n}", Sha256(f"{n:064x}"), 100) for n in (2 * index, 2 * index + 1))
        return ShardSpec(index, kind, graph, weights, (hidden,), (hidden,), 8 if kind == "layer" else 0)

    manifest = Manifest("m", "", "", "int4", 2048, tuple(map(shard, range(SHARDS))), (), None, {}, ())
    store = Store(Folders(tmp_path))
    store.save_mesh(manifest)
    world = World(store, manifest, Clock(), [])

    def open_stage(_: Store, __: Manifest, start: int, stop: int, options: StageOptions) -> Works:
        world.opened.append(Works(world.clock, start, stop, options))
        return world.opened[-1]

    monkeypatch.setattr(under_test, "open_stage", open_stage)
    monkeypatch.setattr(under_test, "time", world.clock)
    return world


def options(kv: KvBackend = "paged", precision: Precision = "fast", threads: int | None = None) -> StageOptions:
    return StageOptions(resolve("cpu"), kv, precision, threads=threads)


def test_a_layer_costs_what_more_layers_take_more(world: World) -> None:
    world.place(*range(SHARDS))
    found = calibrate(world.store, world.manifest, options())
    assert found.layer_s == pytest.approx(LAYER_S) and found.head_s == pytest.approx(HEAD_S)
    assert world.ranges == [(1, 6), (1, 2), (HEAD, SHARDS)]
    assert [stage.options.kv_budget_bytes for stage in world.opened] == [5 * 8 * 128, 8 * 128, 0]
    assert all(stage.closed for stage in world.opened)


def test_only_shards_that_are_here_are_measured(world: World) -> None:
    world.place(0, 1, 3, 4, 6)
    world.store.path(world.manifest.shards[1].weights).write_bytes(b"short")
    found = calibrate(world.store, world.manifest, options())
    assert found.layer_s == pytest.approx(LAYER_S) and found.head_s is None
    assert world.ranges == [(3, 5), (3, 4)]


def test_one_layer_is_better_than_none(world: World) -> None:
    world.place(6)
    assert calibrate(world.store, world.manifest, options()).layer_s == pytest.approx(CALL_S + LAYER_S)
    assert world.ranges == [(6, 7)]


@pytest.mark.parametrize("layers", [None, (), (2, 3), (0, HEAD)])
def test_without_a_layer_nothing_can_be_said(world: World, layers: tuple[int, ...] | None) -> None:
    world.place(0, HEAD, *(() if layers is None else (5,)))
    with pytest.raises(InputError, match="no layer of m is here"):
        calibrate(world.store, world.manifest, options(), layers)
    assert world.opened == [] and not world.store.folders.calibrations.exists()


def test_the_layers_may_be_chosen(world: World) -> None:
    world.place(*range(HEAD))
    calibrate(world.store, world.manifest, options(), [9, 2, 8])
    assert world.ranges == [(8, 10), (8, 9)]


def test_of_large_layers_two_are_enough(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_LAYERS_BYTES", 300)
    world.place(*range(HEAD))
    calibrate(world.store, world.manifest, options())
    assert world.ranges == [(1, 3), (1, 2)]


def test_layers_too_small_to_tell_still_take_time(world: World) -> None:
    world.place(*range(HEAD))
    world.clock.layer_s = -0.0001
    assert calibrate(world.store, world.manifest, options()).layer_s == pytest.approx((CALL_S - 0.0005) / 5)


def test_a_slow_device_is_not_kept_for_long(world: World) -> None:
    world.place(*range(HEAD))
    world.clock.layer_s = 1.0
    calibrate(world.store, world.manifest, options())
    assert world.clock.now < 11 * (5 + 1 + 2 * CALL_S), "a prompt, seven tokens, and one of them slow"


def test_what_opening_raises_comes_through(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_stage(*_: object) -> None:
        raise KvBudgetError("too little")

    monkeypatch.setattr(under_test, "open_stage", open_stage)
    world.place(*range(SHARDS))
    with pytest.raises(KvBudgetError, match="too little"):
        calibrate(world.store, world.manifest, options())


# --- what was measured before ----------------------------------------------------------------------------------------


def test_nothing_is_measured_twice(world: World) -> None:
    world.place(*range(SHARDS))
    first = calibrate(world.store, world.manifest, options())
    world.opened.clear()
    elsewhere = replace(world.manifest, name="other")
    assert calibrate(Store(world.store.folders), elsewhere, options()) == first and world.opened == []
    path = world.store.folders.calibrations
    path.write_text(path.read_text("utf-8").replace(str(first.layer_s), "0.125"), "utf-8")
    assert calibrate(world.store, world.manifest, options()) == Calibration(0.125, first.head_s)
    assert world.opened == []


def test_whatever_changes_the_time_is_measured_anew(world: World) -> None:
    world.place(*range(SHARDS))
    device = resolve("cpu")
    others = [options("stateful"), options(precision="exact"), options(threads=1)]
    others.append(replace(options(), device=replace(device, full_name="another CPU")))
    longer = replace(world.manifest, context_tokens=4096)
    calibrate(world.store, world.manifest, options())
    for count, (manifest, how) in enumerate([*((world.manifest, how) for how in others), (longer, options())], 2):
        calibrate(world.store, manifest, how)
        assert len(world.opened) == 3 * count
    calibrate(world.store, world.manifest, options())
    assert len(world.opened) == 18, "the first one was forgotten"


def test_a_head_that_came_later_is_measured(world: World) -> None:
    world.place(2, 3)
    assert calibrate(world.store, world.manifest, options()).head_s is None
    world.place(HEAD)
    assert calibrate(world.store, world.manifest, options()).head_s == pytest.approx(HEAD_S)
    world.opened.clear()
    world.store.path(world.manifest.shards[HEAD].graph).unlink()
    assert calibrate(world.store, world.manifest, options()).head_s == pytest.approx(HEAD_S)
    assert world.opened == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"KEY": 1}', b'{"KEY": {"layer_s": -1, "head_s": 1}}'],
    ids=range(7),
)
def test_a_damaged_file_is_healed(world: World, content: bytes) -> None:
    world.place(*range(SHARDS))
    first = calibrate(world.store, world.manifest, options())
    path = world.store.folders.calibrations
    good = path.read_bytes()
    key = good.split(b'"')[1]
    path.write_bytes(content.replace(b"KEY", key))
    again = calibrate(world.store, world.manifest, options())
    assert again.layer_s == pytest.approx(first.layer_s) and len(world.opened) == 6
    assert calibrate(world.store, world.manifest, options()) == again and len(world.opened) == 6


def test_a_file_that_cannot_be_written_costs_time_only(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.place(*range(SHARDS))
    world.store.folders.calibrations.mkdir()
    for _ in range(2):
        assert calibrate(world.store, world.manifest, options()).layer_s == pytest.approx(LAYER_S)
    assert len(world.opened) == 6 and "measured times are not kept" in caplog.text


# --- real stages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["paged", "stateful"])
def test_a_tiny_model_is_measured(tiny_home: Folders, copy_home: CopyHome, kv: KvBackend) -> None:
    store = Store(copy_home(tiny_home))
    found = calibrate(store, store.load("tiny"), options(kv, "exact"))
    assert 0 < found.layer_s < 0.1 and found.head_s is not None and 0 < found.head_s < 0.1


def test_layers_and_head_add_up_to_the_whole_model(smollm2_home: Folders, copy_home: CopyHome) -> None:
    store = Store(copy_home(smollm2_home))
    manifest = store.load("smollm2-135m")
    stage = open_stage(store, manifest, 0, len(manifest.shards), options())
    ratios: list[float] = []
    for _ in range(TRIES):
        store.folders.calibrations.unlink(missing_ok=True)
        found = calibrate(store, manifest, options())
        assert found.head_s is not None
        ratios.append((found.layer_s * (len(manifest.shards) - 2) + found.head_s) / seconds_per_token(stage.forward))
        if 1 / FACTOR < ratios[-1] < FACTOR:
            break
    else:
        pytest.fail(f"what was calibrated is not what the model takes: {ratios}")
    stage.close()


def seconds_per_token(forward: object) -> float:
    """The median of twenty tokens after a prompt of sixteen."""
    assert callable(forward)
    tokens, took = np.arange(200, 216), []
    forward(Step((Entry(SequenceId(1), 0, 16, (15,), (0, 1)),), tokens=tokens))
    for position in range(16, 36):
        began = time.perf_counter()
        forward(Step((Entry(SequenceId(1), position, 1, (0,), (0, 1)),), tokens=tokens[:1]))
        took.append(time.perf_counter() - began)
    return median(took)


def test_a_device_reads_weights_at_some_rate() -> None:
    rates = [probe_rate(resolve("cpu")) for _ in range(TRIES)]
    assert min(rates) > 1e8 and max(rates) < 1e12
    assert probe_rate(resolve("cpu"), 1) < 2 * max(rates)
