"""Where the time of a step goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of one decode step went, in seconds, over all stages; what is left is the network."""

    total_s: float
    scheduling_s: float
    waiting_s: float
    codec_s: float
    inference_s: float
    hops: int
    sequences: int

    @property
    def network_s(self) -> float:
        return max(0.0, self.total_s - self.scheduling_s - self.waiting_s - self.codec_s - self.inference_s)
