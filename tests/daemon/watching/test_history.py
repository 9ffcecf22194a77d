"""What a daemon tells of the past: every finished step with its time, as far back as was asked, in a bounded number of points."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.config.paths import Home
from peerd.daemon.answers import Answers
from peerd.daemon.node import Node
from peerd.daemon.run import ControlService
from peerd.daemon.watching.dashboard import POINTS, SHOWN_STEPS, Dashboard, Spot
from peerd.daemon.watching.history import Past
from peerd.observe.archive import Archive
from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.thinning import DAY_S, HOUR_S
from peerd.owner.governor import Governor
from peerd.policy.step.recovery import Beginning
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.export import HistoryEntry
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import member, view_of
from tests.tiny_run import tiny_manifest


@pytest.fixture
async def archive(tmp_path: Path) -> AsyncIterator[Archive]:
    kept = Archive(tmp_path / "run.sqlite")
    yield kept
    await kept.close()


def node_of(history: list[HistoryEntry], commit_times_s: dict[int, float]) -> Node:
    state = SimpleNamespace(history=history, gradient_norms={})
    place, membership = SimpleNamespace(manifest=tiny_manifest()), SimpleNamespace(me="a")
    return cast(
        Node,
        SimpleNamespace(state=state, commit_times_s=commit_times_s, membership=membership, place=place, evaluations=no_evaluations),
    )


async def no_evaluations() -> tuple[()]:
    return ()


def entry(step: int) -> HistoryEntry:
    return HistoryEntry(step=step, loss=5.0, tokens=10)


async def test_a_step_that_the_compute_thread_is_just_finishing_is_not_told_without_its_time(archive: Archive) -> None:
    """Its state knows the loss a moment before the event loop knows that the step is over."""
    node = node_of([entry(0), entry(1), entry(2)], {0: 100.0, 1: 101.0})
    past = Past(node, archive)
    assert [(told["step"], told["time_s"]) for told in await past.steps(0)] == [(0, 100.0), (1, 101.0)]
    node.commit_times_s[2] = 102.0
    assert [(told["step"], told["time_s"]) for told in await past.steps(0)][-1] == (2, 102.0)


async def test_steps_from_before_the_daemon_was_there_have_no_time(archive: Archive) -> None:
    past = Past(node_of([entry(0), entry(1)], {}), archive)
    assert [(told["step"], told["time_s"]) for told in await past.steps(0)] == [(0, 0.0), (1, 0.0)]


async def test_while_sequences_grow_a_peer_has_given_the_tokens_that_its_microbatches_had(archive: Archive) -> None:
    tiny = tiny_manifest()
    manifest = replace(tiny, train=replace(tiny.train, microbatches_per_step=4, first_sequence_length=8, sequence_length_steps=4))
    node = node_of([], {})
    node.place.manifest, node.membership.live = manifest, lambda: view_of(member("a"))  # type: ignore[misc, method-assign]
    entries = (RosterEntry(PeerId("a"), 1, 1, 0b111), RosterEntry(PeerId("b"), 1, 1, 0b1000))
    for step in range(8):
        archive.note_average(Roster(0, step, 1, PeerId("a"), entries), manifest.tokens_per_microbatch_at(step))
    (stage,) = (await Past(node, archive).contributions({}, lambda _text: None))["stages"]
    real = sum(manifest.tokens_per_microbatch_at(step) for step in range(8))
    assert real < 8 * manifest.tokens_per_microbatch
    assert {row["peer"]: (row["microbatches"], row["tokens"]) for row in stage["peers"]} == {"a": (24, 3 * real), "b": (8, real)}


@pytest.mark.parametrize(("run_file", "checkpoints", "known"), [("run.toml", (), 7), ("", (), 0), ("run.toml", (5,), 0)])
async def test_a_founder_without_a_checkpoint_knows_from_its_history_how_far_the_run_had_come(
    archive: Archive, run_file: str, checkpoints: tuple[int, ...], known: int
) -> None:
    for step in (5, 6):
        archive.note_step(FinishedStep(step=step, loss=None, tokens=1, time_s=1.0))
    service = ControlService(cast(Home, None), cast(Governor, None))
    service._archive = archive
    state, stepper = SimpleNamespace(record=PeerRecord(peer=PeerId("a"), checkpoints=checkpoints)), SimpleNamespace(beginning=Beginning())
    await service._recall(cast(Node, SimpleNamespace(settings=SimpleNamespace(run_file=run_file), state=state, stepper=stepper)))
    assert stepper.beginning == Beginning(reached=known)


async def reached(archive: Archive, reach_s: float) -> dict[str, Any]:
    dashboard = Dashboard(cast(Spot, None), archive, public=False)
    answers = cast(Answers, SimpleNamespace(run_info=dict))
    dashboard._node, dashboard._answers = node_of([], {}), answers
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
