"""Identifiers shared by every package."""

from __future__ import annotations

from typing import Annotated, Literal, NewType, cast, get_args

import msgspec

Sha256 = NewType("Sha256", str)
"""A file's SHA-256 as 64 lower-case hex digits; the name of a file in the store."""

Digest = Annotated[Sha256, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 that is checked to be one where it is read."""

NodeId = NewType("NodeId", str)
"""A node, by the hash of its public key; the smallest one in a mesh leads."""

SequenceId = NewType("SequenceId", int)
"""One request's token stream inside a stage."""

Precision = Literal["exact", "fast"]
"""exact: f32 everywhere, equal to the unsplit model; fast: the device's own best."""

KvBackend = Literal["paged", "stateful"]
"""How a stage keeps its KV cache."""


def kv_backend(name: str) -> KvBackend:
    """A back end by its name, which the caller has checked to be one."""
    assert name in get_args(KvBackend)
    return cast(KvBackend, name)
