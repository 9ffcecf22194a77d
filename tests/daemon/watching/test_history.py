"""What a daemon tells of the past: every finished step with its time, as far back as was asked, in a bounded number of points."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.daemon.answers import Answers
from peerd.daemon.peer import Peer
from peerd.daemon.seating import reached_before
from peerd.daemon.watching.dashboard import POINTS, SHOWN_STEPS, Dashboard, Spot
from peerd.daemon.watching.history import Past
from peerd.observe.archive import Archive
from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.thinning import DAY_S, HOUR_S
from peerd.policy.step.accounts import EVERY, WorkDone
from peerd.policy.step.leaderboard import SignedStage, of_week
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.history import HistoryEntry
from peerd.table.record import PeerId
from tests.policy.account_world import signed_by, some_account
from tests.strategies import member, view_of
from tests.tiny_run import tiny_manifest


@pytest.fixture
async def archive(tmp_path: Path) -> AsyncIterator[Archive]:
    kept = Archive(tmp_path / "run.sqlite")
    yield kept
    await kept.close()


async def nothing_signed(_stage: int, _tellers: Sequence[PeerId]) -> SignedStage | None:
    return None


def peer_of(history: list[HistoryEntry], commit_times_s: dict[int, float], archive: Archive) -> Peer:
    seat = SimpleNamespace(state=SimpleNamespace(history=history, gradient_norms={}), commits=SimpleNamespace(times_s=commit_times_s))
    place, membership = SimpleNamespace(manifest=tiny_manifest()), SimpleNamespace(me="a")
    accounting = SimpleNamespace(signed_stage=nothing_signed)
    peer = cast(Peer, SimpleNamespace(seat=seat, membership=membership, place=place, archive=archive, accounting=accounting))
    peer.past = Past(peer, archive)
    return peer


def entry(step: int) -> HistoryEntry:
    return HistoryEntry(step=step, loss=5.0, tokens=10)


async def test_a_step_that_the_compute_thread_is_just_finishing_is_not_told_without_its_time(archive: Archive) -> None:
    """Its state knows the loss a moment before the event loop knows that the step is over."""
    times_s = {0: 100.0, 1: 101.0}
    past = peer_of([entry(0), entry(1), entry(2)], times_s, archive).past
    assert [(told["step"], told["time_s"]) for told in await past.steps(0)] == [(0, 100.0), (1, 101.0)]
    times_s[2] = 102.0
    assert [(told["step"], told["time_s"]) for told in await past.steps(0)][-1] == (2, 102.0)


async def test_steps_from_before_the_daemon_was_there_have_no_time(archive: Archive) -> None:
    past = peer_of([entry(0), entry(1)], {}, archive).past
    assert [(told["step"], told["time_s"]) for told in await past.steps(0)] == [(0, 0.0), (1, 0.0)]


async def test_events_of_present_peers_come_with_their_names(archive: Archive) -> None:
    peer = peer_of([], {}, archive)
    peer.membership.live = lambda: view_of(member("a"), member("b", nickname="anna", team="rust"), member("c", nickname="karl"))  # type: ignore[method-assign]
    for named in "abd":
        archive.note_event(Event(time_s=1.0, kind="joined", peer=named, stage=0))
    told = await peer.past.history({"events": True}, lambda _text: None)
    assert [each["peer"] for each in told["events"]] == ["a", "b", "d"]
    assert told["names"] == {"b": "anna (rust)"}


async def test_while_sequences_grow_a_peer_has_given_the_tokens_that_its_microbatches_had(archive: Archive) -> None:
    tiny = tiny_manifest()
    manifest = replace(tiny, train=replace(tiny.train, microbatches_per_step=4, first_sequence_length=8, sequence_length_steps=4))
    peer = peer_of([], {}, archive)
    peer.place.manifest, peer.membership.live = manifest, lambda: view_of(member("a"))  # type: ignore[misc, method-assign]
    entries = (RosterEntry(PeerId("a"), 1, 1, 0b111), RosterEntry(PeerId("b"), 1, 1, 0b1000))
    for step in range(8):
        archive.note_average(Roster(0, step, 1, PeerId("a"), entries), manifest.tokens_per_microbatch_at(step))
    (stage,) = (await peer.past.contributions({}, lambda _text: None))["stages"]
    real = sum(manifest.tokens_per_microbatch_at(step) for step in range(8))
    assert real < 8 * manifest.tokens_per_microbatch
    assert {row["peer"]: (row["microbatches"], row["tokens"]) for row in stage["peers"]} == {"a": (24, 3 * real), "b": (8, real)}


async def test_what_is_signed_is_told_beside_what_is_counted_and_some_are_not_named(archive: Archive) -> None:
    """Two have left and wanted no name. Nor does this daemon, whose own user sees its row."""
    peer = peer_of([], {}, archive)
    a, b, c = map(PeerId, "abc")
    peer.membership.live = lambda: view_of(replace(member("a"), unlisted=True))  # type: ignore[method-assign]
    for each in (b, c):
        archive.note_listed(each, False)
    archive.note_average(
        Roster(0, 0, 1, a, (RosterEntry(a, 1, 1, 0b1), RosterEntry(b, 1, 1, 0b10))), peer.place.manifest.tokens_per_microbatch
    )
    rows = {each: WorkDone(EVERY, number, 8 * number) for each, number in ((a, 100), (b, 70), (c, 30))}
    before = {a: WorkDone(6, 90, 720)}
    newest, old = (signed_by(some_account(step, works), works) for step, works in ((2 * EVERY, rows), (EVERY, before)))

    async def signed(_stage: int, _tellers: Sequence[PeerId]) -> SignedStage:
        return of_week((newest, rows), (old, before))

    peer.accounting.signed_stage = signed  # type: ignore[method-assign, assignment]
    told = await peer.past.contributions({}, lambda _text: None)
    (stage,) = told["stages"]
    shown = {row["peer"]: (row["microbatches"], row["signed_tokens"], row["week_tokens"]) for row in stage["peers"]}
    assert shown == {"a": (100, 800, 80), "": (100, 800, 800)}
    assert (stage["account"]["step"], stage["account"]["signatures"], stage["account"]["signers"]) == (2 * EVERY, 3, 3)
    archive.note_listed(c, True)
    (stage,) = (await peer.past.contributions({}, lambda _text: None))["stages"]
    assert {row["peer"] for row in stage["peers"]} == {"a", "", "c"}


async def test_a_founder_knows_from_its_history_how_far_the_run_had_come(archive: Archive) -> None:
    assert await reached_before(archive) == 0
    for step in (5, 6):
        archive.note_step(FinishedStep(step=step, loss=None, tokens=1, time_s=1.0))
    assert await reached_before(archive) == 7


async def reached(archive: Archive, reach_s: float) -> dict[str, Any]:
    peer = peer_of([], {}, archive)
    dashboard = Dashboard(cast(Spot, None), peer, cast(Answers, SimpleNamespace(run_info=dict)), None, public=False)
    return dict(await dashboard.past(reach_s))


async def test_the_page_gets_what_lies_within_its_range_in_a_bounded_number_of_points(archive: Archive) -> None:
    now_s = time.time()
    for number in range(10_000):  # ten days, a step and a sample every 86 s
        at_s = now_s - (9_999 - number) / 1000 * DAY_S
        archive.note_step(FinishedStep(step=number, loss=1.0, tokens=1, time_s=at_s if number else None))
        archive.note_sample(
            Sample(time_s=at_s, span_s=86.4, step=number, tokens_per_second=float(number), peers=(1,), queue=(0,), suspects=0)
        )
    archive.note_event(Event(time_s=now_s - 2 * DAY_S, kind="joined", peer="a", stage=0))
    for reach_s, steps in ((HOUR_S, 42), (DAY_S, 1000), (7 * DAY_S, 7000), (float("inf"), 10_000)):
        told = await reached(archive, reach_s)
        within = range(10_000 - steps, 10_000)
        shown = [row[0] for row in told["steps"]]
        assert shown[-1] == 9_999
        assert within.start <= shown[0] < within.start + 10
        assert min(steps, SHOWN_STEPS) / 2 <= len(shown) <= SHOWN_STEPS
        assert len(told["samples"]) <= POINTS
        assert [(kind, count) for _, kind, count in told["churn"]] == [("joined", 1)] * (reach_s >= 7 * DAY_S)
        assert told["samples"][0][0] >= now_s - reach_s - 1
        assert told["spacing_s"] * POINTS <= min(reach_s, 10 * DAY_S) + 1
        assert told["reach_s"] == (None if reach_s == float("inf") else reach_s)
