"""What real daemons remember, count and tell: over a sudden death, and from either end of the pipeline."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peerd.cli.render_trace import timelines_of
from peerd.control.protocol import TraceReply
from peerd.observe.metrics import METRICS
from peerd.timeline.critical import critical_shares
from peerd.timeline.spans import SpanKind
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

PACE_MS = 20
PHASES = {"joining", "accumulating", "averaging", "averaged"}


def microbatches_by_stage(told: dict[str, Any]) -> dict[int, int]:
    return {stage["stage"]: sum(row["microbatches"] for row in stage["peers"]) for stage in told["stages"]}


def test_every_stage_remembers_every_step_and_all_agree_on_who_computed_what() -> None:
    with Swarm(swarm_manifest(num_stages=2, steps=6)) as swarm:
        first = swarm.start(stage=0, dashboard=True, compute_stand_in_ms=PACE_MS)
        last, mate = swarm.join(1, compute_stand_in_ms=PACE_MS), swarm.join(0, compute_stand_in_ms=PACE_MS)
        for daemon in swarm.daemons:
            daemon.wait_for_step(6)

        until(lambda: [entry["step"] for entry in first.history] == list(range(6)))
        assert [entry["loss"] for entry in first.history] == [entry["loss"] for entry in last.history]

        per_step = swarm.manifest.train.microbatches_per_step
        told = until(lambda: found if microbatches_by_stage(found := last.request("contributions")) == {0: 48, 1: 48} else {})
        assert per_step * 6 == 48
        rows = {(stage["stage"], row["peer"]): row for stage in told["stages"] for row in stage["peers"]}
        for daemon in (first, mate):  # one of them may have joined too late to hold any
            held = daemon.counters["accumulated_microbatches"]
            assert rows.get((0, daemon.ready.peer), {"microbatches": 0})["microbatches"] <= held
        assert rows[1, last.ready.peer]["microbatches"] == last.counters["accumulated_microbatches"] == 48
        assert rows[1, last.ready.peer]["tokens"] == 48 * swarm.manifest.tokens_per_microbatch

        samples = scrape(first.status["dashboard"])
        of_evaluations = {"peerd_evaluation_loss", "peerd_evaluation_step"}  # of which this run has none
        assert {name for name, _ in samples} == {metric.name for metric in METRICS} - of_evaluations
        assert samples["peerd_step", ()] == 6
        assert samples["peerd_averages_total", ()] == 6
        assert samples["peerd_microbatches_lost_total", ()] == 0
        assert {labels[0] for name, labels in samples if name == "peerd_phase_seconds_total"} == PHASES
        assert samples["peerd_stage_peers", ("0",)] == 2
        assert_all_told_what_they_did(first.request("trace", steps=3), {daemon.ready.peer for daemon in swarm.daemons}, per_step)
        assert_the_log_has_one_line_for_each_step_and_no_secret(first, last)


def assert_all_told_what_they_did(told: dict[str, Any], peers: set[str], per_step: int) -> None:
    """Of a run that has ended, in its last steps: every pass of every microbatch at both stages, each step's end, and right clocks."""
    assert (told["first_step"], told["last_step"], told["silent"]) == (3, 5, [])
    assert {peer["peer"] for peer in told["peers"]} == peers
    timelines = timelines_of(cast(TraceReply, told))
    for stage in (0, 1):
        passes = [(s.step, s.microbatch) for t in timelines if t.stage == stage for s in t.spans if s.kind is SpanKind.BACKWARD]
        assert sorted(set(passes)) == [(step, number) for step in (3, 4, 5) for number in range(per_step)]
    for timeline in timelines:
        assert [span.step for span in timeline.spans if span.kind is SpanKind.COMMIT] == [3, 4, 5]
        assert abs(timeline.offset_s) <= timeline.offset_error_s  # they run on one machine and have one clock
    path = critical_shares(timelines)
    assert 0.1 < path.compute < 1
    assert path.step_end > 0


def assert_the_log_has_one_line_for_each_step_and_no_secret(first: Daemon, last: Daemon) -> None:
    """Every line is an object with its level; the last stage's tell the loss."""
    for daemon in (first, last):
        told = [json.loads(line) for line in daemon.log.splitlines()]
        assert all({"event", "level", "timestamp"} <= fields.keys() for fields in told)
        finished = [fields for fields in told if fields["event"] == "step finished"]
        assert [fields["step"] for fields in finished] == list(range(6))
    assert [fields["loss"] for fields in finished] == [entry["loss"] for entry in last.history]
    token = json.loads(first.home.dashboard.read_text())["token"]
    assert token in first.request("dashboard")["address"]
    assert token not in first.log


def scrape(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(f"{address}metrics", timeout=20) as answer:  # noqa: S310 - our own address
        families = text_string_to_metric_families(answer.read().decode())
    return {(sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples}


@pytest.mark.slow
def test_the_past_survives_sigkill_and_nothing_is_counted_twice() -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        first = swarm.start(ephemeral=False, compute_stand_in_ms=PACE_MS)
        first.wait_for_step(8)
        until(lambda: len(first.history) >= 8)
        known = {entry["step"]: entry["loss"] for entry in first.history[:8]}
        first.kill()

        again = swarm.spawn_with(replace(first.settings, ephemeral=True))
        again.wait_for_step(10)
        told = until(lambda: found if len((found := again.request("history", events=True))["steps"]) >= 10 else {})
        assert {entry["step"]: entry["loss"] for entry in told["steps"] if entry["step"] in known} == known
        assert [event["kind"] for event in told["events"]].count("started") == 2
        (stage,) = again.request("contributions")["stages"]
        assert stage["peers"][0]["microbatches"] == stage["steps"] * swarm.manifest.train.microbatches_per_step
        assert stage["steps"] <= stage["last_step"] + 1


@pytest.mark.slow
def test_who_comes_and_who_is_killed_is_in_the_history() -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        first = swarm.start(compute_stand_in_ms=PACE_MS)
        first.wait_for_step(1)
        leaver, victim = swarm.join(0, compute_stand_in_ms=PACE_MS), swarm.join(0, compute_stand_in_ms=PACE_MS)
        leaver.wait_until_serving()
        victim.wait_until_serving()
        until(lambda: ("joined", victim.ready.peer) in told_by(first))
        leaver.request("leave")
        victim.kill()
        until(lambda: {("left", leaver.ready.peer), ("suspect", victim.ready.peer), ("gone", victim.ready.peer)} <= told_by(first))
        assert ("gone", leaver.ready.peer) not in told_by(first)


def told_by(daemon: Daemon) -> set[tuple[str, str]]:
    return {(event["kind"], event["peer"]) for event in daemon.request("history", events=True)["events"]}
