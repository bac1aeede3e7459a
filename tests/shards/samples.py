"""Small manifests for tests."""

from __future__ import annotations

from collections.abc import Sequence

from meshinfer.shards.manifest import FileRef, Manifest, ShardKind, ShardSpec, TensorSpec, Verification


def manifest(name: str, files: Sequence[FileRef], source: str = "sample") -> Manifest:
    """A manifest whose shards share the first two files; the others are its tokenizer's."""
    hidden = TensorSpec("hidden_states", "f32", (-1, -1, 64))
    kinds: tuple[ShardKind, ...] = ("embedding", "layer", "head")
    shards = tuple(
        ShardSpec(index, kind, files[0], files[1], (hidden,), (hidden,), 512 if kind == "layer" else 0)
        for index, kind in enumerate(kinds)
    )
    return Manifest(
        name=name,
        source=source,
        revision="",
        precision="int4",
        context_tokens=2048,
        shards=shards,
        tokenizer=tuple(files[2:]),
        chat_template=None,
        generation={},
        verification=(Verification(1, "stateful", 16, 0.0, True, 1.0, 20.0),),
    )
