"""Add a model and list its shards: `python examples/list_shards.py [SOURCE]`."""

import sys

from meshinfer.config import folders
from meshinfer.models.add import add_model
from meshinfer.shards.store import Store

source = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
manifest = add_model(Store(folders()), source)  # found in the store where it is there already

print(f"{manifest.name}: {len(manifest.shards)} shards, fingerprint {manifest.fingerprint()[:16]}")
for shard in manifest.shards:
    gives = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in shard.outputs)
    print(f"{shard.index:4} {shard.kind:10} {shard.size_bytes / 1e6:6.1f} MB  gives {gives}")
