"""openvino-genai on the unsplit IR, as a contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshinfer.bench.clock import seconds_of
from meshinfer.engine.devices import compile_properties, converting
from meshinfer.engine.step import Tokens
from meshinfer.types import Precision


def genai_available(folder: Path) -> bool:
    """Whether openvino-genai can run this folder: it wants its own kind of tokenizer there."""
    return (folder / "openvino_tokenizer.xml").is_file()


class GenaiSingle:
    """`LLMPipeline`, one sequence. It only gives whole answers: its own time per output token is taken."""

    def __init__(self, folder: Path, precision: Precision, threads: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", **compile_properties("CPU", precision, threads))
        self._prompt = np.zeros((1, 0), np.int64)

    def start(self, prompts: Sequence[Tokens], tokens: int) -> None:
        """See `Contender`."""
        self._prompt = np.stack(prompts)

    def decode(self, steps: int) -> float:
        """See `Contender`."""
        import openvino

        config = self._genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True, do_sample=False)
        result = self._pipeline.generate(openvino.Tensor(self._prompt), config)
        return float(result.perf_metrics.get_tpot().mean) * steps / 1000

    def finish(self) -> None:
        """See `Contender`: nothing is kept between answers."""


class GenaiBatch:
    """`ContinuousBatchingPipeline`, driven step by step so that prefill stays outside the clock."""

    def __init__(self, folder: Path, precision: Precision, threads: int, sequences: int, tokens: int) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = tokens // 32 + 2 * sequences
        scheduler.max_num_seqs = max(sequences, 16)
        scheduler.max_num_batched_tokens = max(256, tokens)
        with converting("CPU", "opening openvino-genai's batching pipeline"):
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(
                str(folder), scheduler, "CPU", compile_properties("CPU", precision, threads)
            )
        self._handles: list[Any] = []
        self._next = 0

    def start(self, prompts: Sequence[Tokens], tokens: int) -> None:
        """See `Contender`."""
        import openvino

        config = self._genai.GenerationConfig(max_new_tokens=tokens + 8, ignore_eos=True, do_sample=False)
        for prompt in prompts:
            self._handles.append(self._pipeline.add_request(self._next, openvino.Tensor(prompt[None]), config))
            self._next += 1
        self._pipeline.step()

    def decode(self, steps: int) -> float:
        """See `Contender`."""
        return seconds_of(self._pipeline.step, steps)

    def finish(self) -> None:
        """See `Contender`."""
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._handles.clear()
