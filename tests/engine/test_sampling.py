"""The next token: limits are kept, draws depend on seed and position alone, and follow the distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from meshinfer.engine.sampling import Sampling, choose
from meshinfer.errors import InputError

DRAWS = 4000

Logits = npt.NDArray[np.float32]

some_logits = arrays(np.float32, st.integers(1, 40), elements=st.floats(-20, 20, width=32))


def softmax(logits: Logits, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


@given(some_logits, st.integers(0, 5), st.integers(0, 2**64 - 1))
def test_greedy_takes_the_first_of_the_best(logits: Logits, position: int, seed: int) -> None:
    assert choose(logits, Sampling(seed=seed), position) == int(np.flatnonzero(logits == logits.max())[0])


@given(some_logits, st.integers(1, 50), st.integers(0, 1000))
def test_top_k_leaves_only_the_best_k(logits: Logits, top_k: int, position: int) -> None:
    token = choose(logits, Sampling(temperature=2.0, top_k=top_k), position)
    assert (logits > logits[token]).sum() < top_k


@given(some_logits, st.floats(0.01, 1), st.floats(0.1, 5), st.integers(0, 1000))
def test_top_p_leaves_the_smallest_set_of_that_mass(
    logits: Logits, top_p: float, temperature: float, position: int
) -> None:
    token = choose(logits, Sampling(temperature=temperature, top_p=top_p), position)
    more_probable = softmax(logits, temperature)[logits > logits[token]].sum()
    assert more_probable < top_p + 1e-9


def test_a_nucleus_that_ends_on_a_token_does_not_take_the_next() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.25], np.float32))
    drawn = {choose(logits, Sampling(temperature=1.0, top_p=0.5), position) for position in range(200)}
    assert drawn == {0}


@given(some_logits, st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_draw_is_repeatable(logits: Logits, seed: int, position: int) -> None:
    sampling = Sampling(temperature=0.7, seed=seed)
    token = choose(logits, sampling, position)
    choose(logits, sampling, position + 1)
    np.random.default_rng(seed).random(9)
    assert choose(logits.copy(), sampling, position) == token


@pytest.mark.parametrize("seed", [0, 2**53, 2**63 - 1, 2**64 - 2])
def test_neighbouring_seeds_and_positions_draw_anew(seed: int) -> None:
    logits = np.zeros(1000, np.float32)
    first, second = (
        [choose(logits, Sampling(temperature=1.0, seed=one), position) for position in range(50)]
        for one in (seed, seed + 1)
    )
    assert len(set(first)) > 40
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 5


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize(
    ("limits", "kept"),
    [({}, 8), ({"temperature": 0.5}, 8), ({"top_k": 3}, 3), ({"top_p": 0.7}, 4)],
)
def test_draws_follow_the_distribution(limits: dict[str, Any], kept: int, seed: int) -> None:
    """Chi-square stays below its mean plus five standard deviations."""
    logits = np.array([0.3, -1.0, 1.2, 0.9, -0.4, 0.0, 0.6, -2.0], np.float32)
    sampling = Sampling(**{"temperature": 1.0, "seed": seed, **limits})
    expected = softmax(logits, sampling.temperature)
    expected[np.argsort(-logits)[kept:]] = 0
    expected *= DRAWS / expected.sum()
    counts = np.bincount([choose(logits, sampling, position) for position in range(DRAWS)], minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    chi_square = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    assert chi_square < (kept - 1) + 5 * math.sqrt(2 * (kept - 1))


def test_temperature_sharpens() -> None:
    logits = np.log(np.array([0.6, 0.4], np.float32))
    cold, even, hot = (
        np.mean([choose(logits, Sampling(temperature=temperature), position) == 0 for position in range(1000)])
        for temperature in (0.3, 1.0, 3.0)
    )
    assert cold > even > hot > 0.45


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 100.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.1}, "top-p"),
        ({"top_p": math.nan}, "top-p"),
        ({"top_k": -1}, "top-k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Sampling(**values)


def test_extreme_logits_are_no_trouble() -> None:
    logits = np.array([-np.inf, 1e30, -1e30, 0], np.float32)
    assert {choose(logits, Sampling(temperature=t), 0) for t in (0.0, 0.01, 1.0, 100.0)} == {1}
