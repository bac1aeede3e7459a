"""The heavy half of a conversion, run as `python -m meshinfer.sources.child`: its memory and crashes stay there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from meshinfer.sources.source import IR_GRAPH, IR_WEIGHTS

GROUP_SIZE = 64

_NO_SUCH_PROPERTY = "MESHINFER_DO_NOT_COMPILE"


def convert_gguf(gguf: Path) -> None:
    """Write the IR of a GGUF file beside it.

    openvino-genai converts only on its way to a pipeline. The files are written before it compiles; a property that
    no device has stops it there, which halves the time and saves the memory of a compiled model.
    """
    import openvino_genai

    try:
        openvino_genai.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True, **{_NO_SUCH_PROPERTY: True})
    except RuntimeError as error:
        if _NO_SUCH_PROPERTY not in str(error):
            raise
    _restore_zero_points(gguf)


def _restore_zero_points(gguf: Path) -> None:
    from meshinfer.sources.zero_points import restore_zero_points

    graph, exact = gguf.with_name(IR_GRAPH), gguf.with_name("exact.xml")
    if restore_zero_points(gguf, graph, exact):
        exact.replace(graph)
        exact.with_suffix(".bin").replace(gguf.with_name(IR_WEIGHTS))


def export_checkpoint(checkpoint: Path, output: Path, bits: int) -> None:
    """Write the IR of a Hugging Face checkpoint, its weights in 4 (groups of 64), 8, 16 or 32 bits."""
    from optimum.exporters.openvino import main_export

    main_export(
        model_name_or_path=str(checkpoint),
        output=str(output),
        task="text-generation-with-past",
        library_name="transformers",
        ov_config=_export_config(bits),
        local_files_only=True,
    )


def _export_config(bits: int) -> Any:
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    if bits in (16, 32):
        return OVConfig(dtype=f"fp{bits}")
    if bits == 8:
        return OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=True))
    quantization = OVWeightQuantizationConfig(
        bits=4, sym=True, group_size=GROUP_SIZE, ratio=1.0, group_size_fallback="adjust"
    )
    return OVConfig(quantization_config=quantization)


def main(arguments: list[str]) -> int:
    """`gguf FILE` or `checkpoint FOLDER OUTPUT BITS`, and first the file to write an error to."""
    report, kind, *rest = arguments
    try:
        if kind == "gguf":
            convert_gguf(Path(rest[0]))
        else:
            export_checkpoint(Path(rest[0]), Path(rest[1]), int(rest[2]))
    except Exception as error:
        Path(report).write_text(json.dumps({"type": type(error).__name__, "text": str(error)}), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
