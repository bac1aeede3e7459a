"""Measure a claim of CLAIMS.md and write what came out to results/: `python reproduction/run.py CLAIM [options]`.

    python reproduction/run.py reorder --contexts 128,512,1024,2048
    python reproduction/run.py stages --stages 1,2,3

Run nothing else on the machine meanwhile. The contenders take turns within each round; medians over the rounds are
compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from meshinfer import __version__
from meshinfer.bench.stage import WARM_STEPS, BenchOptions, PlainLoop, as_json, check_options, measure
from meshinfer.config import folders
from meshinfer.engine.devices import core, resolve
from meshinfer.models.add import add_model
from meshinfer.models.check import unsplit_graph
from meshinfer.shards.dims import keep_broadcast_dims
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.reorder import inject_reorder
from meshinfer.shards.store import Store

RESULTS = Path(__file__).parent / "results"


def numbers(text: str) -> tuple[int, ...]:
    """A list such as 1,2,3."""
    return tuple(int(part) for part in text.split(","))


def without_reorder(model: ov.Model) -> int:
    """Take every `Gather(state, beam_idx)` out of a model, in place; returns how many there were."""
    (beam_idx,) = [p for p in model.get_parameters() if "beam_idx" in p.output(0).get_names()]
    gathers = [target.get_node() for target in beam_idx.output(0).get_target_inputs()]
    for gather in gathers:
        for reader in gather.output(0).get_target_inputs():
            reader.replace_source_output(gather.input_value(0))
    model.remove_parameter(beam_idx)
    for node in model.get_ordered_ops():
        keep_broadcast_dims(node)  # attention that is not fused looks at them
    model.validate_nodes_and_infer_types()
    return len(gathers)


@contextmanager
def variants(graph: Path) -> Iterator[dict[str, Path]]:
    """The IR without the gathers, and the same with those that meshinfer injects, on disk."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {"without": Path(folder) / "without.xml", "with": Path(folder) / "with.xml"}
        model = core().read_model(graph)
        removed = without_reorder(model)
        ov.serialize(model, paths["without"])
        assert inject_reorder(model) == removed
        ov.serialize(model, paths["with"])
        yield paths


def reorder(graph: Path, manifest: Manifest, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode with and without the beam_idx gather after contexts of several lengths."""
    rows = []
    with variants(graph) as paths:
        models = {name: PlainLoop(path, options.precision, options.threads) for name, path in paths.items()}
        for context in options.contexts:
            times: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(options.rounds):
                for name, model in models.items():
                    times[name].append(decode_s(model, context, options.decode_tokens) / options.decode_tokens)
            medians = {name: statistics.median(values) for name, values in times.items()}
            rows.append(
                {
                    "context_tokens": context,
                    "ms_a_token": {name: round(value * 1e3, 3) for name, value in medians.items()},
                    "speedup": round(medians["without"] / medians["with"], 3),
                }
            )
    return rows


def decode_s(model: PlainLoop, context: int, steps: int) -> float:
    """Seconds for `steps` tokens after `context` tokens."""
    model.start([np.random.default_rng(0).integers(100, 200, context, dtype=np.int64)], WARM_STEPS + steps)
    model.decode(WARM_STEPS)
    return model.decode(steps)


def stages(graph: Path, manifest: Manifest, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode with the model in several stages of one process, beside the unsplit model."""
    chosen = BenchOptions(
        stages=options.stages,
        kv=manifest.kv_backends,
        sequences=options.sequences,
        precision=options.precision,
        threads=options.threads,
        decode_tokens=options.decode_tokens,
        rounds=options.rounds,
    )
    check_options(manifest, chosen)
    rows: list[dict[str, Any]] = as_json(manifest, chosen, measure(Store(folders()), manifest, graph, chosen))["rows"]
    return rows


CLAIMS: dict[str, Callable[[Path, Manifest, argparse.Namespace], list[dict[str, Any]]]] = {
    "reorder": reorder,
    "stages": stages,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("--source", default="smollm2-135m", help="model to measure; added where it is missing")
    parser.add_argument("--precision", choices=("exact", "fast"), default="fast")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--contexts", type=numbers, default=(128, 512, 1024, 2048), help="for reorder")
    parser.add_argument("--stages", type=numbers, default=(1, 2, 3), help="for stages")
    parser.add_argument("--sequences", type=numbers, default=(1,), help="for stages")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    store = Store(folders())
    manifest = add_model(store, options.source)
    with unsplit_graph(store, manifest) as graph:
        rows = CLAIMS[options.claim](graph, manifest, options)
    settings = {name: value for name, value in vars(options).items() if name not in ("claim", "out")}
    result = {
        "claim": options.claim,
        "settings": settings,
        "model": {"name": manifest.name, "fingerprint": manifest.fingerprint(), "precision": manifest.precision},
        "machine": {"cpu": resolve("cpu").full_name, "system": platform.platform()},
        "versions": {"meshinfer": __version__, **{name: version(name) for name in ("openvino", "openvino-genai")}},
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.claim}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(rows, indent=1))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
