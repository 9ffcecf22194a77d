"""Real daemons tell others of their training: one trace over two of them, and TensorBoard's file of a third thing they know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.observe.collector import CollectedSpan, Collector, collecting
from tests.observe.test_sinks import scalars_in
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(240)]

PACE_MS = 20


def test_traces_join_over_two_daemons_and_scalars_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    with collecting() as collector, Swarm(swarm_manifest(num_stages=2, steps=6)) as swarm:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        first = swarm.start(stage=0, otel=True, tensorboard=str(tmp_path / "board"), compute_stand_in_ms=PACE_MS)
        last = swarm.join(1, otel=True, compute_stand_in_ms=PACE_MS)
        swarm.wait_for_step(6)
        until(lambda: joined(collector, first, last))
        for daemon in (last, first):
            daemon.request("leave")
            assert daemon.exit_code() == 0
        for spans in joined(collector, first, last):
            assert {"microbatch", "stage 0", "stage 1", "forward", "backward", "below"} <= {span.name for span in spans}
            ids = {span.id for span in spans}
            assert [span.name for span in spans if span.parent not in ids] == ["microbatch"], "everything else hangs below it"
        (file,) = (tmp_path / "board").iterdir()
        losses = {step: value for step, name, value in scalars_in(file) if name == "loss"}
        assert sorted(losses) == list(range(6))
        assert not any(said in first.log + last.log for said in ("no more scalars", "cannot export", "no OpenTelemetry"))


def joined(collector: Collector, first: Daemon, last: Daemon) -> list[list[CollectedSpan]]:
    """Traces of which both have exported their stage, and whoever launched it its root."""
    wanted = {("stage 0", first.ready.peer), ("stage 1", last.ready.peer)}
    told = [(spans, {(span.name, span.daemon) for span in spans}) for spans in collector.traces().values()]
    return [spans for spans, names in told if wanted <= names and "microbatch" in {name for name, _ in names}]


def test_a_collector_that_is_not_there_costs_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with Swarm(swarm_manifest(num_stages=1)) as swarm:
        alone = swarm.start(otel=True, wandb="project", compute_stand_in_ms=PACE_MS)
        until(lambda: "OpenTelemetry cannot export" in alone.log)
        step = alone.status["peer"]["step"]
        alone.wait_for_step(step + 5)
        alone.request("leave")
        assert alone.exit_code() == 0
        warnings = [json.loads(line)["event"] for line in alone.log.splitlines() if '"warning"' in line]
        assert sorted(warnings) == ["OpenTelemetry cannot export", "a sink failed and gets no more scalars"]
