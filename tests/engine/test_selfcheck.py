"""A stage is compared with what its shards gave when the model was added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from meshinfer.config import Folders
from meshinfer.engine.devices import resolve
from meshinfer.engine.golden import TOKENS, golden_rows, golden_tokens, record
from meshinfer.engine.pipeline import even_cuts
from meshinfer.engine.selfcheck import TOLERANCES, self_check
from meshinfer.engine.stage import StageOptions, open_stage
from meshinfer.engine.step import Rows, Step
from meshinfer.errors import CorruptFileError, KvBudgetError, SelfCheckError, SourceError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, Precision
from tests.cli.calls import flip_byte
from tests.parity import rig
from tests.shards.decoder import Decoder

TINY_RANGES = [(start, stop) for start in range(4) for stop in range(start + 1, 5)]


def loaded(home: Folders) -> tuple[Store, Manifest]:
    store = Store(home)
    return store, store.load(store.names()[0])


def checked(
    store: Store,
    manifest: Manifest,
    bounds: tuple[int, int],
    kv: KvBackend = "stateful",
    precision: Precision = "exact",
    compiled: Manifest | None = None,
) -> float:
    """Open the shards of `compiled`, by default the model's own, and check them as those of `manifest`."""
    options = StageOptions(resolve("cpu"), kv, precision, manifest.kv_bytes_per_token * 64)
    stage = open_stage(store, compiled or manifest, *bounds, options)
    try:
        return self_check(stage, store, manifest, *bounds, precision)
    finally:
        stage.close()


def with_weights_of_another_layer(manifest: Manifest, layer: int, other: int) -> Manifest:
    shards = list(manifest.shards)
    shards[layer] = replace(shards[layer], weights=shards[other].weights)
    return replace(manifest, shards=tuple(shards))


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("kv", ["paged", "stateful"])
@pytest.mark.parametrize("bounds", TINY_RANGES, ids=str)
def test_every_range_of_a_model_passes(
    tiny_home: Folders, bounds: tuple[int, int], kv: KvBackend, precision: Precision
) -> None:
    assert checked(*loaded(tiny_home), bounds, kv, precision) < TOLERANCES[precision] / 5


@pytest.mark.parametrize(("stages", "precision"), [(1, "fast"), (3, "exact")])
def test_stages_of_a_real_model_pass(smollm2_home: Folders, stages: int, precision: Precision) -> None:
    store, manifest = loaded(smollm2_home)
    for bounds in even_cuts(manifest, stages):
        assert checked(store, manifest, bounds, "paged", precision) < TOLERANCES[precision] / 5


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize(("layer", "other"), [(3, 4), (15, 16), (28, 20)])
def test_a_layer_of_a_real_model_with_the_weights_of_another_fails(
    smollm2_home: Folders, layer: int, other: int, precision: Precision
) -> None:
    store, manifest = loaded(smollm2_home)
    wrong = with_weights_of_another_layer(manifest, layer, other)
    with pytest.raises(SelfCheckError, match=rf"the stage of shards {layer}\.\..* off by 0\.\d+, .* is allowed"):
        checked(store, manifest, (layer, layer + 2), "paged", precision, wrong)


@pytest.mark.parametrize("bounds", [(0, 2), (1, 2), (1, 4), (0, 4)], ids=str)
def test_wrong_weights_fail_in_every_range(tiny_home: Folders, bounds: tuple[int, int]) -> None:
    store, manifest = loaded(tiny_home)
    with pytest.raises(SelfCheckError) as caught:
        checked(store, manifest, bounds, compiled=with_weights_of_another_layer(manifest, 1, 2))
    assert caught.value.difference > 2 * TOLERANCES["fast"]


class Changed:
    """A stage whose outputs are changed on their way out."""

    def __init__(self, inner: object, change: Callable[[Rows], Rows]) -> None:
        self._inner, self._change = inner, change

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def forward(self, step: Step) -> tuple[Rows, ...]:
        return tuple(self._change(rows) for rows in self._inner.forward(step))  # type: ignore[attr-defined]


def not_a_number(rows: Rows) -> Rows:
    return np.where(np.arange(rows.size).reshape(rows.shape) == rows.size - 1, np.float32(np.nan), rows)


