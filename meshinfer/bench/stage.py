"""Decode speed of composed stages beside that of the unsplit model, interleaved in one run.

Every contender is compiled once. Each round then runs all of them in turn, so that a drift of the
machine's speed meets them alike; the ratios are of medians over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshinfer.bench.clock import seconds_of
from meshinfer.bench.genai import GenaiBatch, GenaiSingle, genai_available
from meshinfer.engine.devices import resolve
from meshinfer.engine.pipeline import Pipeline, even_cuts, open_pipeline
from meshinfer.engine.stage import StageOptions
from meshinfer.engine.step import Entry, Tokens
from meshinfer.engine.unsplit import UnsplitModel
from meshinfer.errors import InputError
from meshinfer.files.progress import Progress, silent
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, Precision, SequenceId

WARM_STEPS = 4
"""Decode steps before the clock starts: the first ones of a shape compile kernels."""

LEAST_STEPS = 16
"""Decode steps under the clock, however many sequences share `decode_tokens`."""

_MARGIN_TOKENS = 96


class Contender(Protocol):
    """Something that decodes. `start` feeds one prompt to every sequence, `decode` adds tokens to all of them."""

    def start(self, prompts: Sequence[Tokens], tokens: int) -> None:
        """Prefill; up to `tokens` will be decoded afterwards."""

    def decode(self, steps: int) -> float:
        """Add `steps` tokens to every sequence; the seconds that took."""

    def finish(self) -> None:
        """Forget all sequences."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. `threads` is for every contender."""

    stages: tuple[int, ...] = (1, 2, 3)
    kv: tuple[KvBackend, ...] = ("paged", "stateful")
    sequences: tuple[int, ...] = (1, 4, 16)
    precision: Precision = "fast"
    threads: int = 1
    prompt_tokens: int = 64
    decode_tokens: int = 64
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One contender with one number of sequences: decode tokens/s over all sequences, and ratios of medians."""

    contender: str
    sequences: int
    median: float
    lowest: float
    highest: float
    against_plain_loop: float | None = None
    against_genai: float | None = None


class PlainLoop:
    """A plain Python loop over the unsplit IR, all sequences as one batch."""

    def __init__(self, graph: Path, precision: Precision, threads: int | None) -> None:
        self._model = UnsplitModel(graph, resolve("cpu"), precision, threads)
        self._last = np.zeros((0, 1), np.int64)
        self._position = 0

    def start(self, prompts: Sequence[Tokens], tokens: int) -> None:
        self._model.reset()
        self._position = 0
        self._step(np.stack(prompts))

    def decode(self, steps: int) -> float:
        return seconds_of(lambda: self._step(self._last), steps)

    def finish(self) -> None:
        self._model.reset()

    def _step(self, tokens: Tokens) -> None:
        logits = self._model.forward_batch(tokens, self._position)
        self._position += tokens.shape[1]
        self._last = logits[:, -1].argmax(-1)[:, None]


class _Stages:
    """Composed stages in this process, all sequences in one step."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._count = 0
        self._position = 0
        self._last = np.zeros(0, np.int64)

    def start(self, prompts: Sequence[Tokens], tokens: int) -> None:
        self._count, self._position = len(prompts), 0
        self._step(np.concatenate(prompts))

    def decode(self, steps: int) -> float:
        return seconds_of(lambda: self._step(self._last), steps)

    def finish(self) -> None:
        for sequence in range(self._count):
            self._pipeline.release(SequenceId(sequence))

    def _step(self, tokens: Tokens) -> None:
        each = len(tokens) // self._count
        entries = [Entry(SequenceId(s), self._position, each, (each - 1,)) for s in range(self._count)]
        logits = self._pipeline.forward(entries, tokens)
        self._position += each
        self._last = logits.argmax(-1)


def check_options(manifest: Manifest, options: BenchOptions) -> None:
    """Refuse what cannot be measured before anything is made for it. Raises InputError."""
    for stages in options.stages:
        even_cuts(manifest, stages)
    longest = options.prompt_tokens + WARM_STEPS + max(LEAST_STEPS, options.decode_tokens)
    if longest > manifest.context_tokens:
        raise InputError(
            f"sequences of {longest} tokens are too long: the context of {manifest.name} "
            f"holds {manifest.context_tokens} tokens"
        )


