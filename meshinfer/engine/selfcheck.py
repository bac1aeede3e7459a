"""Whether a compiled stage gives what its shards gave when the model was added."""

from __future__ import annotations

import numpy as np

from meshinfer.engine.golden import TOKENS, golden_rows, golden_tokens
from meshinfer.engine.step import Entry, Rows, Stage, Step
from meshinfer.errors import KvBudgetError, SelfCheckError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import Precision, SequenceId

TOLERANCES: dict[Precision, float] = {"exact": 1e-3, "fast": 0.15}
"""smollm2-135m in 1 to 4 stages on an AVX2 CPU: 0 in exact mode, at most 0.0045 in fast mode, and 0.022 with every sum
and product of hidden states rounded to bf16. With the weights of another layer: 0.18 to 0.71."""

_TINY = 1e-12
_SEQUENCE = SequenceId(-1)
"""No request is called so."""


def self_check(stage: Stage, store: Store, manifest: Manifest, start: int, stop: int, precision: Precision) -> float:
    """Feed a stage of shards [start, stop) golden activations and return how far off its worst row is: the L2 norm of
    the difference relative to that of what is expected.

    Row by row, because the first position of many models is a hundred times as large as all others together.
    To be called before the stage serves anybody: KV blocks from 0 on are written to. Without golden activations
    zeros go in, and what comes out only has to be numbers. Raises SelfCheckError, KvBudgetError, DeviceError, and
    CorruptFileError or InputError for the golden files.
    """
    specs = manifest.range(start, stop)
    blocks = -(-TOKENS // stage.block_tokens)
    if stage.kv_blocks < blocks:
        raise KvBudgetError(f"a self-check needs {blocks} KV blocks, the stage has {stage.kv_blocks}")
    entry = Entry(_SEQUENCE, 0, TOKENS, (TOKENS - 1,) if specs[-1].kind == "head" else (), tuple(range(blocks)))
    tokens = golden_tokens(manifest) if start == 0 else None
    hidden: tuple[Rows, ...] = ()
    if start and manifest.golden:
        hidden = golden_rows(store, manifest, start - 1)
    elif start:
        hidden = tuple(
            np.zeros((TOKENS, tensor.shape[-1]), np.float32) for tensor in manifest.shards[start - 1].outputs
        )
    try:
        outputs = stage.forward(Step((entry,), tokens, hidden))
        expected = golden_rows(store, manifest, stop - 1) if manifest.golden else None
        difference = _difference(outputs, expected)
    finally:
        stage.release(_SEQUENCE)
    tolerance = TOLERANCES[precision]
    if not difference <= tolerance:
        raise SelfCheckError(f"the stage of shards {start}..{stop} of {manifest.name}", difference, tolerance)
    return difference


def _difference(outputs: tuple[Rows, ...], expected: tuple[Rows, ...] | None) -> float:
    """Of the worst row; infinite where the outputs are not even numbers. 0 where nothing is expected of them."""
    if not all(np.isfinite(rows).all() for rows in outputs):
        return float("inf")
    if expected is None:
        return 0.0
    if [rows.shape for rows in outputs] != [rows.shape for rows in expected]:
        return float("inf")
    worst = 0.0
    for got, wanted in zip(outputs, expected, strict=True):
        off, size = (np.linalg.norm(rows.astype(np.float64), axis=1) for rows in (got - wanted, wanted))
        worst = max(worst, float((off / np.maximum(size, _TINY)).max()))
    return worst
