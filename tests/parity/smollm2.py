"""SmolLM2 exported with optimum-intel from the weights of the very GGUF that `smollm2-135m` is made of."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.parity.families import GRAPH, export, keep_export, quiet

PACKAGES = ("optimum-intel", "nncf", "transformers", "openvino", "torch", "gguf")


def exported_smollm2(gguf: Path, tokenizer: Sequence[Path], bits: int | None, cache: Path) -> Path:
    """A folder with the IR and the tokenizer: from the cache, else exported into it; `bits` as in `export`."""
    folder = _kept(cache, f"smollm2-{bits or 32}bit", gguf)
    if not (folder / GRAPH).exists():
        checkpoint = _checkpoint(gguf, cache)
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as work:
            made = export(checkpoint, Path(work) / "ir", bits)
            for path in tokenizer:
                shutil.copyfile(path, made / path.name)
            keep_export(made, folder)
    return folder


def _checkpoint(gguf: Path, cache: Path) -> Path:
    folder = _kept(cache, "smollm2-checkpoint", gguf)
    if not (folder / "config.json").exists():
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as work, quiet():
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
            model.save_pretrained(Path(work) / "checkpoint")
            keep_export(Path(work) / "checkpoint", folder)
    return folder


def _kept(cache: Path, name: str, gguf: Path) -> Path:
    """Where something made of this file by these packages is kept."""
    made_of = [gguf.name, gguf.stat().st_size, {package: version(package) for package in PACKAGES}]
    return cache / f"{name}-{hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]}"
