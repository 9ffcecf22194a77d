"""What `scripts/bench audits` makes of its turns."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from scripts.benchmarks.audits import Row, Side, missed_by, report, row_of


def side(trust: str, step_s: list[float], cpu_s: list[float], **counts: int) -> Side:
    return Side(trust, cast(Any, None), cast(Any, None), step_s, cpu_s, Counter(counts), num_steps=10)


PLAIN = side("off", [1.0, 2.0, 4.0], [1.0, 1.0, 2.0], bytes_sent=30_000_000, boundary_bytes=10_000_000)


def audited(accused: int = 0, sent: int = 30_200_000, last_cpu_s: float = 2.0) -> Row:
    counts = {"bytes_sent": sent, "boundary_bytes": 10_000_000, "drawn": 3, "items": 240, "audits accused": accused}
    return row_of(side("audits", [1.1, 2.0, 4.0], [1.0, 1.1, last_cpu_s], **counts), PLAIN)


def test_a_row_has_the_pairs_and_what_the_steps_took_together() -> None:
    row = audited()
    assert row.step_ratio == pytest.approx((1.0, 1.0, 1.1))
    assert (row.cpu_all, row.bytes_ratio, row.boundary) == pytest.approx((4.1 / 4.0, 30.2 / 30.0, 0.02))
    plain = row_of(PLAIN, PLAIN)
    assert (plain.step_ratio, plain.boundary, plain.sent_mb) == (None, None, 3.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (audited(accused=1), "honest peers accused 1 times"),
        (audited(sent=31_000_000), "0.100 of the boundaries' bytes more"),
        (audited(last_cpu_s=3.0), "times the processor time"),
    ],
)
def test_it_ends_with_1_where_a_limit_does_not_hold(row: Row, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert missed_by(audited()) == []
    assert report([row_of(PLAIN, PLAIN), row], as_json=False) == 1
    told = capsys.readouterr()
    assert words in told.err
    assert "3 of 240 (6.0 usual)" in told.out
