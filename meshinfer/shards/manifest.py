"""The manifest: everything a node must know about a model before it holds a byte of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from meshinfer.errors import RangeError, SourceError
from meshinfer.types import Digest, KvBackend, Sha256

FORMAT_VERSION = 1

_PREFERRED: tuple[KvBackend, ...] = ("paged", "stateful")

PAGED_TOLERANCE = 0.005
"""Part of the largest logit that paged ones may differ by. Rounding takes a hundredth of that; attention that is wrong
takes more, even where the tokens happen to be equal."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]

ShardKind = Literal["embedding", "layer", "head"]


@dataclass(frozen=True, slots=True)
class FileRef:
    """One file of a model: what it is called there, and which bytes it must have."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    sha256: Digest
    size_bytes: Count


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that crosses a cut: `shape` has -1 for batch and sequence."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One shard: its two files, what flows in and out, and what its state costs."""

    index: Count
    kind: ShardKind
    graph: FileRef
    weights: FileRef
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kv_bytes_per_token: Count
    """Bytes of f32 KV cache one token takes in this shard."""
    fixed_state_bytes: Count = 0
    """Bytes of f32 state a sequence takes whatever its length (convolutions, recurrences): it cannot be rewound."""

    @property
    def size_bytes(self) -> int:
        return self.graph.size_bytes + self.weights.size_bytes


@dataclass(frozen=True, slots=True)
class Verification:
    """How the composed shards compared with the unsplit model, on the same tokens in exact mode."""

    stages: int
    kv: KvBackend
    tokens: Count
    max_abs_diff: float
    tokens_equal: bool
    top1_agreement: float
    largest_logit: float
    """Of the unsplit model, in magnitude: what a difference is measured by."""

    @property
    def reproduced(self) -> bool:
        """Whether these stages are the model: bit for bit, or in another order of sums but for rounding."""
        tolerance = 0.0 if self.kv == "stateful" else PAGED_TOLERANCE * self.largest_logit
        return self.tokens_equal and self.max_abs_diff <= tolerance


@dataclass(frozen=True, slots=True)
class Manifest:
    """A shard set. `name` is what this machine calls it and is no part of the fingerprint."""

    name: str
    source: str
    revision: str
    precision: str
    context_tokens: Annotated[int, msgspec.Meta(ge=1)]
    shards: tuple[ShardSpec, ...]
    tokenizer: tuple[FileRef, ...]
    chat_template: str | None
    generation: dict[str, Any]
    verification: tuple[Verification, ...]
    """One entry per KV back end that reproduces the model; the others cannot run it."""
    bits: int | None = None
    """What the weights were exported to, where the source left the choice."""
    versions: dict[str, str] = field(default_factory=dict)
    golden: tuple[FileRef, ...] = ()
    """What each shard gives for fixed tokens, in exact mode (see `engine.golden`); none in older manifests."""
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
        verified = {entry.kv for entry in self.verification if entry.reproduced}
        return tuple(kv for kv in _PREFERRED if kv in verified)

    @property
    def files(self) -> tuple[FileRef, ...]:
        """Every file of the shard set."""
        shards = tuple(ref for shard in self.shards for ref in (shard.graph, shard.weights))
        return shards + self.tokenizer + self.golden

    def fingerprint(self) -> Sha256:
        """SHA-256 of the canonical JSON of what defines the model: not of its name here, where it came from, when and
        how it was checked."""
        data = asdict(self)
        for about in ("name", "source", "revision", "verification", "versions", "bits", "golden"):
            del data[about]
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
    """Read a manifest. Raises SourceError for anything that is not a sound one of this version."""
    try:
        version = msgspec.json.decode(text, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise SourceError(f"a manifest of format {version}, not {FORMAT_VERSION}: add the model again")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SourceError(f"not a model manifest: {error}") from error
    ends = manifest.generation.get("eos_token_id", [])
    if not isinstance(ends, list) or not all(isinstance(token, int) for token in ends):
        raise SourceError(f"not a model manifest: eos_token_id is {ends!r} instead of a list of tokens")
    if len(manifest.golden) not in (0, len(manifest.shards)):
        raise SourceError("not a model manifest: it has golden activations of some shards only")
    if not _in_order(manifest.shards):
        raise SourceError("not a model manifest: its shards are not an embedding, layers and a head in order")
    return manifest


class _Version(msgspec.Struct):
    format_version: int


def _in_order(shards: tuple[ShardSpec, ...]) -> bool:
    kinds = ["embedding", *["layer"] * (len(shards) - 2), "head"]
    return [shard.kind for shard in shards] == kinds and all(s.index == i for i, s in enumerate(shards))
