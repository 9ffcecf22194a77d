"""How long connections that nothing uses are kept, and how many p2pd keeps, by the files that a daemon may open."""

from __future__ import annotations

import pytest

from peerd.policy.swarm.connections import UNUSED_IN_NEED_S, UNUSED_S, kept_unused_s, water_marks


def test_where_files_run_short_unused_connections_go_sooner() -> None:
    assert kept_unused_s(100, 1024) == UNUSED_S
    assert kept_unused_s(512, 1024) == UNUSED_IN_NEED_S < UNUSED_S


@pytest.mark.parametrize("limit", [256, 1024, 4096, 10_240, 1 << 16])
def test_p2pd_keeps_connections_to_all_near_peers_of_a_large_swarm_where_its_files_suffice(limit: int) -> None:
    low, high = water_marks(limit)
    assert low < high <= limit // 4
    assert low >= 1030 or limit < 10_240
