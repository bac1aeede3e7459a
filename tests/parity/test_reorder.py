"""IRs whose state is read without beam_idx, from real models: cut, fused and computing what they did before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openvino as ov
import pytest

from meshinfer.config import Folders
from meshinfer.engine.assemble import assemble
from meshinfer.engine.pipeline import even_cuts, open_pipeline
from meshinfer.models.check import unsplit_graph
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from reproduction.run import without_reorder
from tests.parity import rig

FUSED, APART = "ScaledDotProductAttention", "Softmax"
"""What the CPU runs for attention: one kernel that keeps the cache too, or plain ops."""
ROUNDING = 1e-3
"""What two kernels for the same attention may differ by, in logits of up to about 30."""


def attention_kernels(model: ov.Model) -> list[str]:
    """What the CPU chose for each layer's attention."""
    compiled = ov.Core().compile_model(model, "CPU", rig.EXACT)
    kinds = [op.get_rt_info()["layerType"].astype(str) for op in compiled.get_runtime_model().get_ops()]
    return [kind for kind in kinds if kind in (FUSED, APART)]


@pytest.fixture(scope="module", params=["llama", "smollm2-135m"])
def original(request: pytest.FixtureRequest) -> Iterator[tuple[Path, int]]:
    """An IR that reads its state through beam_idx, and its layers."""
    if request.param == "llama":
        family_ir: Callable[[str], Path] = request.getfixturevalue("family_ir")
        yield family_ir("llama"), 4
        return
    home: Folders = request.getfixturevalue("smollm2_home")
    store = Store(home)
    with unsplit_graph(store, store.load("smollm2-135m")) as graph:
        yield graph, 30


def test_stripped_state_is_reordered_fused_and_exact(original: tuple[Path, int], store: Store, tmp_path: Path) -> None:
    graph, layers = original
    stripped = ov.Core().read_model(graph)
    assert without_reorder(stripped) == 2 * layers
    assert not any("beam_idx" in port.get_names() for port in stripped.inputs)
    assert FUSED not in attention_kernels(stripped)
    path = tmp_path / "openvino_model.xml"
    ov.save_model(stripped, path, compress_to_fp16=False)
    run = rig.unsplit_run(rig.Unsplit(graph), [rig.prompt(256, 20)], decode=12)

    manifest = rig.cut(store, path)
    assert all(_reads_beam_idx(manifest, index) for index in range(1, layers + 1))
    for start, stop in even_cuts(manifest, 2):
        kernels = attention_kernels(assemble(store, manifest, start, stop, position_axis=1))
        assert kernels == [FUSED] * sum(shard.kind == "layer" for shard in manifest.range(start, stop))
    with open_pipeline(store, manifest, even_cuts(manifest, 2), rig.options(manifest, "stateful")) as pipeline:
        assert rig.difference(rig.replay(pipeline, run), run.logits) == 0.0
    with open_pipeline(store, manifest, even_cuts(manifest, 2), rig.options(manifest, "paged")) as pipeline:
        logits = rig.replay(pipeline, run)
        assert rig.best_tokens(logits) == rig.best_tokens(run.logits)
        assert rig.difference(logits, run.logits) < ROUNDING


def _reads_beam_idx(manifest: Manifest, shard: int) -> bool:
    return "beam_idx" in {spec.name for spec in manifest.shards[shard].inputs}
