"""Draws are repeatable, stay within their limits, and have the distribution that was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from meshinfer.engine.sampling import Sampling, choose
from meshinfer.errors import InputError

logits = arrays(np.float32, 40, elements=st.floats(-20, 20, width=32))


@given(logits, st.integers(0, 1000))
def test_temperature_0_takes_the_likeliest(values: np.ndarray[Any, Any], position: int) -> None:
    assert choose(values, Sampling(), position) == int(values.argmax())


@given(logits, st.integers(1, 40), st.integers(0, 50))
def test_top_k_keeps_k(values: np.ndarray[Any, Any], k: int, position: int) -> None:
    token = choose(values, Sampling(temperature=1.0, top_k=k), position)
    assert (values > values[token]).sum() < k


@given(logits, st.floats(0.01, 1.0), st.integers(0, 50))
def test_top_p_keeps_the_fewest_that_reach_p(values: np.ndarray[Any, Any], p: float, position: int) -> None:
    token = choose(values, Sampling(temperature=1.0, top_p=p), position)
    wide = np.exp(values.astype(np.float64) - values.max())
    likelier = wide[values > values[token]].sum() / wide.sum()
    assert likelier < p + 1e-9


@given(logits, st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_draw_depends_on_seed_and_position_only(values: np.ndarray[Any, Any], seed: int, position: int) -> None:
    sampling = Sampling(temperature=0.7, seed=seed)
    assert choose(values, sampling, position) == choose(values.copy(), sampling, position)


def test_draws_have_the_distribution_of_the_logits() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    values = np.log(probabilities).astype(np.float32)
    draws = [choose(values, Sampling(temperature=1.0, seed=7), position) for position in range(4000)]
    counts = np.bincount(draws, minlength=4)
    chi_square = float(((counts - 4000 * probabilities) ** 2 / (4000 * probabilities)).sum())
    assert chi_square < 16.27  # 0.1 % for three degrees of freedom


def test_temperature_sharpens() -> None:
    values = np.log(np.array([0.6, 0.4])).astype(np.float32)
    shares = [
        np.mean([choose(values, Sampling(temperature=t), position) == 0 for position in range(1000)])
        for t in (0.3, 1.0, 3.0)
    ]
    assert shares[0] > shares[1] > shares[2] > 0.45


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"temperature": 101}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"seed": -1}]
)
def test_values_out_of_range_are_input_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sampling(**wrong)
