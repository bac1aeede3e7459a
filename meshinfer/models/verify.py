"""Compare composed stages with the unsplit model, on the same tokens, in exact mode."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshinfer.engine.devices import resolve
from meshinfer.engine.paged import PagedUnsupportedError
from meshinfer.engine.pipeline import even_cuts, open_pipeline
from meshinfer.engine.stage import StageOptions
from meshinfer.engine.step import Entry, Rows, Tokens
from meshinfer.engine.unsplit import UnsplitModel
from meshinfer.errors import VerificationError
from meshinfer.shards.manifest import Manifest, Verification
from meshinfer.shards.progress import Progress
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, SequenceId

PROMPT_TOKENS = 24
DECODE_TOKENS = 24
_SEQUENCE = SequenceId(0)


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unsplit model said: the tokens it was fed, chunk by chunk, and the logits of every one."""

    chunks: tuple[Tokens, ...]
    logits: tuple[Rows, ...]

    @property
    def tokens(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)


def reference(graph: Path, *, prompt_tokens: int = PROMPT_TOKENS, decode_tokens: int = DECODE_TOKENS) -> Reference:
    """Run the unsplit IR greedily after a fixed random prompt. Raises DeviceError, VerificationError."""
    unsplit = UnsplitModel(graph, resolve("cpu"), "exact", threads=None)
    vocabulary = unsplit.vocabulary
    low = min(100, vocabulary // 2)  # the first ids are mostly special tokens
    chunk = np.random.default_rng(0).integers(low, vocabulary, prompt_tokens, dtype=np.int64)
    chunks, logits, start = [], [], 0
    for _ in range(decode_tokens + 1):
        rows = unsplit.forward(chunk, start).copy()
        if not np.isfinite(rows).all():
            raise VerificationError("the unsplit model itself gives logits that are not numbers")
        chunks.append(chunk)
        logits.append(rows)
        start += len(chunk)
        chunk = np.array([rows[-1].argmax()], np.int64)
    return Reference(tuple(chunks), tuple(logits))


def compare(store: Store, manifest: Manifest, expected: Reference, stages: int, kv: KvBackend) -> Verification:
    """Feed the reference's tokens through `stages` composed stages and compare all logits.

    Raises RangeError, DeviceError, PagedUnsupportedError.
    """
    budget = manifest.kv_bytes_per_token * (expected.tokens + 64) * 2
    options = StageOptions(resolve("cpu"), kv, "exact", budget)
    worst, same, rows = 0.0, 0, 0
    with open_pipeline(store, manifest, even_cuts(manifest, stages), options) as pipeline:
        start = 0
        for chunk, wanted in zip(expected.chunks, expected.logits, strict=True):
            entry = Entry(_SEQUENCE, start, len(chunk), rows=tuple(range(len(chunk))))
            got = pipeline.forward([entry], chunk)
            difference = np.abs(got - wanted).max()
            worst = max(worst, float(difference)) if np.isfinite(difference) else float("inf")
            same += int((got.argmax(-1) == wanted.argmax(-1)).sum())
            rows += len(chunk)
            start += len(chunk)
    gc.collect()
    return Verification(
        stages=stages, kv=kv, tokens=rows, max_abs_diff=worst, tokens_equal=same == rows, top1_agreement=same / rows
    )


def verify_new(store: Store, manifest: Manifest, graph: Path, progress: Progress) -> tuple[Verification, ...]:
    """Which KV back ends reproduce the unsplit model, in two stages.

    Raises VerificationError with the numbers where the stateful one does not: then the cut is wrong.
    """
    progress("verify", 0, 3)
    expected = reference(graph)
    progress("verify", 1, 3)
    stages = min(2, len(manifest.shards))
    stateful = compare(store, manifest, expected, stages, "stateful")
    if stateful.max_abs_diff != 0.0 or not stateful.tokens_equal:
        raise VerificationError(
            f"the shards do not reproduce the model: logits differ by {stateful.max_abs_diff:.3g}, "
            f"{stateful.top1_agreement:.0%} of {stateful.tokens} tokens agree"
        )
    progress("verify", 2, 3)
    passed = [stateful]
    try:
        paged = compare(store, manifest, expected, stages, "paged")
        if paged.tokens_equal:
            passed.append(paged)
    except PagedUnsupportedError:
        pass
    progress("verify", 3, 3)
    return tuple(passed)
