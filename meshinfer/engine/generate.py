"""One answer, token by token, from stages in this process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from meshinfer.engine.pipeline import Pipeline
from meshinfer.engine.sampling import Sampling, choose
from meshinfer.engine.step import Entry
from meshinfer.errors import ContextLengthError, InputError
from meshinfer.types import SequenceId

ALONE = SequenceId(0)
"""The sequence of an answer that has a pipeline to itself."""

PREFILL_CHUNK_TOKENS = 512
"""A prompt goes in by chunks of this many tokens, so that memory for activations stays bounded."""


def answer_room(prompt_tokens: int, context_tokens: int, max_tokens: int) -> int:
    """How many tokens an answer may have. Raises ContextLengthError, InputError."""
    if max_tokens < 1:
        raise InputError(f"max-tokens is 1 or more, not {max_tokens}")
    if prompt_tokens < 1:
        raise InputError("the prompt is empty: it has no tokens")
    if prompt_tokens >= context_tokens:
        raise ContextLengthError(prompt_tokens, context_tokens)
    return min(max_tokens, context_tokens - prompt_tokens)


def generate(
    pipeline: Pipeline,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    context_tokens: int,
    sampling: Sampling,
    eos_ids: Collection[int] = (),
    sequence: SequenceId = ALONE,
) -> Iterator[int]:
    """Yield the answer's token ids, without the one that ends it; the sequence is released at the end.

    Raises ContextLengthError, KvBudgetError and InputError before the first inference, DeviceError.
    """
    room = answer_room(len(prompt), context_tokens, max_tokens)
    pipeline.require_capacity(len(prompt) + room - 1)
    return _generate(pipeline, prompt, room, sampling, eos_ids, sequence)


def _generate(
    pipeline: Pipeline,
    prompt: Sequence[int],
    room: int,
    sampling: Sampling,
    eos_ids: Collection[int],
    sequence: SequenceId,
) -> Iterator[int]:
    try:
        pending = np.asarray(prompt, np.int64)
        position = 0
        for produced in range(room):
            for chunk in np.array_split(pending, -(-len(pending) // PREFILL_CHUNK_TOKENS)):
                end = position + len(chunk)
                rows = (len(chunk) - 1,) if end == len(prompt) + produced else ()
                logits = pipeline.forward([Entry(sequence, position, len(chunk), rows)], chunk)
                position = end
            token = choose(logits[0], sampling, position)
            if token in eos_ids:
                return
            yield token
            pending = np.array([token], np.int64)
    finally:
        pipeline.release(sequence)
