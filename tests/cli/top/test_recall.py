"""What `peerd top` remembers: losses and speeds by step, traffic, and what befell whom."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.top.picture import picture_of
from peerd.cli.top.recall import KEPT_EVENTS, KEPT_STEPS, PeerPlace, Poll, Recall, changes, speeds_of
from peerd.control.protocol import PeersReply, StepInfo
from tests.cli.replies import counters, peer_info, peers_reply, status_reply

PLACES = st.dictionaries(st.sampled_from("abcdefgh"), st.builds(PeerPlace, st.integers(0, 3), st.booleans(), st.booleans()))


def step(number: int, loss: float = 1.0, time_s: float = 0.0) -> StepInfo:
    return StepInfo(step=number, loss=loss, tokens=100, time_s=time_s)


def poll(at_s: float = 0.0, *, peers: PeersReply | None = None, steps: tuple[StepInfo, ...] = (), **status: Any) -> Poll:
    return Poll(at_s=at_s, clock="12:00:00", status=status_reply(**status), peers=peers or peers_reply(), steps=steps)


def with_peers(*peers: dict[str, Any]) -> PeersReply:
    reply = peers_reply(num_stages=2, peers_per_stage=0)
    for fields in peers:
        reply["stages"][fields["stage"]]["peers"].append(peer_info(**fields))
    return reply


@given(PLACES)
def test_nothing_is_told_where_nothing_changed(places: dict[str, PeerPlace]) -> None:
    assert changes(places, places, "a") == []


@given(PLACES, PLACES)
def test_whoever_came_or_went_is_told(before: dict[str, PeerPlace], now: dict[str, PeerPlace]) -> None:
    told = changes(before, now, "me")
    came, went = now.keys() - before.keys(), before.keys() - now.keys()
    joined = sum(text.endswith(f"joined stage {place.stage}") for text in told for name, place in now.items() if text.startswith(name))
    if len(came) <= 5:
        assert joined == len(came)
    assert (not came and not went) or told


def test_a_peers_way_through_the_swarm_is_told_step_by_step() -> None:
    ways = [
        with_peers(),
        with_peers({"id": "x", "stage": 0}),
        with_peers({"id": "x", "stage": 0, "suspect": True}),
        with_peers({"id": "x", "stage": 0}),
        with_peers({"id": "x", "stage": 1}),
        with_peers({"id": "x", "stage": 1, "leaving": True}),
        with_peers(),
        with_peers({"id": "x", "stage": 0}),
        with_peers(),
    ]
    recall = Recall()
    for at_s, reply in enumerate(ways):
        recall = recall.after(poll(float(at_s), peers=reply))
    assert [event.text for event in recall.events] == [
        "x joined stage 0",
        "x fell silent in stage 0: suspect",
        "x was heard again in stage 0",
        "x moved from stage 0 to stage 1",
        "x began to leave stage 1",
        "x left stage 1",
        "x joined stage 0",
        "x vanished from stage 0",
    ]


def test_the_first_reading_is_no_news() -> None:
    assert Recall().after(poll()).events == ()


def test_of_a_stage_that_is_partly_known_nobody_is_told_to_come_or_go() -> None:
    recall = Recall()
    for number in range(3):
        swarm = with_peers({"id": "near", "stage": 0}, {"id": f"far{number}", "stage": 1})
        swarm["stages"][1]["num_peers"] = 125
        recall = recall.after(poll(float(number), peers=swarm))
    assert recall.events == ()
    assert picture_of(poll(peers=swarm), recall).num_peers == 126


def test_many_at_once_are_counted() -> None:
    crowd = peers_reply(num_stages=1, peers_per_stage=40)
    recall = Recall().after(poll(peers=peers_reply(num_stages=1, peers_per_stage=0))).after(poll(1.0, peers=crowd))
    assert [event.text for event in recall.events] == ["40 peers: joined stage 0"]


def test_a_restarted_daemon_is_told_and_its_totals_start_anew() -> None:
    before = Recall().after(poll(0.0, counters=counters(bytes_sent=10**9), steps=(step(7),)))
    after = before.after(poll(1.0, pid=9, counters=counters(bytes_sent=5)))
    assert [event.text for event in after.events] == ["your daemon was started again"]
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
        peers = with_peers({"id": f"p{number}", "stage": 0})
        recall = recall.after(poll(float(number), peers=peers, steps=tuple(step(number * 10 + k) for k in range(10))))
    assert len(recall.steps) == len(recall.losses) == KEPT_STEPS
    assert len(recall.events) == KEPT_EVENTS
    assert len(recall.traffic) <= 11
