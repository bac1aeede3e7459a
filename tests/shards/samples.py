"""Small manifests for tests."""

from __future__ import annotations

from collections.abc import Sequence

from meshinfer.shards.manifest import FileRef, Manifest, ShardSpec, TensorSpec, Verification


def manifest(name: str, files: Sequence[FileRef], source: str = "sample") -> Manifest:
    """A manifest with one shard made of the first two files; the others are its tokenizer's."""
    hidden = TensorSpec("hidden_states", "f32", (-1, -1, 64))
    shard = ShardSpec(
        index=0,
        kind="layer",
        graph=files[0],
        weights=files[1],
        inputs=(hidden,),
        outputs=(hidden,),
        kv_bytes_per_token=512,
    )
    return Manifest(
        name=name,
        source=source,
        revision="",
        precision="int4",
        context_tokens=2048,
        shards=(shard,),
        tokenizer=tuple(files[2:]),
        chat_template=None,
        generation={},
        verification=(Verification(1, "stateful", 16, 0.0, True, 1.0),),
    )
