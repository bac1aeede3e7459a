"""A real chat model, from a GGUF and from optimum-intel, in any number of stages and with many sequences at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshinfer.config import Folders
from meshinfer.engine.generate import generate
from meshinfer.engine.pipeline import Pipeline, even_cuts, open_pipeline
from meshinfer.engine.sampling import Sampling
from meshinfer.engine.stateful import MAX_JUNK
from meshinfer.engine.step import Entry
from meshinfer.models.add import add_model
from meshinfer.models.check import unsplit_graph
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend, Precision, SequenceId
from tests.parity import rig
from tests.parity.families import GRAPH
from tests.parity.smollm2 import exported_smollm2

TOKENS = 64
TEXT = (
    "A ship is sailing from Lisbon to Boston. On the third day the captain writes into his log: the wind has turned "
    "west, the crew is well, and"
)
QUESTIONS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    TEXT,
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,",
    "Once upon a time",
)


@dataclass(frozen=True)
class Sample:
    """A stored model and what the IR it was cut from says."""

    store: Store
    manifest: Manifest
    unsplit: rig.Unsplit
    run: rig.Run

    def stages(self, count: int) -> list[tuple[int, int]]:
        return even_cuts(self.manifest, count)


@pytest.fixture(scope="module")
def tokenizer(smollm2_home: Folders) -> Tokenizer:
    store = Store(smollm2_home)
    (ref,) = [ref for ref in store.load("smollm2-135m").tokenizer if ref.name == "tokenizer.json"]
    return Tokenizer.from_file(str(store.path(ref)))


def _sample(store: Store, manifest: Manifest, graph: Path, tokenizer: Tokenizer) -> Sample:
    unsplit = rig.Unsplit(graph)
    tokens = tokenizer.encode(TEXT).ids
    return Sample(store, manifest, unsplit, rig.unsplit_run(unsplit, [tokens[:20], tokens[20:]], TOKENS))


@pytest.fixture(scope="module")
def from_gguf(smollm2_home: Folders, tokenizer: Tokenizer) -> Iterator[Sample]:
    store = Store(smollm2_home)
    manifest = store.load("smollm2-135m")
    with unsplit_graph(store, manifest) as graph:
        yield _sample(store, manifest, graph, tokenizer)
    gc.collect()


@pytest.fixture(
    scope="module",
    params=["gguf", *(pytest.param(bits, marks=pytest.mark.families) for bits in (4, 8, 32))],
    ids=lambda source: source if isinstance(source, str) else f"optimum-{source}bit",
)
def sample(
    request: pytest.FixtureRequest,
    smollm2_home: Folders,
    tokenizer: Tokenizer,
    exports: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Sample:
    """SmolLM2 by one road after the other."""
    if request.param == "gguf":
        gguf: Sample = request.getfixturevalue("from_gguf")
        return gguf
    home = Store(smollm2_home)
    words = tmp_path_factory.mktemp("tokenizer")
    for ref in home.load("smollm2-135m").tokenizer:
        (words / ref.name).write_bytes(home.path(ref).read_bytes())
    (weights,) = smollm2_home.downloads.glob("*.gguf")
    bits = None if request.param == 32 else request.param
    folder = exported_smollm2(weights, sorted(words.iterdir()), bits, exports)
    store = Store(Folders(tmp_path_factory.mktemp("home")))
    return _sample(store, add_model(store, str(folder), name="smollm2"), folder / GRAPH, tokenizer)


@pytest.mark.parametrize("stages", [1, 2, 3, 30])
@pytest.mark.parametrize("kv", ["stateful", "paged"])
def test_any_number_of_stages_is_the_unsplit_model(sample: Sample, kv: KvBackend, stages: int) -> None:
    assert sample.manifest.kv_backends == ("paged", "stateful")
    prompt = sample.run.tokens[:-TOKENS]
    with open_pipeline(
        sample.store, sample.manifest, sample.stages(stages), rig.options(sample.manifest, kv)
    ) as pipeline:
        logits = rig.replay(pipeline, sample.run)
        if kv == "stateful":
            assert rig.difference(logits, sample.run.logits) == 0.0
        assert rig.best_tokens(logits) == rig.best_tokens(sample.run.logits)
        pipeline.release(rig.SEQUENCE)
        answer = generate(pipeline, prompt, max_tokens=TOKENS, context_tokens=2048, sampling=Sampling())
        assert list(answer) == sample.run.tokens[-TOKENS:] == sample.unsplit.greedy(prompt, TOKENS)


def test_no_shard_carries_another_ones_weights(sample: Sample) -> None:
    layers = [shard.weights.size_bytes for shard in sample.manifest.shards if shard.kind == "layer"]
    assert len(layers) == 30 and max(layers) <= 1.2 * float(np.median(layers))


@pytest.mark.parametrize("kv", ["paged", "stateful"])
def test_sequences_that_join_and_leave_do_not_see_each_other(
    from_gguf: Sample, tokenizer: Tokenizer, kv: KvBackend
) -> None:
    prompts = {SequenceId(n): list(tokenizer.encode(text).ids) for n, text in enumerate(QUESTIONS)}
    lengths = {sequence: 12 + 7 * sequence for sequence in prompts}
    alone = {sequence: from_gguf.unsplit.greedy(prompt, lengths[sequence]) for sequence, prompt in prompts.items()}
    random = np.random.default_rng(0)
    answers: dict[SequenceId, list[int]] = {}
    mixed_steps = 0
    with open_pipeline(
        from_gguf.store, from_gguf.manifest, from_gguf.stages(2), rig.options(from_gguf.manifest, kv)
    ) as pipeline:
        held: dict[SequenceId, int] = {}
        waiting = list(prompts)
        while waiting or held:
            if waiting and random.random() < 0.4:
                held[waiting.pop(0)] = 0
            entries, tokens, kinds = [], [], set()
            for sequence, start in held.items():
                known = prompts[sequence] + answers.get(sequence, [])
                count = min(int(random.integers(1, 9)), len(known) - start)
                last = start + count == len(known)
                entries.append(Entry(sequence, start, count, rows=(count - 1,) if last else ()))
                tokens += known[start : start + count]
                kinds.add("decode" if start >= len(prompts[sequence]) else "prefill")
            if not entries:
                continue
            mixed_steps += len(kinds) == 2
            logits = pipeline.forward(entries, np.array(tokens, np.int64))
            row = 0
            for entry in entries:
                held[entry.sequence] = entry.end
                if entry.rows:
                    answers.setdefault(entry.sequence, []).append(int(logits[row].argmax()))
                    row += 1
                if len(answers.get(entry.sequence, [])) == lengths[entry.sequence]:
                    pipeline.release(entry.sequence)
                    del held[entry.sequence]
            assert row == len(logits)
        assert pipeline.pool.free == pipeline.pool.count
    assert mixed_steps > 5
    assert answers == alone


@pytest.mark.parametrize("draft", [4, MAX_JUNK // 3])
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("kv", ["paged", "stateful"])
def test_rejected_drafts_leave_no_trace(from_gguf: Sample, kv: KvBackend, precision: Precision, draft: int) -> None:
    prompt = from_gguf.run.tokens[:-TOKENS]
    wrong = rig.prompt(49152, draft, seed=1)
    options = replace(rig.options(from_gguf.manifest, kv, precision), mask_rewinds=True)
    with open_pipeline(from_gguf.store, from_gguf.manifest, from_gguf.stages(2), options) as pipeline:
        undisturbed = _answer(pipeline, prompt, 32, [])
        pipeline.release(rig.SEQUENCE)
        assert _answer(pipeline, prompt, 32, wrong) == undisturbed
    if precision == "exact":
        assert undisturbed == from_gguf.run.tokens[-TOKENS:][:32]


def _answer(pipeline: Pipeline, prompt: list[int], count: int, wrong: list[int]) -> list[int]:
    """Greedy tokens, with `wrong` ones tried and taken back after every fifth."""
    found: list[int] = []
    pending, start = prompt, 0
    for number in range(count):
        found.append(int(rig.feed(pipeline, pending, start, rows=1)[0].argmax()))
        start += len(pending)
        pending = [found[-1]]
        if wrong and number % 5 == 4:
            rig.feed(pipeline, wrong, start)
    return found


@pytest.mark.parametrize("kv", ["paged", "stateful"])
def test_a_released_sequence_leaves_nothing_in_its_blocks(from_gguf: Sample, kv: KvBackend) -> None:
    tokens = from_gguf.run.tokens[:50]
    options = rig.options(from_gguf.manifest, kv, tokens=4 * 32)
    with open_pipeline(from_gguf.store, from_gguf.manifest, from_gguf.stages(2), options) as pipeline:
        assert pipeline.pool.count == 4
        clean = rig.feed(pipeline, tokens, 0, sequence=1)
        pipeline.release(SequenceId(1))
        rig.feed(pipeline, rig.prompt(49152, 4 * 32), 0, sequence=2)
        assert pipeline.pool.free == 0
        pipeline.release(SequenceId(2))
        assert rig.difference([rig.feed(pipeline, tokens, 0, sequence=3)], [clean]) == 0.0


@pytest.mark.parametrize("kv", ["paged", "stateful"])
def test_the_head_is_applied_to_the_rows_asked_for(from_gguf: Sample, kv: KvBackend) -> None:
    tokens = from_gguf.run.tokens[:20]
    array = np.array(tokens, np.int64)
    with open_pipeline(
        from_gguf.store, from_gguf.manifest, from_gguf.stages(2), rig.options(from_gguf.manifest, kv)
    ) as pipeline:
        every = rig.feed(pipeline, tokens, 0)
        some = np.array(pipeline.forward([Entry(rig.SEQUENCE, 0, 20, (3, 7, 19))], array))
        assert some.shape == (3, 49152)
        assert np.abs(some - every[[3, 7, 19]]).max() < 1e-3
        assert (some.argmax(-1) == every[[3, 7, 19]].argmax(-1)).all()
        assert pipeline.forward([Entry(rig.SEQUENCE, 0, 20)], array).shape == (0, 49152)
        pair = [Entry(rig.SEQUENCE, 0, 20, (19,)), Entry(SequenceId(1), 0, 20, (3, 7))]
        both = np.array(pipeline.forward(pair, np.concatenate([array, array])))
        assert (both.argmax(-1) == every[[19, 3, 7]].argmax(-1)).all()
