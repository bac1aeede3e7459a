"""The unsplit model and its shards side by side: this compares without the product's own comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from meshinfer.engine.devices import resolve
from meshinfer.engine.pipeline import Pipeline
from meshinfer.engine.stage import StageOptions
from meshinfer.engine.step import Entry
from meshinfer.files.progress import silent
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.shards.write import write_shards
from meshinfer.types import KvBackend, Precision, SequenceId

Logits = npt.NDArray[np.float32]

SEQUENCE = SequenceId(0)

EXACT: dict[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


class Unsplit:
    """An IR as OpenVINO runs it by itself, one sequence, in f32."""

    def __init__(self, model: ov.Model | Path) -> None:
        self.request = ov.Core().compile_model(model, "CPU", EXACT).create_infer_request()
        self._inputs = {name for port in self.request.model_inputs for name in port.get_names()}

    def logits(self, tokens: Sequence[int], start: int) -> Logits:
        """[tokens, vocabulary]; a start of 0 forgets what was before."""
        if start == 0:
            self.request.reset_state()
        values = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, start + len(tokens)), np.int64),
            "position_ids": np.arange(start, start + len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        (logits,) = self.request.infer({k: v for k, v in values.items() if k in self._inputs}).values()
        return np.array(logits[0])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` most probable next tokens, one after the other."""
        found, pending, start = [], list(prompt), 0
        for _ in range(count):
            found.append(int(self.logits(pending, start)[-1].argmax()))
            start += len(pending)
            pending = [found[-1]]
        return found


@dataclass(frozen=True)
class Run:
    """What was fed to the unsplit model, chunk by chunk, and the logits of every position."""

    chunks: tuple[tuple[int, ...], ...]
    logits: tuple[Logits, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


def unsplit_run(unsplit: Unsplit, chunks: Sequence[Sequence[int]], decode: int = 0) -> Run:
    """Feed chunks of tokens, then `decode` greedy ones."""
    fed, logits = [], []
    for chunk in chunks:
        logits.append(unsplit.logits(chunk, sum(map(len, fed))))
        fed.append(tuple(chunk))
    for _ in range(decode):
        chunk = (int(logits[-1][-1].argmax()),)
        logits.append(unsplit.logits(chunk, sum(map(len, fed))))
        fed.append(chunk)
    return Run(tuple(fed), tuple(logits))


def prompt(vocabulary: int, count: int, seed: int = 0) -> list[int]:
    """Random tokens, without the first ids, which are special."""
    low = min(100, vocabulary // 2)
    return [int(token) for token in np.random.default_rng(seed).integers(low, vocabulary, count)]


def split(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The tokens in chunks of these sizes."""
    return [tokens[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def cut(store: Store, graph: Path, name: str = "model") -> Manifest:
    """Cut an IR into shards that lie in the store."""
    with store.adding(name) as work:
        manifest = Manifest(
            name=name,
            source=str(graph),
            revision="",
            precision="f32",
            context_tokens=2048,
            shards=write_shards(store, graph, work, silent),
            tokenizer=(),
            chat_template=None,
            generation={},
            verification=(),
        )
        store.save(manifest)
    return manifest


def options(manifest: Manifest, kv: KvBackend, precision: Precision = "exact", tokens: int = 512) -> StageOptions:
    """The CPU with a KV cache of so many tokens."""
    return StageOptions(resolve("cpu"), kv, precision, max(manifest.kv_bytes_per_token, 1) * tokens)


def feed(pipeline: Pipeline, tokens: Sequence[int], start: int, sequence: int = 0, rows: int | None = None) -> Logits:
    """The logits of the last `rows` (all by default) of these tokens."""
    wanted = tuple(range(len(tokens) - (len(tokens) if rows is None else rows), len(tokens)))
    entry = Entry(SequenceId(sequence), start, len(tokens), wanted)
    return np.array(pipeline.forward([entry], np.array(tokens, np.int64)))


def replay(pipeline: Pipeline, run: Run, sequence: int = 0) -> list[Logits]:
    """The logits for the chunks that the unsplit model was fed."""
    start, logits = 0, []
    for chunk in run.chunks:
        logits.append(feed(pipeline, chunk, start, sequence))
        start += len(chunk)
    return logits


def difference(got: Sequence[Logits], wanted: Sequence[Logits]) -> float:
    """The largest difference; NaN where one of them is no number."""
    assert [g.shape for g in got] == [w.shape for w in wanted]
    return float(np.max([np.abs(g - w).max() for g, w in zip(got, wanted, strict=True)]))


def best_tokens(logits: Sequence[Logits]) -> list[int]:
    """The most probable token after every position."""
    return [int(token) for rows in logits for token in rows.argmax(-1)]
