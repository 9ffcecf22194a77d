"""The network of a running swarm, from what `peerd peers --json` says of it."""

from __future__ import annotations

from typing import Any

import pytest

from peerd.planner.network_formats import UNKNOWN_DELAY_S, swarm_network
from tests.cli.replies import peer_info, peers_reply


def reply_of(*peers: dict[str, Any]) -> Any:
    reply: Any = peers_reply(num_stages=1, peers_per_stage=1)
    reply["stages"][0]["peers"] = [peer_info(id=f"peer-{number}", **fields) for number, fields in enumerate(peers)]
    return reply


def test_reliable_are_the_peers_that_say_that_they_stay_and_all_where_nobody_does() -> None:
    said = swarm_network(reply_of({"stays_hours": 3}, {"stays_hours": 0}, {}), 1)
    assert [peer.is_reliable for peer in said.peers] == [True, False, False]
    assert all(peer.is_reliable for peer in swarm_network(reply_of({}, {"stays_hours": 0}), 1).peers)


def test_delays_follow_from_coordinates_within_what_the_asked_daemon_has_measured() -> None:
    here, near, far = [0.0, 0.0, 0.001, 0.05], [0.01, 0.0, 0.001, 0.05], [0.3, 0.0, 0.001, 0.05]
    found = swarm_network(
        reply_of({"coordinate": here}, {"coordinate": near, "round_trip_s": 0.012}, {"coordinate": far, "round_trip_s": 0.1}), 1
    )
    assert found.delay_s[0][1] == pytest.approx(0.006)
    assert found.delay_s[0][2] == pytest.approx(0.05)
    assert found.delay_s[1][2] == found.delay_s[2][1] == pytest.approx(0.056)


def test_a_visitor_has_measured_nothing_and_older_peers_say_nothing() -> None:
    placed = {"coordinate": [0.0, 0.0, 0.001, 0.05], "round_trip_s": None}
    away = {"coordinate": [0.1, 0.0, 0.001, 0.05], "round_trip_s": None}
    found = swarm_network(reply_of(placed, away, {"round_trip_s": None}), 1)
    assert found.delay_s[0][1] == pytest.approx(0.051)
    assert found.delay_s[0][2] == UNKNOWN_DELAY_S
