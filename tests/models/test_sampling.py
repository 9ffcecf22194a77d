"""Which token comes next: the likeliest, or one drawn from the likeliest, alike on every peer."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.models.sampling import choose
from peerd.policy.inference.sampling import Sampling, uniform

LOGITS = torch.tensor([0.0, 2.0, 1.0])


def drawn(count: int = 60, **sampling: float) -> Counter[int]:
    return Counter(choose(LOGITS, Sampling(**sampling), position) for position in range(count))  # type: ignore[arg-type]


def test_the_temperature_decides_between_the_likeliest_token_and_chance() -> None:
    assert choose(LOGITS, Sampling(), 0) == 1
    assert set(drawn(temperature=1.0)) == {0, 1, 2}
    assert set(drawn(temperature=0.01)) == {1}


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    found = drawn(4000, temperature=1.0)
    for token, chance in enumerate(LOGITS.softmax(0).tolist()):
        assert found[token] / 4000 == pytest.approx(chance, abs=0.03)


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it() -> None:
    """The probabilities are 0.67, 0.24 and 0.09."""
    assert set(drawn(temperature=1.0, top_p=0.5)) == {1}
    assert set(drawn(temperature=1.0, top_p=0.7)) == {1, 2}
    assert set(drawn(temperature=1.0, top_p=0.95)) == {0, 1, 2}


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40), st.floats(0.01, 10), st.floats(0.001, 1), st.integers(0, 2**31))
def test_any_request_draws_a_token_and_the_same_again(logits: list[float], temperature: float, top_p: float, seed: int) -> None:
    given_logits, sampling = torch.tensor(logits), Sampling(temperature=temperature, top_p=top_p, seed=seed)
    found = choose(given_logits, sampling, 5)
    assert 0 <= found < len(logits)
    assert choose(given_logits.clone(), sampling, 5) == found


def test_draws_depend_on_seed_and_position_alone() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400
    assert 0.4 < sum(uniform(0, position) for position in range(1000)) / 1000 < 0.6