def measure(
    store: Store, manifest: Manifest, graph: Path, options: BenchOptions, progress: Progress = silent
) -> list[Row]:
    """Measure every contender with every number of sequences. Raises all that opening a pipeline can."""
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        contenders = dict(_open_all(stack, store, manifest, graph, options, progress))
        vocabulary = manifest.shards[-1].outputs[0].shape[-1]
        pairs = [(n, name) for n in options.sequences for name in contenders if n == 1 or name != _GENAI_SINGLE]
        total = len(pairs) * options.rounds
        for turn in range(options.rounds):
            for index, (count, name) in enumerate(pairs):
                progress("measure", turn * len(pairs) + index, total)
                rate = _measure_one(contenders[name], vocabulary, count, options)
                rates.setdefault((name, count), []).append(rate)
        progress("measure", total, total)
    return _rows(rates)


_PLAIN, _GENAI_SINGLE, _GENAI_BATCH = "plain loop", "genai LLMPipeline", "genai batching"


def _open_all(
    stack: ExitStack, store: Store, manifest: Manifest, graph: Path, options: BenchOptions, progress: Progress
) -> Iterator[tuple[str, Contender]]:
    most = max(options.sequences)
    positions = most * (options.prompt_tokens + options.decode_tokens + WARM_STEPS + _MARGIN_TOKENS)
    splits = [(kv, stages) for kv in options.kv for stages in options.stages]
    count = iter(range(3 + len(splits)))
    progress("load", next(count), 3 + len(splits))
    yield _PLAIN, PlainLoop(graph, options.precision, options.threads)
    if genai_available(graph.parent):
        progress("load", next(count), 3 + len(splits))
        yield _GENAI_SINGLE, GenaiSingle(graph.parent, options.precision, options.threads)
        progress("load", next(count), 3 + len(splits))
        yield _GENAI_BATCH, GenaiBatch(graph.parent, options.precision, options.threads, most, positions)
    budget = manifest.kv_bytes_per_token * positions
    for kv, stages in splits:
        progress("load", next(count), 3 + len(splits))
        chosen = StageOptions(resolve("cpu"), kv, options.precision, budget, options.threads)
        pipeline = stack.enter_context(open_pipeline(store, manifest, even_cuts(manifest, stages), chosen))
        yield f"{stages} stage{'s' if stages > 1 else ''}, {kv}", _Stages(pipeline)
    progress("load", 3 + len(splits), 3 + len(splits))


def _measure_one(contender: Contender, vocabulary: int, count: int, options: BenchOptions) -> float:
    """Decode tokens/s of all sequences together."""
    generator = np.random.default_rng(count)
    prompts = [generator.integers(vocabulary, size=options.prompt_tokens, dtype=np.int64) for _ in range(count)]
    steps = max(LEAST_STEPS, options.decode_tokens // count)
    contender.start(prompts, WARM_STEPS + steps)
    try:
        contender.decode(WARM_STEPS)
        return count * steps / contender.decode(steps)
    finally:
        contender.finish()


def _rows(rates: dict[tuple[str, int], list[float]]) -> list[Row]:
    medians = {key: statistics.median(values) for key, values in rates.items()}
    rows = []
    for (name, count), values in sorted(rates.items(), key=lambda item: item[0][1]):
        median = medians[(name, count)]
        plain, genai = medians.get((_PLAIN, count)), medians.get((_GENAI_BATCH, count))
        rows.append(
            Row(
                name,
                count,
                median,
                min(values),
                max(values),
                median / plain if plain else None,
                median / genai if genai else None,
            )
        )
    return rows


def as_json(manifest: Manifest, options: BenchOptions, rows: Sequence[Row]) -> dict[str, Any]:
    """The result for programs."""
    return {"model": manifest.name, "options": asdict(options), "rows": [asdict(row) for row in rows]}
