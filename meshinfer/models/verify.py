"""Compare composed stages with the unsplit model, on the same tokens, in exact mode."""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshinfer.engine.devices import resolve
from meshinfer.engine.pipeline import Pipeline, even_cuts, open_pipeline
from meshinfer.engine.stage import StageOptions
from meshinfer.engine.step import Entry, Rows, Tokens
from meshinfer.engine.unsplit import UnsplitModel
from meshinfer.errors import DeviceError, PagedUnsupportedError, VerificationError
from meshinfer.files.progress import Progress
from meshinfer.shards.manifest import Manifest, Verification
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, SequenceId

log = logging.getLogger(__name__)

PROMPT_TOKENS = 24
DECODE_TOKENS = 24
_STAGES = 2
_EVERY = 2
"""Of the prompt's positions, the logits of every second one are compared."""
_SEQUENCE = SequenceId(0)
_SPARE_TOKENS = 128
"""More than the blocks that rounding takes."""
_COPIES_WHILE_OVERLAPPING = 4
"""Times a model's size that compiling it whole and in stages at once may take."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the unsplit model said: the tokens it was fed, chunk by chunk, and the logits of every one."""

    chunks: tuple[Tokens, ...]
    logits: tuple[Rows, ...]

    @property
    def tokens(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def largest_logit(self) -> float:
        return max(float(np.abs(rows).max()) for rows in self.logits)


def reference(graph: Path) -> Reference:
    """Run the unsplit IR greedily after a fixed random prompt. Raises DeviceError, VerificationError."""
    unsplit = UnsplitModel(graph, resolve("cpu"), "exact", threads=None)
    vocabulary = unsplit.vocabulary
    low = min(100, vocabulary // 2)  # the first ids are mostly special tokens
    chunk = np.random.default_rng(0).integers(low, vocabulary, PROMPT_TOKENS, dtype=np.int64)
    chunks, logits, start = [], [], 0
    for _ in range(DECODE_TOKENS + 1):
        rows = unsplit.forward(chunk, start).copy()
        if not np.isfinite(rows).all():
            raise VerificationError("the unsplit model itself gives logits that are not numbers")
        chunks.append(chunk)
        logits.append(rows)
        start += len(chunk)
        chunk = np.array([rows[-1].argmax()], np.int64)
    return Reference(tuple(chunks), tuple(logits))


def compare(store: Store, manifest: Manifest, expected: Reference, stages: int, kv: KvBackend) -> Verification:
    """Feed the reference's tokens through `stages` composed stages and compare logits.

    Raises InputError for a number of stages the model does not have, DeviceError, PagedUnsupportedError.
    """
    with _open(store, manifest, stages, kv, expected.tokens) as pipeline:
        return _compare(pipeline, expected, stages, kv)


def verify_new(store: Store, manifest: Manifest, graph: Path, progress: Progress) -> tuple[Verification, ...]:
    """Which KV back ends reproduce the unsplit model, in two stages.

    Raises VerificationError with the numbers where the stateful one does not: then the cut is wrong.
    """
    progress("verify", 0, 3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(reference, graph)
        if manifest.size_bytes * _COPIES_WHILE_OVERLAPPING > resolve("cpu").free_memory_bytes:
            running.result()  # one after the other: the unsplit model is gone before the stages are compiled
        with _open(store, manifest, _STAGES, "stateful", PROMPT_TOKENS + DECODE_TOKENS) as pipeline:
            expected = running.result()
            progress("verify", 1, 3)
            stateful = _compare(pipeline, expected, _STAGES, "stateful")
    if not stateful.reproduced:
        raise VerificationError(
            f"the shards do not reproduce the model: logits differ by {stateful.max_abs_diff:.3g}, "
            f"{stateful.top1_agreement:.0%} of {stateful.tokens} tokens agree"
        )
    progress("verify", 2, 3)
    passed = [stateful]
    try:
        paged = compare(store, manifest, expected, _STAGES, "paged")
        if paged.reproduced:
            passed.append(paged)
        else:
            log.warning("%s runs without paged KV: its logits are off by %.2g", manifest.name, paged.max_abs_diff)
    except (PagedUnsupportedError, DeviceError) as error:
        log.warning("%s runs without paged KV: %s", manifest.name, error)
    progress("verify", 3, 3)
    return tuple(passed)


def _open(
    store: Store, manifest: Manifest, stages: int, kv: KvBackend, tokens: int
) -> AbstractContextManager[Pipeline]:
    options = StageOptions(resolve("cpu"), kv, "exact", manifest.kv_bytes_per_token * (tokens + _SPARE_TOKENS))
    return open_pipeline(store, manifest, even_cuts(manifest, stages), options)


def _compare(pipeline: Pipeline, expected: Reference, stages: int, kv: KvBackend) -> Verification:
    worst, same, rows, start = 0.0, 0, 0, 0
    for chunk, wanted in zip(expected.chunks, expected.logits, strict=True):
        picked = tuple(range(0, len(chunk), _EVERY))  # fewer than there are positions, as when a prompt is answered
        got = pipeline.forward([Entry(_SEQUENCE, start, len(chunk), picked)], chunk)
        wanted = wanted[::_EVERY]
        difference = float(np.abs(got - wanted).max()) if got.shape == wanted.shape else math.inf
        worst = max(worst, difference) if math.isfinite(difference) else math.inf
        same += int((got.argmax(-1) == wanted.argmax(-1)).sum()) if got.shape == wanted.shape else 0
        rows += len(wanted)
        start += len(chunk)
    return Verification(stages, kv, rows, worst, same == rows, same / rows, expected.largest_logit)
