"""Between what travels and what the engine works with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshinfer.engine.sampling import Sampling
from meshinfer.engine.step import Entry, Tokens
from meshinfer.errors import InputError
from meshinfer.types import SequenceId
from meshinfer.wire.messages import WireEntry, WireSampling


def wire_entries(entries: Sequence[Entry], samplings: Sequence[Sampling]) -> tuple[WireEntry, ...]:
    """Entries as they travel; the sampling only where a token is to be chosen by it."""
    return tuple(
        WireEntry(
            entry.sequence,
            entry.start,
            entry.count,
            entry.rows,
            entry.blocks,
            wire_sampling(sampling) if entry.rows else None,
        )
        for entry, sampling in zip(entries, samplings, strict=True)
    )


def stage_entries(entries: Sequence[WireEntry], factor: int) -> tuple[Entry, ...]:
    """Entries for a stage `factor` of whose KV blocks make one of the ring's."""
    return tuple(
        Entry(
            SequenceId(entry.sequence),
            entry.start,
            entry.count,
            entry.rows,
            entry.blocks
            if factor == 1
            else tuple(block * factor + part for block in entry.blocks for part in range(factor)),
        )
        for entry in entries
    )


def wire_sampling(sampling: Sampling) -> WireSampling | None:
    """None stands for greedy."""
    if sampling.temperature == 0:
        return None
    return WireSampling(float(sampling.temperature), sampling.top_k, float(sampling.top_p), sampling.seed)


def engine_sampling(sampling: WireSampling | None) -> Sampling:
    """Raises InputError for values that no sampling has."""
    if sampling is None:
        return Sampling()
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as they travel, [n] i32."""
    return np.asarray(tokens, "<i4").tobytes()


def tokens_of(data: bytes) -> Tokens:
    """[n] i64. Raises InputError."""
    if len(data) % 4:
        raise InputError(f"{len(data)} bytes are no tokens")
    return np.frombuffer(data, "<i4").astype(np.int64)
