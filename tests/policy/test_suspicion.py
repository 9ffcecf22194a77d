"""How long others get to answer, by how often one was wrong about them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.suspicion import MOST_PATIENT, Patience


def test_who_is_wrong_waits_longer_and_less_so_with_time() -> None:
    patience = Patience(10.0)
    assert patience.factor(5.0) == 1
    once = patience.after_mistake(5.0)
    assert once.factor(5.0) == 2
    assert once.factor(15.0) == 1.5
    assert once.after_mistake(15.0).factor(15.0) == 2.5


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=40), st.floats(0, 1e6))
def test_it_is_never_shorter_than_usual_nor_longer_than_the_most(mistakes_s: list[float], later_s: float) -> None:
    patience = Patience(10.0)
    for at_s in sorted(mistakes_s):
        patience = patience.after_mistake(at_s)
        assert 2 <= patience.factor(at_s) <= MOST_PATIENT
    assert 1 <= patience.factor(max(mistakes_s) + later_s) <= patience.factor(max(mistakes_s))
