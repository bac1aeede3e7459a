"""Continue four texts at once, all of them in every step: `python examples/four_at_once.py`."""

import numpy as np

from meshinfer.config import folders
from meshinfer.engine.devices import resolve
from meshinfer.engine.pipeline import even_cuts, open_pipeline
from meshinfer.engine.stage import StageOptions
from meshinfer.engine.step import Entry
from meshinfer.models.add import add_model
from meshinfer.shards.store import Store
from meshinfer.text.tokenizer import load_tokenizer
from meshinfer.types import SequenceId

TEXTS = ["The capital of France is", "Two and two make", "Water boils at", "The opposite of cold is"]
TOKENS = 8

store = Store(folders())
manifest = add_model(store, "smollm2-135m")
tokenizer = load_tokenizer({ref.name: store.path(ref) for ref in manifest.tokenizer}, store.folders)
options = StageOptions(resolve("cpu"), kv="paged", kv_budget_bytes=64 << 20)

with open_pipeline(store, manifest, even_cuts(manifest, 2), options) as pipeline:
    known = [tokenizer.encode(text, add_special=True) for text in TEXTS]
    fed = [0] * len(TEXTS)  # how many tokens of each text are in the KV cache
    for _ in range(TOKENS):
        entries, tokens = [], []
        for number, ids in enumerate(known):
            new = ids[fed[number] :]
            entries.append(Entry(SequenceId(number), fed[number], len(new), rows=(len(new) - 1,)))
            tokens += new
            fed[number] = len(ids)
        logits = pipeline.forward(entries, np.array(tokens))  # one row for each text
        for ids, row in zip(known, logits, strict=True):
            ids.append(int(row.argmax()))

for ids in known:
    print(tokenizer.decode(ids).replace("\n", " "))