@pytest.mark.parametrize(
    ("change", "older_too"),
    [(lambda rows: rows * 1.01, False), (lambda rows: rows[:, :-1], False), (not_a_number, True)],
    ids=["scaled", "narrow", "not a number"],
)
@pytest.mark.parametrize("bounds", [(0, 2), (2, 4)], ids=str)
def test_outputs_that_are_off_fail(
    tiny_home: Folders, bounds: tuple[int, int], change: Callable[[Rows], Rows], older_too: bool
) -> None:
    store, manifest = loaded(tiny_home)
    inner = open_stage(store, manifest, *bounds, StageOptions(resolve("cpu"), "stateful", "exact", 1 << 20))
    changed, older = Changed(inner, change), replace(manifest, golden=())
    with pytest.raises(SelfCheckError):
        self_check(changed, store, manifest, *bounds, "exact")  # type: ignore[arg-type]
    if older_too:
        with pytest.raises(SelfCheckError):
            self_check(changed, store, older, *bounds, "exact")  # type: ignore[arg-type]
    assert self_check(inner, store, manifest, *bounds, "exact") < TOLERANCES["exact"], "the sequence was not released"
    inner.close()


@pytest.mark.parametrize("bounds", [(0, 4), (0, 2), (1, 3), (3, 4)], ids=str)
@pytest.mark.parametrize("kv", ["paged", "stateful"])
def test_an_older_manifest_is_checked_for_numbers_only(
    tiny_home: Folders, bounds: tuple[int, int], kv: KvBackend
) -> None:
    store, manifest = loaded(tiny_home)
    assert checked(store, replace(manifest, golden=()), bounds, kv) == 0.0


def test_boundaries_of_several_tensors_pass(tmp_path: Path) -> None:
    store = Store(Folders(tmp_path / "home"))
    graph = tmp_path / "openvino_model.xml"
    ov.save_model(Decoder(layers=3, shared={2: 0}, beam_idx=True, per_layer=True).build(), graph)
    bare = rig.cut(store, graph)
    assert max(len(shard.outputs) for shard in bare.shards) > 1
    with store.adding("model") as work:
        refs = []
        for index, content in enumerate(record(store, bare)):
            (work / "golden").write_bytes(content)
            refs.append(store.add_file(work / "golden", f"golden{index}"))
        manifest = replace(bare, golden=tuple(refs))
        store.save(manifest)
    assert manifest.fingerprint() == bare.fingerprint() and set(refs) <= set(manifest.files)
    for stages in range(1, len(manifest.shards) + 1):
        for bounds in even_cuts(manifest, stages):
            assert checked(store, manifest, bounds) < TOLERANCES["exact"] / 5


def test_what_is_kept_has_the_shapes_of_the_boundaries(smollm2_home: Folders) -> None:
    store, manifest = loaded(smollm2_home)
    assert len(manifest.golden) == len(manifest.shards)
    tokens = golden_tokens(manifest)
    assert len(set(tokens.tolist())) == TOKENS and tokens.min() >= 100 and tokens.max() < 49152
    shapes = [[rows.shape for rows in golden_rows(store, manifest, index)] for index in range(len(manifest.shards))]
    assert shapes == [[(TOKENS, 576)]] * 31 + [[(1, 49152)]]


def test_golden_files_that_are_damaged_or_of_another_model_are_said_to_be(
    tiny_home: Folders, copy_home: Callable[[Folders], Folders]
) -> None:
    store, manifest = loaded(copy_home(tiny_home))
    mixed = replace(manifest, golden=manifest.golden[::-1])
    with pytest.raises(SourceError, match=r"has 264 numbers instead of 6 x 256"):
        checked(store, mixed, (0, 1))
    flip_byte(store.path(manifest.golden[1]))
    with pytest.raises(CorruptFileError):
        checked(store, manifest, (1, 2))


def test_a_stage_without_room_is_not_fed(tiny_home: Folders) -> None:
    store, manifest = loaded(tiny_home)
    stage = open_stage(store, manifest, 0, 4, StageOptions(resolve("cpu"), "paged", "exact", 100))
    with pytest.raises(KvBudgetError, match="needs 1 KV blocks, the stage has 0"):
        self_check(stage, store, manifest, 0, 4, "exact")
    stage.close()
