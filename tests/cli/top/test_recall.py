"""The state that `peerd top` keeps: losses and speeds by step, traffic, and events."""

from __future__ import annotations

from typing import Any

import pytest

from peerd.cli.top.recall import KEPT_EVENTS, KEPT_STEPS, Poll, Recall, speeds_of
from peerd.control.protocol import EventInfo, PeersReply, StepInfo
from tests.cli.replies import counters, event_info, peers_reply, status_reply

Steps = tuple[StepInfo, ...]
Events = tuple[EventInfo, ...]


def step(number: int, loss: float = 1.0, time_s: float = 0.0) -> StepInfo:
    return StepInfo(step=number, loss=loss, tokens=100, time_s=time_s)


def poll(at_s: float = 0.0, *, peers: PeersReply | None = None, steps: Steps = (), events: Events = (), **status: Any) -> Poll:
    return Poll(at_s=at_s, status=status_reply(**status), peers=peers or peers_reply(), steps=steps, events=events)


def texts(recall: Recall) -> list[str]:
    return [event.text for event in recall.events]


def test_a_peers_way_through_the_swarm_is_told_step_by_step() -> None:
    kinds = ("joined", "suspect", "back", "leaving", "left", "gone")
    way = [event_info(number, kind, peer="x") for number, kind in enumerate(kinds)]
    moved = event_info(9, "moved", peer="x", stage=0, text="from stage 1")
    recall = Recall()
    for number, event in enumerate((*way, moved)):
        recall = recall.after(poll(float(number), events=(event,)))
    assert texts(recall) == [
        "x joined stage 1",
        "x fell silent in stage 1: suspect",
        "x was heard again in stage 1",
        "x began to leave stage 1",
        "x left stage 1",
        "x vanished from stage 1",
        "x moved from stage 1 to stage 0",
    ]
    assert recall.last_event == 9


def test_what_the_health_lines_say_and_what_came_before_is_no_event_here() -> None:
    before = event_info(4, "joined", time_s=99.0)
    recall = Recall(began_s=100.0).after(poll(events=(before, event_info(5, "raised", text="stage-empty: nobody serves stage 0"))))
    assert (texts(recall), recall.last_event) == ([], 5)


def test_a_peer_with_a_name_is_told_by_it_also_once_it_is_gone() -> None:
    swarm = peers_reply()
    anna = swarm["stages"][1]["peers"][0]
    anna["nickname"], anna["team"] = "anna", "rust"
    before = Recall().after(poll(peers=swarm, events=(event_info(1, "joined", peer=anna["id"]),)))
    after = before.after(poll(1.0, events=(event_info(2, "gone", peer=anna["id"]),)))
    name = f"..{anna['id'][-6:]} anna (rust)"
    assert texts(after) == [f"{name} joined stage 1", f"{name} vanished from stage 1"]


def test_many_at_once_are_counted() -> None:
    crowd = tuple(event_info(number, "joined", peer=f"p{number}") for number in range(40))
    assert texts(Recall().after(poll(events=crowd))) == ["40 peers: joined stage 1"]


def test_a_restarted_daemon_is_told_and_its_totals_start_anew() -> None:
    gone = event_info(3, "gone", peer="x")
    before = Recall().after(poll(0.0, counters=counters(bytes_sent=10**9), steps=(step(7),), events=(gone,)))
    after = before.after(poll(1.0, pid=9, counters=counters(bytes_sent=5), events=(event_info(1, "started"),)))
    assert texts(after) == ["x vanished from stage 1", "your daemon started and serves stage 1"]
    assert after.last_event == 1
    assert after.bytes_per_second() == (0.0, 0.0)
    assert 7 not in after.losses


def test_traffic_is_a_rate_over_the_last_seconds() -> None:
    recall = Recall()
    for at_s in range(60):
        sent = 1000 * at_s if at_s < 30 else 30_000
        recall = recall.after(poll(float(at_s), counters=counters(bytes_sent=sent, bytes_received=20 * at_s)))
    assert recall.bytes_per_second() == (0.0, 20.0)


def test_losses_come_from_the_history_and_else_from_what_was_seen() -> None:
    seen = peers_reply()
    seen["work_step"], seen["last_loss"] = 5, 2.5
    recall = Recall().after(poll(peers=seen, steps=(step(3, 4.0), step(4, 3.0))))
    assert dict(recall.losses) == {3: 4.0, 4: 3.0}
    recall = Recall().after(poll(peers=seen, steps=(step(3, 4.0),)))
    assert dict(recall.losses) == {3: 4.0, 4: 2.5}  # of the step before the one at work
    recall = recall.after(poll(1.0, peers=seen, steps=(step(4, 2.75),)))
    assert list(recall.losses.items()) == [(3, 4.0), (4, 2.75)]


def test_losses_that_are_no_numbers_are_left_out() -> None:
    recall = Recall().after(poll(steps=(step(0, float("nan")), step(1, float("inf")), step(2, 1.5))))
    assert recall.losses[2] == 1.5
    assert 0 not in recall.losses
    assert 1 not in recall.losses


def test_speeds_come_from_the_times_of_steps_this_daemon_saw_end() -> None:
    timed = tuple(step(number, time_s=1000.0 + number / 2) for number in range(10, 20))
    found = dict(speeds_of((step(8), step(9), *timed)))
    assert set(found) == set(range(11, 20))
    assert list(found.values()) == pytest.approx([200.0] * 9)


def test_memory_is_bounded() -> None:
    recall = Recall()
    for number in range(300):
        steps = tuple(step(number * 10 + k) for k in range(10))
        recall = recall.after(poll(float(number), steps=steps, events=(event_info(number, "joined"),)))
    assert len(recall.steps) == len(recall.losses) == KEPT_STEPS
    assert len(recall.events) == KEPT_EVENTS
    assert len(recall.traffic) <= 11
