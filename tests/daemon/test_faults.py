"""The faults that a daemon can be told to show."""

from __future__ import annotations

from peerd.daemon.faults import FAULT_SITES, Point


def test_every_point_at_which_a_daemon_can_end_lies_at_a_method_that_is_there() -> None:
    assert [site for site in FAULT_SITES if not callable(getattr(site.owner, site.method, None))] == []
    at_sites = {point for site in FAULT_SITES for point in (*site.before, *site.after)}
    assert set(Point) - at_sites == {Point.QUEUED, Point.WAITING}, "these two lie within a call, not at its ends"
