"""Decoders written by hand are cut at every layer, composed again, and give the numbers they gave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from meshinfer.config import Folders
from meshinfer.engine.pipeline import even_cuts, open_pipeline
from meshinfer.errors import CutError
from meshinfer.shards.compose import compose
from meshinfer.shards.cut import Cutter
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.reorder import inject_reorder
from meshinfer.shards.store import Store
from tests.parity import rig
from tests.shards.decoder import HIDDEN, VOCABULARY, Decoder

ROUNDING = 1e-5
"""What two kernels for the same attention may differ by."""


def write(model: ov.Model, folder: Path) -> Path:
    path = folder / "openvino_model.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    return path


def run_of(model: ov.Model) -> rig.Run:
    tokens = rig.prompt(VOCABULARY, 20)
    return rig.unsplit_run(rig.Unsplit(model), rig.split(tokens, [7, 5, *[1] * 8]))


def worst(store: Store, manifest: Manifest, stages: int, run: rig.Run) -> float:
    """The largest difference of a run, and of its last four tokens taken back and fed again."""
    with open_pipeline(store, manifest, even_cuts(manifest, stages), rig.options(manifest, "stateful")) as pipeline:
        logits = rig.replay(pipeline, run)
        back = len(run.tokens) - 4
        logits += [rig.feed(pipeline, [token], back + n) for n, token in enumerate(run.tokens[back:])]
    return rig.difference(logits, [*run.logits, *run.logits[-4:]])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Folders(tmp_path / "home"))


def test_state_without_beam_idx_is_cut_and_reordered(store: Store, tmp_path: Path) -> None:
    manifest = rig.cut(store, write(Decoder().build(), tmp_path))
    reordered = Decoder().build()
    assert inject_reorder(reordered) == 4
    run = run_of(reordered)
    assert rig.difference(run.logits, run_of(Decoder().build()).logits) < ROUNDING
    for stages in (1, 2, 4):
        assert worst(store, manifest, stages, run) == 0.0


@pytest.mark.parametrize("shared", [{2: 1}, {2: 1, 3: 1, 5: 0}], ids=["one layer", "several layers"])
def test_layers_that_attend_to_the_keys_of_another(store: Store, tmp_path: Path, shared: dict[int, int]) -> None:
    """Each shard keeps the past of its own layers, so what they are compared with does too."""
    decoder = Decoder(layers=max(shared) + 1, shared=shared, beam_idx=True)
    manifest = rig.cut(store, write(decoder.build(), tmp_path))
    assert len(manifest.shards) == decoder.layers + 2
    assert [len(shard.outputs) for shard in manifest.shards] == [
        1 + 2 * len({owner for reader, owner in shared.items() if owner < index <= reader})
        for index in range(decoder.layers + 1)
    ] + [1]
    assert all(spec.shape == (-1, -1, HIDDEN) for shard in manifest.shards[:-1] for spec in shard.outputs)
    decoder.own_copies = True
    run = run_of(decoder.build())
    decoder.own_copies = False
    assert rig.difference(run.logits, run_of(decoder.build()).logits) < ROUNDING
    for stages in (1, 2, len(manifest.shards)):
        assert worst(store, manifest, stages, run) == 0.0


def test_layers_with_an_input_of_their_own(store: Store, tmp_path: Path) -> None:
    decoder = Decoder(layers=3, per_layer=True, beam_idx=True)
    manifest = rig.cut(store, write(decoder.build(), tmp_path))
    assert [len(shard.outputs) for shard in manifest.shards] == [2, 2, 2, 1, 1]
    run = run_of(decoder.build())
    for stages in (1, 2, 5):
        assert worst(store, manifest, stages, run) == 0.0


def test_cutting_leaves_the_model_as_it_was() -> None:
    model = Decoder(layers=3, shared={2: 0}, beam_idx=True, per_layer=True).build()
    before = run_of(model)
    cutter = Cutter(model)
    for index in range(cutter.shards):
        with cutter.shard(index) as shard:
            assert len(shard.get_results()) == (
                1 if index == cutter.shards - 1 else len(cutter.layout.boundaries[index])
            )
    assert rig.difference(run_of(model).logits, before.logits) == 0.0


def test_ports_carry_the_names_of_the_boundary() -> None:
    cutter = Cutter(Decoder(layers=2, per_layer=True, beam_idx=True).build())
    with cutter.shard(1) as shard:
        inputs = [port.get_any_name() for port in shard.inputs]
        assert inputs[:2] == ["hidden_states", "hidden_states.1"]
        assert set(inputs[2:]) <= {"attention_mask", "position_ids", "beam_idx"}
        assert [port.get_any_name() for port in shard.outputs] == ["hidden_states.out", "hidden_states.1.out"]
    with cutter.shard(3) as head:
        assert [port.get_any_name() for port in head.outputs] == ["logits"]


def test_shards_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    paths = []
    cutter = Cutter(Decoder(layers=2, per_layer=True, beam_idx=True).build())
    for index in range(cutter.shards):
        paths.append(tmp_path / f"{index}.xml")
        with cutter.shard(index) as shard:
            ov.serialize(shard, paths[-1], paths[-1].with_suffix(".bin"))
    core = ov.Core()
    with pytest.raises(CutError, match=r"wants hidden_states\.1, the shard before it gives none"):
        compose([core.read_model(paths[2]), core.read_model(paths[1])])


def test_a_model_without_state_is_refused() -> None:
    model = Decoder(beam_idx=True).build()
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(node.input_value(0))
    for sink in model.get_sinks():
        model.remove_sink(sink)
    with pytest.raises(CutError, match="keeps no state"):
        Cutter(model)


def test_shapes_that_cannot_be_are_refused() -> None:
    model = Decoder(beam_idx=True).build()
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Reshape" and node.input_value(1).get_node().get_data().tolist() == [0, 0, HIDDEN]:
            wrong = ops.constant(np.array([0, 7, HIDDEN], np.int64))
            node.input(1).replace_source_output(wrong.output(0))
    with pytest.raises(CutError, match="contradict each other"):
        Cutter(model)
