"""The looks that `scripts/bench looks` times are of the moments that they are named for, and each bar is that of some look."""

from __future__ import annotations

import pytest

from peerd.policy.step.acts import FetchSection, Wait, Working
from scripts.benchmarks._looks import Table, looks
from scripts.benchmarks.looks import BARS_MS, bar_ms_of

LOOKS = looks(Table(peers=80, microbatches=96), 4)


@pytest.mark.parametrize(
    ("moment", "act"),
    [
        ("while it is computed", Working),
        ("once all is held", Wait),
        ("while sums are made", Wait),
        ("once all sums stand", Wait),
        ("while sections are gathered", FetchSection),
    ],
)
def test_a_decision_in_groups_is_looked_at_in_each_moment_of_a_step(moment: str, act: type) -> None:
    assert type(LOOKS[f"groups: decision {moment}"]()) is act


def test_each_decision_has_a_bar_and_each_bar_is_of_a_look() -> None:
    assert all(bar_ms_of(name) < 10 for name in LOOKS if "decision" in name)
    assert all(any(name.startswith(begins) for name in LOOKS) for begins in BARS_MS)
