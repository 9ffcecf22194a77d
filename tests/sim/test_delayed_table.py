"""The simulated table: what planners know, when, and with what error."""

from __future__ import annotations

import random

import pytest

from peerd.sim.delayed_table import DelayedTable
from peerd.sim.devices import Device
from peerd.sim.simulated_swarm import SimulatedPeer
from peerd.table.record import PeerId, Phase


def peer_of(number: int, stage: int = 0, speed: float = 1.0, *, serving: bool = True) -> SimulatedPeer:
    return SimulatedPeer(PeerId(f"peer{number}"), Device(speed, 0.0), stage, serving)


def table_of(*peers: SimulatedPeer, delay_s: float = 0.0, noise: float = 0.0) -> DelayedTable:
    table = DelayedTable(2, delay_s, noise, random.Random(0))
    for peer in peers:
        table.publish(0.0, peer)
    table.advance(delay_s)
    return table


def test_news_are_known_when_their_delay_is_over() -> None:
    table, peer = table_of(delay_s=5.0), peer_of(1, serving=False)
    table.publish(10.0, peer)
    peer.serving = True
    table.publish(12.0, peer)
    table.withdraw(20.0, peer)
    seen = []
    for now_s in (14.9, 15.0, 17.0, 24.9, 25.0):
        table.advance(now_s)
        seen.append([record.phase for record in table.view(with_queues=False).records])
    assert seen == [[], [Phase.JOINING], [Phase.ACCUMULATING], [Phase.ACCUMULATING], []]


def test_a_joiner_is_sent_where_the_members_add_up_to_least_those_downloading_included() -> None:
    table = table_of(peer_of(1, 0, 4.0), peer_of(2, 1, 1.0))
    assert table.weakest_stage(PeerId("new")) == 1
    table.publish(0.0, peer_of(3, 1, 3.5, serving=False))
    table.advance(0.0)
    assert table.weakest_stage(PeerId("new")) == 0


def test_a_stage_that_everybody_left_comes_first() -> None:
    gone = peer_of(2, 1, 0.1)
    table = table_of(peer_of(1, 0, 0.3), gone)
    table.withdraw(0.0, gone)
    table.advance(0.0)
    assert table.weakest_stage(PeerId("new")) == 1


def test_the_weaker_a_stage_the_more_is_queued_there() -> None:
    peers = [peer_of(n, stage=0 if n < 12 else 1) for n in range(20)]
    records = table_of(*peers).view(with_queues=True).records
    strong, weak = (sum(record.backlog for record in records if record.stage == stage) for stage in (0, 1))
    assert 0 < strong < weak


def test_nothing_is_queued_at_who_still_downloads() -> None:
    records = table_of(peer_of(1, 0), peer_of(2, 1), peer_of(3, 0, serving=False)).view(with_queues=True).records
    assert [record.backlog > 0 for record in records] == [True, True, False]


def test_measured_values_are_off_by_the_noise() -> None:
    table = table_of(*(peer_of(n) for n in range(500)), noise=0.2)
    measured = [record.throughput for record in table.view(with_queues=False).records]
    assert len(set(measured)) == 500
    assert sum(measured) / 500 == pytest.approx(1.0, abs=0.05)
    assert 0.15 < (sum((value - 1) ** 2 for value in measured) / 500) ** 0.5 < 0.25
