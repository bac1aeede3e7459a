"""Where the time of a step goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of one decode step went, in seconds, over all stages; what is left is the network."""

    at: float
    """When it came round, in monotonic seconds."""
    total_s: float
    scheduling_s: float
    waiting_s: float
    codec_s: float
    inference_s: float
    stages_s: tuple[float, ...]
    """Inference in each stage, in the order of the ring."""
    sequences: int

    @property
    def hops(self) -> int:
        return len(self.stages_s)

    @property
    def network_s(self) -> float:
        return max(0.0, self.total_s - self.scheduling_s - self.waiting_s - self.codec_s - self.inference_s)
