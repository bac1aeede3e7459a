"""Every family, cut at every layer, gives the very numbers of the unsplit model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshinfer.engine.pipeline import even_cuts, open_pipeline
from meshinfer.errors import PagedUnsupportedError, StepError
from meshinfer.files.progress import silent
from meshinfer.models.verify import verify_new
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from tests.parity import rig
from tests.parity.families import FAMILIES, LAYERS

EVERY_TIME = {"llama", "phi3", "gpt2", "gemma2", "qwen3_moe", "opt", "lfm2"}
PROMPT = (13, 6)
"""Tokens of the prompt's two chunks, together more than two sliding windows."""

DECODE = 10
BACK = 4
"""Tokens that are taken back and fed again."""

NO_SDPA = {"xglm"}
"""Exported without the attention op that the pass looks for."""

OTHER_STATE = {"lfm2"}

NAMES = [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.families) for name in FAMILIES]


def test_the_subset_names_families() -> None:
    assert set(FAMILIES) >= EVERY_TIME | NO_SDPA | OTHER_STATE


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_reproduced_by_its_layers(name: str, family_ir: Callable[[str], Path], store: Store) -> None:
    graph = family_ir(name)
    unsplit = rig.Unsplit(graph)
    tokens = rig.prompt(256, sum(PROMPT) + DECODE)
    run = rig.unsplit_run(unsplit, rig.split(tokens, [*PROMPT, *[1] * DECODE]))
    assert all(np.isfinite(logits).all() for logits in run.logits)
    rows = np.concatenate(run.logits)
    assert rows.std(axis=0).mean() > 0.05 * rows.std(), "the tokens say too little about the logits"

    manifest = rig.cut(store, graph)
    assert [shard.kind for shard in manifest.shards] == ["embedding", *["layer"] * LAYERS, "head"]
    for stages in (1, 2, LAYERS + 2):
        with open_pipeline(store, manifest, even_cuts(manifest, stages), rig.options(manifest, "stateful")) as pipeline:
            assert rig.difference(rig.replay(pipeline, run), run.logits) == 0.0
            last = rig.feed(pipeline, run.chunks[0], 0, sequence=1, rows=1)
            assert rig.difference([last], [run.logits[0][-1:]]) == 0.0
            if pipeline.rewinds:
                back = len(run.tokens) - BACK
                again = [rig.feed(pipeline, [token], back + n) for n, token in enumerate(run.tokens[back:])]
                assert rig.difference(again, run.logits[-BACK:]) == 0.0

    verified = dataclasses.replace(manifest, verification=verify_new(store, manifest, graph, silent))
    assert verified.kv_backends == (("paged", "stateful") if FAMILIES[name].paged else ("stateful",))
    if FAMILIES[name].paged:
        for stages in (1, 2, LAYERS + 2):
            paged = _paged(store, manifest, stages, run)
            assert rig.best_tokens(paged) == rig.best_tokens(run.logits)
            assert rig.difference(paged, run.logits) < 1e-4
    elif name in NO_SDPA | OTHER_STATE:
        with pytest.raises(PagedUnsupportedError):
            _paged(store, manifest, 1, run)
    else:
        assert rig.difference(_paged(store, manifest, 1, run), run.logits) > 0.02 * np.abs(rows).max()


def _paged(store: Store, manifest: Manifest, stages: int, run: rig.Run) -> list[rig.Logits]:
    with open_pipeline(store, manifest, even_cuts(manifest, stages), rig.options(manifest, "paged")) as pipeline:
        last = rig.feed(pipeline, run.chunks[0], 0, sequence=1, rows=1)
        replayed = rig.replay(pipeline, run)
        assert np.abs(last - replayed[0][-1:]).max() < 1e-4
        return replayed


def test_a_hybrid_keeps_state_that_cannot_go_back(family_ir: Callable[[str], Path], store: Store) -> None:
    graph = family_ir("lfm2")
    manifest = rig.cut(store, graph)
    kinds = list(FAMILIES["lfm2"].config["layer_types"])
    layers = manifest.shards[1:-1]
    assert [layer.fixed_state_bytes > 0 for layer in layers] == [kind == "conv" for kind in kinds]
    assert [layer.kv_bytes_per_token > 0 for layer in layers] == [kind == "full_attention" for kind in kinds]

    run = rig.unsplit_run(rig.Unsplit(graph), [rig.prompt(256, 12)], 4)
    with open_pipeline(store, manifest, even_cuts(manifest, 2), rig.options(manifest, "stateful")) as pipeline:
        assert not pipeline.rewinds
        rig.replay(pipeline, run)
        with pytest.raises(StepError, match="cannot go back to 14"):
            rig.feed(pipeline, [100], 14)
        pipeline.release(rig.SEQUENCE)
        assert rig.difference(rig.replay(pipeline, run), run.logits) == 0.0, "a new start forgets the old state"


def test_an_export_is_made_once(family_ir: Callable[[str], Path]) -> None:
    graph = family_ir("llama")
    made = graph.stat().st_mtime_ns
    assert family_ir("llama") == graph and graph.stat().st_mtime_ns == made
