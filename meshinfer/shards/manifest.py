"""The manifest: everything a node must know about a model before it holds a byte of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from meshinfer.errors import RangeError, SourceError
from meshinfer.types import KvBackend, Sha256

FORMAT_VERSION = 1

_PREFERRED: tuple[KvBackend, ...] = ("paged", "stateful")

ShardKind = Literal["embedding", "layer", "head"]


@dataclass(frozen=True, slots=True)
class FileRef:
    """One file of a model: what it is called there, and which bytes it must have."""

    name: str
    sha256: Sha256
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that crosses a cut: `shape` has -1 for batch and sequence."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One shard: its two files, what flows in and out, and what its state costs."""

    index: int
    kind: ShardKind
    graph: FileRef
    weights: FileRef
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kv_bytes_per_token: int
    """Bytes of f32 KV cache one token takes in this shard."""
    fixed_state_bytes: int = 0
    """Bytes of f32 state a sequence takes whatever its length (convolutions, recurrences): it cannot be rewound."""

    @property
    def size_bytes(self) -> int:
        return self.graph.size_bytes + self.weights.size_bytes


@dataclass(frozen=True, slots=True)
class Verification:
    """How the composed shards compared with the unsplit model, on the same tokens in exact mode."""

    stages: int
    kv: KvBackend
    tokens: int
    max_abs_diff: float
    tokens_equal: bool
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """A shard set. `name` is what this machine calls it and is no part of the fingerprint."""

    name: str
    source: str
    revision: str
    precision: str
    context_tokens: int
    shards: tuple[ShardSpec, ...]
    tokenizer: tuple[FileRef, ...]
    chat_template: str | None
    generation: dict[str, Any]
    verification: tuple[Verification, ...]
    """One entry per KV back end that reproduces the model; the others cannot run it."""
    bits: int | None = None
    """What the weights were exported to, where the source left the choice."""
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards, each counted once."""
        refs = {ref.sha256: ref.size_bytes for shard in self.shards for ref in (shard.graph, shard.weights)}
        return sum(refs.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of f32 KV cache one token takes in the whole model."""
        return sum(shard.kv_bytes_per_token for shard in self.shards)

    @property
    def kv_backends(self) -> tuple[KvBackend, ...]:
        """The back ends that were seen to reproduce the model, the preferred one first."""
        verified = {entry.kv for entry in self.verification}
        return tuple(kv for kv in _PREFERRED if kv in verified)

    @property
    def files(self) -> tuple[FileRef, ...]:
        """Every file of the shard set."""
        return tuple(ref for shard in self.shards for ref in (shard.graph, shard.weights)) + self.tokenizer

    def fingerprint(self) -> Sha256:
        """SHA-256 of the canonical JSON without the name."""
        data = asdict(self)
        del data["name"]
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return Sha256(hashlib.sha256(canonical.encode()).hexdigest())

    def range(self, start: int, stop: int) -> tuple[ShardSpec, ...]:
        """The shards of [start, stop). Raises RangeError where the model has no such range."""
        if not 0 <= start < stop <= len(self.shards):
            raise RangeError(f"shards {start}..{stop} are not in {self.name}: it has 0..{len(self.shards)}")
        return self.shards[start:stop]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)


def from_json(text: str | bytes) -> Manifest:
    """Read a manifest. Raises SourceError for anything that is not one of this version."""
    try:
        data = json.loads(text)
        if data["format_version"] != FORMAT_VERSION:
            theirs = data["format_version"]
            raise SourceError(f"a manifest of format {theirs}, not {FORMAT_VERSION}: add the model again")
        data["shards"] = tuple(_shard(item) for item in data["shards"])
        data["tokenizer"] = tuple(FileRef(**item) for item in data["tokenizer"])
        data["verification"] = tuple(Verification(**item) for item in data["verification"])
        return Manifest(**data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"not a model manifest: {error}") from error


def _shard(item: dict[str, Any]) -> ShardSpec:
    item["graph"] = FileRef(**item["graph"])
    item["weights"] = FileRef(**item["weights"])
    for side in ("inputs", "outputs"):
        item[side] = tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in item[side])
    return ShardSpec(**item)
