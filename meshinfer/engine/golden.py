"""Golden activations: what every shard of a model gives for fixed tokens, in exact mode on a CPU.

They travel with the manifest, one file per shard: its boundary tensors one after the other, each [tokens, width]
little-endian f32; of the last shard the logits of the last position, [1, vocabulary].
"""

from __future__ import annotations

import numpy as np

from meshinfer.engine.assemble import assemble
from meshinfer.engine.devices import resolve
from meshinfer.engine.stage import StageOptions, compile_model
from meshinfer.engine.stateful import StatefulStage
from meshinfer.engine.step import Entry, Rows, Step, Tokens
from meshinfer.errors import SourceError, VerificationError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.types import SequenceId

TOKENS = 6
_F32 = np.dtype("<f4")


def golden_tokens(manifest: Manifest) -> Tokens:
    """The fixed tokens, [TOKENS] i64: spread over the vocabulary, without the first ids, which are mostly special."""
    vocabulary = manifest.shards[-1].outputs[0].shape[-1]
    low = min(100, vocabulary // 2)
    return low + (vocabulary - low) * np.arange(TOKENS, dtype=np.int64) // TOKENS


def record(store: Store, manifest: Manifest) -> list[bytes]:
    """Run the whole model once and return the content of every shard's golden file.

    Raises VerificationError where something is not a number, DeviceError.
    """
    model = assemble(store, manifest, 0, len(manifest.shards), position_axis=1, every_boundary=True)
    device = resolve("cpu")
    compiled = compile_model(model, StageOptions(device, "stateful", "exact"))
    stage = StatefulStage(compiled, device.name, 0, 0, rewinds=False, mask_rewinds=False)
    entry = Entry(SequenceId(0), 0, TOKENS, (TOKENS - 1,))
    tensors = list(stage.forward(Step((entry,), tokens=golden_tokens(manifest))))
    if not all(np.isfinite(rows).all() for rows in tensors):
        raise VerificationError("this model gives values that are not numbers")
    files = []
    for shard in manifest.shards:
        own, tensors = tensors[: len(shard.outputs)], tensors[len(shard.outputs) :]
        files.append(b"".join(rows.astype(_F32).tobytes() for rows in own))
    stage.close()
    return files


def golden_rows(store: Store, manifest: Manifest, index: int) -> tuple[Rows, ...]:
    """The golden outputs of shard `index`: one array for each boundary tensor.

    Raises InputError where the file is missing, CorruptFileError, SourceError where it is not of this model.
    """
    ref, shard = manifest.golden[index], manifest.shards[index]
    store.check(ref)
    flat = np.frombuffer(store.path(ref).read_bytes(), _F32).astype(np.float32)
    count = 1 if shard.kind == "head" else TOKENS
    widths = [tensor.shape[-1] for tensor in shard.outputs]
    if len(flat) != count * sum(widths):
        raise SourceError(f"{ref.name} has {len(flat)} numbers instead of {count} x {sum(widths)}")
    ends = np.cumsum([count * width for width in widths])
    return tuple(part.reshape(count, -1) for part in np.split(flat, ends[:-1]))
