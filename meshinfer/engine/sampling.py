"""Choose the next token from logits. Pure: the draw depends on the seed and the position only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshinfer.errors import InputError

_MOST = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Greedy where `temperature` is 0. `top_k` 0 and `top_p` 1 leave all tokens in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise InputError(f"temperature is 0 to 100, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p is above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise InputError(f"top-k is 0 (off) or more, not {self.top_k}")
        if not 0 <= self.seed <= _MOST:
            raise InputError(f"the seed is 0 to {_MOST}, not {self.seed}")


def choose(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token at `position`, from its logits [vocabulary].

    Draws by inverse transform over the kept tokens in order of falling probability, so that a small
    change of the logits rarely changes the token.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to minus infinity
        scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    keep = len(scaled) if sampling.top_k == 0 else min(sampling.top_k, len(scaled))
    order = np.argsort(-scaled, kind="stable")[:keep]
    weights = np.exp(scaled[order])
    probabilities = weights / weights.sum()
    mass = np.cumsum(probabilities)
    nucleus = int(np.searchsorted(mass, sampling.top_p * (1 - 1e-12))) + 1
    mass = mass[: min(nucleus, keep)]
    draw = np.random.Generator(np.random.Philox(key=np.array([sampling.seed, position], np.uint64))).random() * mass[-1]
    return int(order[min(int(np.searchsorted(mass, draw, side="right")), len(mass) - 1)])
